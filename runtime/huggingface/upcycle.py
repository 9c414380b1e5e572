"""Sparse upcycling: the weights of a dense model as those of a mixture (Komatsuzaki et al. 2022, arXiv 2212.05055).

Every expert begins as the dense layer's feed-forward, the router as in a new model; all else is unchanged (section 3).
Three options make experts differ:

- `noise`: Gaussian noise of this standard deviation on the experts' weights (their appendix B.9);
- `split`: experts narrower than the dense feed-forward each take a slice of its hidden units: of S slices, expert e
  takes slice e modulo S, and its output is multiplied by S. The slices of one copy begin with equal rows of the router,
  so that a token chooses all of them (virtual groups, He et al. 2024, arXiv 2410.07524, section 3);
- `drop`: this fraction of an expert's hidden units is drawn anew from a normal distribution with the mean and the
  standard deviation of the weights that it replaces (Drop-Upcycling, Nakamura et al. 2025, arXiv 2502.19261, section
  3).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from moec.codegen.plan import Plan
from moec.grammar.diagnostics import Diagnostic, Severity, diagnose
from moec.grammar.huggingface.read import LOCAL, read_config
from moec.grammar.layer_numbers import ranges
from moec.grammar.spec import Activated, Model, Moe, Parallel, Spec, TopK
from moec.runtime.checkpoint.convert import Advance, NewTensor, no_progress, shapes_of, write_new
from moec.runtime.checkpoint.format.index import HEAD
from moec.runtime.checkpoint.format.reading import Checkpoint
from moec.runtime.checkpoint.model_fields import differences
from moec.runtime.errors import JobError
from moec.runtime.huggingface.checkpoints import Transferred, plan_of, read_rows
from moec.runtime.huggingface.folder_weights import FolderWeights
from moec.runtime.huggingface.load import differing
from moec.runtime.huggingface.row_blocks import bytes_of, row_blocks
from moec.runtime.weights.home import SINGLE_RANK_MESH
from moec.runtime.weights.shards import initial_shard

MAX_NOISE = 1e6
EXPERTS, DENSE = "moe.experts.", "ffn."


@dataclass(frozen=True, slots=True)
class Upcycling:
    """How experts differ from the dense feed-forward. `seed`: of the noise, the dropped units and the new routers."""

    noise: float = 0.0
    split: bool = False
    drop: float = 0.0
    seed: int = 0


class DenseWeights(Protocol):
    """A dense model's weights."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every parameter."""
        ...

    def rows(self, name: str, rows: range) -> Tensor:
        """Rows of a parameter, in fp32."""
        ...


def upcycle(
    dense: Path, model: Spec, target: Path, version: str, options: Upcycling, advance: Advance = no_progress
) -> Transferred:
    """Writes the checkpoint `target` of step 0 of the mixture `model` with the weights of the model `dense`.

    `dense` is a folder of Hugging Face or a checkpoint of moec. Where `model` has a mixture, `dense` has a feed-forward
    with the same activation; all other parts are equal. Without noise, split and drop the mixture computes the same as
    the dense model if it is `dropless` and a token's weights add up to 1.

    Raises `DiagnosticError`: MOE0910 for a model that is not the dense one with mixtures in place of feed-forwards, or
    for options that do not fit it; for weights and the target those of `import_weights`.
    """
    _require_options(options)
    if not model.has_model or all(layer.moe is None for layer in model.model.layers):
        raise _unfit("the file has no model with a mixture", "put `moe` in place of `ffn` in the dense model's file")
    spec = model.replace(cluster=LOCAL, parallel=Parallel(), train=None)
    plan, notes = plan_of(spec, version), tuple[Diagnostic, ...]()
    weights: DenseWeights
    if (dense / HEAD).is_file():
        checkpoint = Checkpoint(dense)
        weights = CheckpointWeights(checkpoint)
        _require_same_mathematics(checkpoint, spec, weights)
    else:
        weights, notes = _weights_of(dense, spec, version)
    for number, layer in enumerate(spec.model.layers):
        if layer.moe is not None:
            _require_upcyclable(number, layer.moe, weights, options)
    _require_shapes(plan, weights)
    tensors = [
        NewTensor(name, shape, _content(name, shape, plan, weights, options))
        for name, shape in sorted(shapes_of(plan).items())
    ]
    num_bytes = write_new(target, plan, version, tensors, advance=advance)
    return Transferred(num_bytes, len(tensors), (*notes, *_remarks(spec.model, weights)))


