"""Sparse upcycling: the weights of a dense model as those of a mixture (Komatsuzaki et al. 2022, arXiv 2212.05055).

Every expert begins as the dense layer's feed-forward, the router as in a new model, all else as it was (section 3).
Three changes make experts differ:

- `noise`: Gaussian noise of this standard deviation on the experts' weights (their appendix B.9);
- `split`: experts narrower than the dense feed-forward take a slice of its hidden units each, expert e slice e modulo
  their number, and what a slice gives is multiplied by that number (He et al. 2024, arXiv 2410.07524, section 3.2);
- `drop`: this part of an expert's hidden units begins anew, drawn from a normal distribution with the mean and the
  standard deviation of the weights that it replaces (Drop-Upcycling, Nakamura et al. 2025, arXiv 2502.19261, section
  3).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from moec.codegen.plan import Plan, PlanParameter
from moec.grammar.diagnostics import Diagnostic
from moec.grammar.huggingface.read import LOCAL, read_config
from moec.grammar.spec import Activated, Model, Moe, Parallel, Spec
from moec.runtime.checkpoint.convert import Whole, shapes_of, write_new
from moec.runtime.checkpoint.index import HEAD, MODEL
from moec.runtime.checkpoint.reading import Checkpoint
from moec.runtime.errors import JobError
from moec.runtime.huggingface.checkpoints import Moved, plan_of, read_rows
from moec.runtime.huggingface.folder_weights import FolderWeights
from moec.runtime.huggingface.load import first_difference
from moec.runtime.huggingface.slabs import slab_bytes, slabs_of
from moec.runtime.job.home import ALONE
from moec.runtime.job.shards import initial_shard

EXPERTS, DENSE = "moe.experts.", "ffn."


@dataclass(frozen=True, slots=True)
class Upcycling:
    """How experts begin; `seed` is that of noise, of dropped units and of the new routers."""

    noise: float = 0.0
    split: bool = False
    drop: float = 0.0
    seed: int = 0


class Dense(Protocol):
    """A dense model's weights."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every parameter."""
        ...

    def rows(self, name: str, rows: range) -> Tensor:
        """Rows of a parameter, in fp32."""
        ...


def upcycle(dense: Path, model: Spec, target: Path, version: str, how: Upcycling) -> Moved:
    """Writes the checkpoint `target` of step 0 of the mixture `model` with the weights of the model `dense`.

    `dense` is a folder of Hugging Face or a checkpoint of moec. Where `model` has a mixture, `dense` has a feed-forward
    of the same activation; all other parts are equal. Without noise, split and drop the mixture computes what the dense
    model does, if its gate is `dropless` and its weights add up to 1.

    Raises `DiagnosticError`: MOE0910 for a model that is not the dense one with mixtures in place of feed-forwards, or
    for options that do not fit it; those of `import_weights` for weights and the target.
    """
    _require_options(how)
    spec = model.replace(cluster=LOCAL, parallel=Parallel(), train=None)
    plan, notes = plan_of(spec, version), tuple[Diagnostic, ...]()
    weights: Dense
    if (dense / HEAD).is_file():
        weights = CheckpointWeights(Checkpoint(dense))
    else:
        weights, notes = _weights_of(dense, spec, version)
    for number, layer in enumerate(spec.model.layers):
        if layer.moe is not None:
            _require_upcyclable(number, layer.moe, weights, how)
    _require_shapes(plan, weights)
    tensors = [
        Whole(name, shape, _content(name, shape, plan, weights, how)) for name, shape in sorted(shapes_of(plan).items())
    ]
    num_bytes = write_new(target, plan, version, tensors)
    return Moved(num_bytes, len(tensors), notes)


