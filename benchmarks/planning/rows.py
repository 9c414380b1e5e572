"""A published row as a `.moe` file that states every word as it was run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

from planning.models import cluster_text, depth_of, model_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The words of `parallel` as the run had them, and the sequences of a micro-batch."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    virtual: int = 1
    ep: int = 1
    etp: int = 1
    zero: int = 1
    microbatch: int = 1
    recompute: str = "none"
    schedule: str = ""

    def text(self, microbatches: int, depth: int) -> str:
        words = [f"{word} = {getattr(self, word)}" for word in ("tp", "cp", "ep", "etp", "zero", "recompute")]
        words.append(f"microbatches = {microbatches}")
        if self.pp > 1:
            words += [f"pp = {self.pp}", f"virtual = {self.virtual}", f"schedule = {self.schedule}"]
            if stages := stages_of(depth, self.pp * self.virtual):
                words.append(f"stages = [{', '.join(stages)}]")
        return f"parallel {{ {'; '.join(words)} }}\n"


def stages_of(depth: int, number: int) -> list[str]:
    """Equal stages, or with a layer less in the first and last, as Megatron counts embedding and head; else moec's."""
    per, left = divmod(depth, number)
    if left == 0:
        sizes = [per] * number
    elif (depth + 2) % number == 0 and (depth + 2) // number > 1:
        per = (depth + 2) // number
        sizes = [per - 1, *[per] * (number - 2), per - 1]
    else:
        return []
    return [f"{first}..{after - 1}" for first, after in pairwise(accumulate(sizes, initial=0))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One row: what ran where, and its speed by the source in one of three measures.

    `text` is the `.moe` file. `mfu` and `tflops` are by the source's own count of FLOPs; `step` are seconds.
    `ranks_only`: the error says nothing, for the precision or the batch is assumed. `once_per_node`: a token was sent
    to a node once for all of its experts there. `dropless`: shapes are known after routing only. `peak`: bytes of
    memory. `learned`: the speed with a learned router over that with an even load.
    """

    source: str
    model: str
    device: str
    precision: str
    gpus: int
    batch: int
    sequence: int
    name: str
    text: str
    step: float | None = None
    mfu: float | None = None
    tflops: float | None = None
    ranks_only: bool = False
    once_per_node: bool = False
    dropless: bool = False
    peak: float | None = None
    learned: float | None = None
    release: str = ""
    assumed: tuple[str, ...] = ()

    @property
    def twins(self) -> tuple[object, ...]:
        """Equal for rows that differ in layout alone: micro-batches and recomputation count as layout."""
        run = (self.source, self.release, self.model, self.device, self.precision)
        return (*run, self.gpus, self.batch, self.sequence)


def name_of(row: Mapping[str, Any]) -> str:
    """Model, device, and the degrees that are not 1; where stated, the sequences of a step and their tokens."""
    words = [f"{word} {size}" for word, size in row["layout"].items() if size != 1]
    run = f"{row['gpus']} {row['device']}: {' '.join([row.get('method', ''), *words]).strip()}"
    return f"{row['model']}, {run}" + f", {row.get('gbs')} × {row.get('seq')}" * ("gbs" in row and "seq" in row)


@dataclass(slots=True)
class Rows:
    """What can be stated, and why the rest cannot, by the row's name."""

    stated: list[Published] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)

    def add(self, row: Mapping[str, Any], plan: Plan, source: str, **more: Any) -> None:
        """States `row`, with `model`, `gpus`, `gbs`, `seq`, `device`, `precision` and `layout`."""
        assumed = list(more.pop("assumed", ()))
        gpus, batch, sequence = row["gpus"], row["gbs"], row["seq"]
        name = name_of(row) + f" micro-batch {plan.microbatch}" * (plan.microbatch > 1)
        model, cluster = model_text(row["model"], sequence), cluster_text(row["device"], gpus)
        replicas = gpus // (plan.tp * plan.cp * plan.pp)
        if model is None or cluster is None:
            what = f"moec has no {row['model'] if model is None else row['device']}"
            self.left_out.append((name, what))
            return
        if plan.pp * plan.virtual > depth_of(model):
            fitting = depth_of(model) // plan.pp
            assumed.append(f"virtual = {fitting}, not {plan.virtual}: no stage without a layer")
            plan = replace(plan, virtual=fitting, schedule=plan.schedule if fitting > 1 else "one_f_one_b")
        if not stages_of(depth_of(model), plan.pp * plan.virtual):
            assumed.append("moec's own stages")
        if batch % (replicas * plan.microbatch):
            why = f"{batch} sequences are no whole micro-batches of {plan.microbatch} on {replicas} replicas"
            self.left_out.append((name, why))
            return
        microbatches = batch // (replicas * plan.microbatch)
        parallel = plan.text(microbatches, depth_of(model))
        text = f"{cluster}{model}train {{ batch = {batch}; sequence = {sequence} }}\n{parallel}"
        self.stated.append(
            Published(
                source=source,
                model=row["model"],
                device=row["device"],
                precision=row["precision"],
                gpus=gpus,
                batch=batch,
                sequence=sequence,
                name=name,
                text=text,
                assumed=tuple(assumed),
                **more,
            )
        )