def _remarks(model: Model, dense: DenseWeights) -> list[Diagnostic]:
    """Warnings of mixtures that begin with other results than the dense model, although no option asks for it."""
    scaled, chosen = list[int](), list[int]()
    for number, layer in enumerate(model.layers):
        moe = layer.moe
        if moe is None:
            continue
        gate = moe.gate
        adds_up = isinstance(gate, TopK) and (gate.normalize or gate.order == "after") and gate.scale == 1
        if not adds_up:
            scaled.append(number)
        if isinstance(gate, TopK) and gate.k % _slices(number, moe, dense):
            chosen.append(number)
    notes = []
    if scaled:
        help = "set `normalize = true` in `topk`"
        named = ", ".join(ranges(scaled))
        message = f"the weights of a token's experts do not add up to 1 in layers {named}: results begin scaled"
        notes.append(diagnose("MOE0910", None, message, help=help, severity=Severity.WARNING))
    if chosen:
        help = "let a token choose a multiple of the number of slices"
        message = (
            f"in layers {', '.join(ranges(chosen))} a token's experts do not make whole copies of the feed-forward"
        )
        notes.append(diagnose("MOE0910", None, message, help=help, severity=Severity.WARNING))
    return notes


def _slices(number: int, moe: Moe, dense: DenseWeights) -> int:
    """The number of slices of the feed-forward that a layer's experts take."""
    body = moe.parts[0].body
    assert isinstance(body, Activated)
    return dense.shapes[f"layers.{number}.{DENSE}up.weight"][1] // body.hidden