class CheckpointWeights:
    """The weights of a checkpoint of moec."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        tensors = checkpoint.index.tensors
        self.shapes = {n.removeprefix(MODEL): tuple(e.shape) for n, e in tensors.items() if n.startswith(MODEL)}

    def rows(self, name: str, rows: range) -> Tensor:
        return read_rows(self._checkpoint, name, rows, self.shapes[name]).float()


def _weights_of(folder: Path, spec: Spec, version: str) -> tuple[FolderWeights, tuple[Diagnostic, ...]]:
    """The weights of a folder whose model is that of `spec` but for its mixtures, and the warnings of its config."""
    imported = read_config(folder)
    _require_same_but_mixtures(imported.spec.model, spec.model, folder)
    return FolderWeights(folder, imported, shapes_of(plan_of(imported.spec, version))), imported.notes


def _unfit(message: str, help: str = "") -> JobError:
    return JobError("MOE0910", message, help)


def _require_options(how: Upcycling) -> None:
    if not 0 <= how.drop <= 1:
        raise _unfit(f"--drop is {how.drop}, and a part of the hidden units is from 0 to 1")
    if not (math.isfinite(how.noise) and how.noise >= 0):
        raise _unfit(f"--noise is {how.noise}, and a standard deviation is at least 0")


def _require_same_but_mixtures(dense: Model, sparse: Model, folder: Path) -> None:
    """Raises MOE0910 unless the models differ in nothing but mixtures in place of feed-forwards."""
    if dense.depth == sparse.depth:
        layers = [
            ours if ours.moe is None or theirs.ffn is None else ours.replace(moe=None, ffn=theirs.ffn)
            for theirs, ours in zip(dense.layers, sparse.layers, strict=True)
        ]
        sparse = sparse.replace(layers=tuple(layers))
    different = first_difference(dense, sparse)
    if different is not None:
        how = different.replace("would be read as", "in the file")
        help = "`moec import hf` writes the dense model's file; put `moe` in place of `ffn` in it"
        raise _unfit(f"the file is not {folder} with mixtures in place of feed-forwards: there {how}", help)


def _require_upcyclable(number: int, moe: Moe, dense: Dense, how: Upcycling) -> None:
    """Raises MOE0910 unless the layer's experts can be made of the dense layer's feed-forward."""
    where = f"layer {number}"
    if len(moe.parts) > 1 or not isinstance(moe.parts[0].body, Activated):
        raise _unfit(f"{where}: experts of several kinds, or without an activation, are no copies of a feed-forward")
    if moe.shared is not None or moe.residual is not None:
        part = "shared" if moe.shared is not None else "residual"
        raise _unfit(f"{where} has `{part}`, and upcycling says only what experts begin as", f"leave `{part}` out")
    prefix = f"layers.{number}."
    for part in ("up", "down"):
        if f"{prefix}{DENSE}{part}.weight" not in dense.shapes:
            raise _unfit(f"{where} is a mixture, and has no feed-forward in the dense model")
    hidden, wanted = dense.shapes[f"{prefix}{DENSE}up.weight"][1], moe.parts[0].body.hidden
    if hidden == wanted:
        return
    if hidden % wanted:
        raise _unfit(f"{where}: experts are {wanted} wide, which does not divide the feed-forward's {hidden}")
    slices = hidden // wanted
    if not how.split:
        help = f"give `--split`, or make experts {hidden} wide"
        raise _unfit(f"{where}: experts are {wanted} wide, and the feed-forward {hidden}", help)
    if moe.num_experts % slices:
        raise _unfit(f"{where}: {moe.num_experts} experts are no multiple of the {slices} slices that it is split into")


def _require_shapes(plan: Plan, dense: Dense) -> None:
    """Raises MOE0910 unless every parameter comes from one of the dense model, and every one of these is used."""
    used = set()
    for name, data in plan.parameters.items():
        source = source_of(name)
        if source is None:
            continue
        used.add(source)
        theirs = dense.shapes.get(source)
        if theirs is None:
            raise _unfit(f"the dense model has no {source}")
        if source == name and theirs != data.shape:
            raise _unfit(f"{name} is {list(theirs)} in the dense model, {list(data.shape)} in the file")
        # [experts, parts, hidden, dim] of [parts, hidden, dim]; `hidden` may be a slice.
        if name.endswith("moe.experts.up.weight") and (theirs[0], theirs[2]) != (data.shape[1], data.shape[3]):
            raise _unfit(f"{source} is {list(theirs)}, and experts of {list(data.shape[1:])} are no copies or slices")
    more = sorted(set(dense.shapes) - used)
    if more:
        raise _unfit(f"the dense model has {more[0]}, which the file's model has not")


def source_of(name: str) -> str | None:
    """The dense model's parameter from which one of the mixture comes; None for a router's."""
    if EXPERTS in name:
        return name.replace(EXPERTS, DENSE)
    return None if ".moe." in name else name


def _content(name: str, shape: tuple[int, ...], plan: Plan, dense: Dense, how: Upcycling) -> Iterator[memoryview]:
    """The bytes of a parameter or state of the mixture."""
    source = source_of(name)
    if source is None:
        yield slab_bytes(_new(name, shape, plan.parameters.get(name), how.seed))
    elif source == name:
        for rows in slabs_of(shape):
            yield slab_bytes(dense.rows(name, rows))
    else:
        whole = dense.rows(source, range(dense.shapes[source][0]))
        for expert in range(shape[0]):
            yield slab_bytes(_expert(name, source, whole, shape, expert, dense, how))


def _new(name: str, shape: tuple[int, ...], data: PlanParameter | None, seed: int) -> Tensor:
    """A router as in a new model, a state of zeros."""
    return torch.zeros(shape) if data is None else initial_shard(name, data, ALONE, 0, seed=seed)


def _expert(
    name: str, source: str, whole: Tensor, shape: tuple[int, ...], expert: int, dense: Dense, how: Upcycling
) -> Tensor:
    """One expert's part of a parameter: a copy of the dense one or a slice of its hidden units, changed as asked.

    `up.weight` is [parts, hidden, dim], `down.weight` [dim, hidden], `up.bias` [parts, hidden], `down.bias` [dim].
    """
    part, kind = name.rsplit(".", 2)[1:]
    layer = source.split(DENSE)[0]
    hidden = dense.shapes[f"{layer}{DENSE}up.weight"][1]
    dim = {("up", "weight"): 1, ("up", "bias"): 1, ("down", "weight"): 1}.get((part, kind))
    if dim is None:
        return whole
    width = shape[1 + dim]
    slices = hidden // width
    first = expert % slices * width
    copied = whole.narrow(dim, first, width).clone()
    if part == "down":
        copied *= slices
    if kind == "bias":
        return copied
    if how.drop:
        dropped = _dropped(layer, expert, width, how)
        replaced = copied.index_select(dim, dropped)
        if dropped.numel():
            # Gate and up are matrices of their own: each has its own mean and deviation.
            over = (1, 2) if part == "up" else (0, 1)
            mean, deviation = replaced.mean(over, keepdim=True), replaced.std(over, keepdim=True, correction=0)
            drawn = torch.randn(replaced.shape, generator=_generator(how.seed, name, expert, "drop"))
            copied.index_copy_(dim, dropped, mean + deviation * drawn)
    if how.noise:
        copied += how.noise * torch.randn(copied.shape, generator=_generator(how.seed, name, expert, "noise"))
    return copied


def _dropped(layer: str, expert: int, width: int, how: Upcycling) -> Tensor:
    """The hidden units of an expert that begin anew: the same in its gate, up and down."""
    order = torch.randperm(width, generator=_generator(how.seed, layer, expert, "units"))
    return order[: int(how.drop * width)].sort().values


def _generator(*of: object) -> torch.Generator:
    """A generator whose numbers are a function of `of` alone."""
    digest = hashlib.sha256(repr(of).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
