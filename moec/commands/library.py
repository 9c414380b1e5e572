"""The library's models for `moec init`: their list, and a whole file that starts from one. Needs no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

from moec.commands.console.documents import ListedModel
from moec.commands.console.table import table
from moec.driver import run_passes, to_spec
from moec.grammar.diagnostics import DiagnosticError, diagnose
from moec.grammar.format import formatted
from moec.grammar.resolve.library import library_names, library_text
from moec.grammar.source import Source
from moec.grammar.spec import Spec
from moec.grammar.suggest import nearest
from moec.passes.cost.memory import memory_of
from moec.passes.cost.parameter_counts import count_parameters, short

SEQUENCE = 4096
"""Tokens of a sequence in a starter file, if the model's context is longer."""
MAX_NODES = 4096
MAX_EP = 64
"""The largest `ep` of a starter file; experts have replicas on more ranks."""
SHORTEST_BEGINNING = 3
"""The fewest letters that name all models which begin with them."""
CLUSTER, RANKS_OF_NODE = "dgx_h100", 8


def models() -> list[ListedModel]:
    """The library's models with their counts, for `moec init --list`."""
    return [_listed(name) for name in library_names("models")]


def _listed(name: str) -> ListedModel:
    spec = to_spec(text_that_uses(name))
    counts = count_parameters(run_passes(spec, "schedule").program, spec)
    experts = "-".join(counts.notation.split("-")[2:])
    total, active = round(counts.whole.total), round(counts.whole.active)
    return ListedModel(name=name, title=title(name), total=total, active=active, experts=experts)


def listing(listed: Iterable[ListedModel]) -> Iterator[str]:
    """The lines of `moec init --list`."""
    rows = [("name", "total", "active", "experts", "model")]
    rows += [(model.name, short(model.total), short(model.active), model.experts, model.title) for model in listed]
    yield from table(rows, numbers=(1, 2))


def text_that_uses(name: str) -> str:
    """The text of a file that only uses a model of the library."""
    return f'use "models/{name}"\n'


def title(name: str) -> str:
    """The beginning of the model's comment, such as `Mixtral 8x7B`."""
    lines = (line for line in library_text(f"models/{name}").splitlines() if line.startswith("#"))
    comment = " ".join(line[1:].strip() for line in lines)
    return comment[: min(at for end in (" (", ". ", ": ") if (at := comment.find(end)) >= 0)]


def starter_from(name: str) -> str:
    """A whole file: the model's text, a cluster of nodes with 8 GPUs on which a step fits, `train` and `parallel`.

    Raises `DiagnosticError` MOE0016 for a name that the library does not have.
    """
    name = name.removeprefix("models/")
    if name not in library_names("models"):
        near = " or ".join(f"`moec init --from {model}`" for model in near_models(name))
        ways = "`moec init --list` lists the models; `moec import hf DIR` makes a file of another model's folder"
        raise DiagnosticError([diagnose("MOE0016", None, f"`{name}`", help=f"did you mean {near}?" if near else ways)])
    model = to_spec(text_that_uses(name))
    for nodes in (2**power for power in range(MAX_NODES.bit_length())):
        for zero in (1, 2, 3):
            text = _starter(name, model, nodes, zero)
            if _fits(text):
                return text
    return text


def near_models(name: str) -> list[str]:
    """The library's models that `name` may mean: in Hugging Face's spelling, abbreviated, or misspelt."""
    typed = _letters(name.rpartition("/")[2])
    letters = {model: _letters(model) for model in library_names("models")}
    for near in (
        [model for model, known in letters.items() if known == typed],
        [model for model, known in letters.items() if len(typed) >= SHORTEST_BEGINNING and known.startswith(typed)],
        [max((model for model, known in letters.items() if typed.startswith(known)), key=len, default="")],
        [nearest(name.rpartition("/")[2].replace("-", "_"), letters) or ""],
    ):
        if any(near):
            return near
    return []


def _letters(name: str) -> str:
    """The letters and digits of a name: `Qwen3-30B` and `qwen3_30b` have the same."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _fits(text: str) -> bool:
    """Whether a training step of the file fits its devices. A `layer` alone is a part of another model's step."""
    spec = to_spec(text)
    program = run_passes(spec, "schedule").program  # `budget` would try remedies
    return not spec.has_model or memory_of(program, spec).peak.bytes.total <= spec.cluster.device.memory


def _starter(name: str, model: Spec, nodes: int, zero: int) -> str:
    ranks = RANKS_OF_NODE * nodes
    mixtures = [moe for moe in model.subject.mixtures if moe is not None]
    ep = math.gcd(ranks, *(number for moe in mixtures for number in moe.counts))
    while ep > MAX_EP:
        ep //= 2
    fits = "; the smallest power of two on which a step fits" if model.has_model else ""
    parts = [
        f'use "clusters/{CLUSTER}"',
        library_text(f"models/{name}").rstrip("\n"),
        _block('cluster "mine"', [f"from = {CLUSTER}", f"nodes = {nodes}  # of {RANKS_OF_NODE} GPUs{fits}"]),
    ]
    parallel = [f"ep = {ep}  # ranks that divide the experts of a layer among them"]
    if model.has_model:
        parts.append(_block("train", _train(model, ranks)))
        parallel += [f"zero = {zero}", "recompute = layer"]
    parts.append(_block("parallel", parallel))
    return formatted(Source(name, "\n\n".join(parts) + "\n"))


def _train(model: Spec, ranks: int) -> list[str]:
    is_image_model = model.model.length is not None
    batch = f"batch = {ranks:_}  # {'images' if is_image_model else 'sequences'} per step, over all ranks"
    sequence = [] if is_image_model else [f"sequence = {min(model.model.context or SEQUENCE, SEQUENCE)}"]
    return [batch, *sequence, "optimizer = adamw(lr = 3e-4)"]


def _block(head: str, lines: list[str]) -> str:
    return "\n".join([f"{head} {{", *lines, "}"])