class CheckpointWeights:
    """The weights of a checkpoint of moec."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.shapes = {name: entry.shape for name, entry in checkpoint.index.model_tensors.items()}

    def rows(self, name: str, rows: range) -> Tensor:
        return read_rows(self._checkpoint, name, rows, self.shapes[name]).float()


def _weights_of(folder: Path, spec: Spec, version: str) -> tuple[FolderWeights, tuple[Diagnostic, ...]]:
    """The weights of a folder with the dense model of `spec`, and the warnings of its config."""
    imported = read_config(folder)
    _require_same_but_mixtures(imported.spec.model, spec.model, folder)
    return FolderWeights(folder, imported, shapes_of(plan_of(imported.spec, version))), imported.notes


def _unfit(message: str, help: str = "") -> JobError:
    return JobError("MOE0910", message, help)


def _require_options(options: Upcycling) -> None:
    if not 0 <= options.drop <= 1:
        raise _unfit(f"--drop is {options.drop}, and must be a fraction of the hidden units, 0 to 1")
    if not 0 <= options.noise <= MAX_NOISE:
        raise _unfit(f"--noise is {options.noise}, and must be a standard deviation from 0 to {MAX_NOISE:g}")


def _require_same_but_mixtures(dense: Model, sparse: Model, folder: Path) -> None:
    """Raises MOE0910 unless the models differ in mixtures in place of feed-forwards alone."""
    if dense.depth == sparse.depth:
        layers = [
            ours if ours.moe is None or theirs.ffn is None else ours.replace(moe=None, ffn=theirs.ffn)
            for theirs, ours in zip(dense.layers, sparse.layers, strict=True)
        ]
        sparse = sparse.replace(layers=tuple(layers))
    if different := differing(dense, sparse):
        options = "; ".join(different).replace("would be read as", "in the file")
        help = "`moec import hf` writes the dense model's file; put `moe` in place of `ffn` in it"
        raise _unfit(f"the file is not {folder} with mixtures in place of feed-forwards: in {folder} {options}", help)


def _require_same_mathematics(checkpoint: Checkpoint, sparse: Spec, dense: DenseWeights) -> None:
    """Raises MOE0910 unless the checkpoint's model is the file's with feed-forwards in place of mixtures."""
    layers = []
    for number, layer in enumerate(sparse.model.layers):
        up = dense.shapes.get(f"layers.{number}.{DENSE}up.weight")
        if layer.moe is not None and up is not None:
            body = layer.moe.parts[0].body
            layer = layer.replace(moe=None, ffn=body.replace(hidden=up[1]) if isinstance(body, Activated) else None)
        layers.append(layer)
    different = differences(checkpoint.index.model, sparse.replace(model=sparse.model.replace(layers=tuple(layers))))
    if different:
        help = "write the dense model's file, with `moe` in place of `ffn`"
        raise _unfit(f"{checkpoint.path} is another model than the file's: {'; '.join(different[:3])}", help)


def _require_upcyclable(number: int, moe: Moe, dense: DenseWeights, options: Upcycling) -> None:
    """Raises MOE0910 unless the layer's experts can be made of the dense layer's feed-forward."""
    where = f"layer {number}"
    if len(moe.parts) > 1 or not isinstance(moe.parts[0].body, Activated):
        raise _unfit(f"{where}: experts of several kinds, or without an activation, cannot be copies of a feed-forward")
    if moe.shared is not None or moe.residual is not None:
        part = "shared" if moe.shared is not None else "residual"
        raise _unfit(f"{where} has `{part}`, which upcycling cannot make from a dense model", f"leave `{part}` out")
    prefix = f"layers.{number}."
    for part in ("up", "down"):
        if f"{prefix}{DENSE}{part}.weight" not in dense.shapes:
            raise _unfit(f"{where} is a mixture, but the dense model has no feed-forward in this layer")
    hidden, wanted = dense.shapes[f"{prefix}{DENSE}up.weight"][1], moe.parts[0].body.hidden
    if hidden == wanted:
        return
    if hidden % wanted:
        raise _unfit(f"{where}: experts are {wanted} wide, which does not divide the feed-forward's {hidden}")
    slices = hidden // wanted
    if not options.split:
        help = f"give `--split`, or make experts {hidden} wide"
        raise _unfit(f"{where}: experts are {wanted} wide, and the feed-forward {hidden}", help)
    if moe.num_experts % slices:
        raise _unfit(f"{where}: {moe.num_experts} experts are no multiple of the {slices} slices that it is split into")


def _require_shapes(plan: Plan, dense: DenseWeights) -> None:
    """Raises MOE0910 unless every parameter comes from a dense one, and every dense one is used."""
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
            raise _unfit(
                f"{source} is {list(theirs)}, and experts of {list(data.shape[1:])} cannot be copies or slices of it"
            )
    more = sorted(set(dense.shapes) - used)
    if more:
        raise _unfit(f"the dense model has {more[0]}, which the file's model does not have")


def source_of(name: str) -> str | None:
    """The dense model's parameter that becomes the parameter `name`; None for a router's."""
    if EXPERTS in name:
        return name.replace(EXPERTS, DENSE)
    return None if ".moe." in name else name


def _content(
    name: str, shape: tuple[int, ...], plan: Plan, dense: DenseWeights, options: Upcycling
) -> Iterator[memoryview]:
    """The bytes of a parameter or state of the mixture."""
    source = source_of(name)
    if source is None:
        yield bytes_of(_new(name, shape, plan, dense, options.seed))
    elif source == name:
        for rows in row_blocks(shape):
            yield bytes_of(dense.rows(name, rows))
    else:
        whole = dense.rows(source, range(dense.shapes[source][0]))
        for expert in range(shape[0]):
            yield bytes_of(_expert(name, source, whole, shape, expert, dense, options))


def _new(name: str, shape: tuple[int, ...], plan: Plan, dense: DenseWeights, seed: int) -> Tensor:
    """A router as in a new model, with equal rows for the slices of one copy; zeros for a state."""
    data = plan.parameters.get(name)
    if data is None:
        return torch.zeros(shape)
    new = initial_shard(name, data, SINGLE_RANK_MESH, 0, seed=seed)
    number = int(name.split(".")[1])
    moe = plan.spec.model.layers[number].moe
    if moe is None or shape[0] != moe.num_experts:
        return new
    slices = _slices(number, moe, dense)
    return new[: shape[0] // slices].repeat_interleave(slices, 0)


def _expert(
    name: str, source: str, whole: Tensor, shape: tuple[int, ...], expert: int, dense: DenseWeights, options: Upcycling
) -> Tensor:
    """One expert's part of a parameter: a copy of the dense one or a slice of its hidden units, changed by the options.

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
    if options.drop:
        dropped = _dropped(layer, expert, width, options)
        replaced = copied.index_select(dim, dropped)
        if dropped.numel():
            # Gate and up are matrices of their own: each has its own mean and deviation.
            over = (1, 2) if part == "up" else (0, 1)
            mean, deviation = replaced.mean(over, keepdim=True), replaced.std(over, keepdim=True, correction=0)
            drawn = torch.randn(replaced.shape, generator=_generator(options.seed, name, expert, "drop"))
            copied.index_copy_(dim, dropped, mean + deviation * drawn)
    if options.noise:
        copied += options.noise * torch.randn(copied.shape, generator=_generator(options.seed, name, expert, "noise"))
    return copied


def _dropped(layer: str, expert: int, width: int, options: Upcycling) -> Tensor:
    """The hidden units of an expert that are drawn anew: the same ones in its gate, up and down."""
    order = torch.randperm(width, generator=_generator(options.seed, layer, expert, "units"))
    return order[: int(options.drop * width)].sort().values


def _generator(*key: object) -> torch.Generator:
    """A generator whose numbers are a function of `key` alone."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
