"""Which values of stated degrees fit the ranks, the sizes that they shard and the batch: the advice of diagnostics.

All diagnostics of a file name the same values, so that a file edited as the first one says has no new error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

from moec.grammar.spec import Conv, Layer, Soft, Spec
from moec.grammar.spec.base import Node
from moec.grammar.stated import SharingDegrees, number_of, sharing_degrees, stage_ranks
from moec.passes.degrees.sequence_cuts import sequence_pieces
from moec.passes.degrees.stated_degrees import divisors, fitting_microbatches

Changes = Mapping[str, int]
"""New values of `tp`, `cp`, `dp`, `microbatches`, `batch` and `sequence`, by name."""


def dense_changes(spec: Spec) -> Changes:
    """The changes with which `tp`, `cp`, `dp`, the batch and its micro-batches fit each other; empty if they do.

    Stated `cp` and `tp` stay if their product divides the ranks, and they divide the sizes that they shard. Otherwise
    the nearest such degrees replace them, if possible some with which the batch stays.
    """
    stated = sharing_degrees(spec)
    if _can_stay(spec, stated):
        return _further_changes(spec, stated)
    candidates = (divisors(stage_ranks(spec)) if degree > 1 else [1] for degree in stated)
    fitting = [
        sharing
        for sharing in itertools.starmap(SharingDegrees, itertools.product(*candidates))
        if _fits(spec, sharing) and not _sequence_remainder(spec, sharing)
    ]
    best = min(fitting, key=lambda sharing: _distance(spec, stated, sharing))
    changes = {name: getattr(best, name) for name in ("tp", "cp") if getattr(best, name) != getattr(stated, name)}
    return {**changes, **_further_changes(spec, best)}


def _distance(spec: Spec, stated: SharingDegrees, sharing: SharingDegrees) -> tuple[float, ...]:
    """Orders degrees: those with which the batch stays first, then by ratio to the stated ones, then by changes."""
    ratios = [ratio(new, old) for new, old in zip(sharing, stated, strict=True)]
    changed = sum(new != old for new, old in zip(sharing, stated, strict=True))
    return "batch" in _further_changes(spec, sharing), math.prod(ratios), changed, ratios[1], sharing.cp, sharing.tp


def changes_sharing(changes: Changes) -> bool:
    """Whether `tp` or `cp` changes, on which the other changes depend."""
    return "tp" in changes or "cp" in changes


def written(changes: Changes) -> str:
    """`set `tp = 2``, or `set `tp = 2` and `dp = 4``."""
    *earlier, last = (f"`{name} = {value}`" for name, value in changes.items())
    return f"set {', '.join(earlier)} and {last}" if earlier else f"set {last}"


def divided(layer: Layer) -> Iterator[tuple[Node, str, int]]:
    """The sizes of a layer that `tp`, or `cp` and `tp`, must divide: the declaring node, the field's name, the size."""
    attention = layer.attention
    yield attention, "heads", attention.heads
    if (kv_heads := getattr(attention, "kv_heads", None)) is not None:
        yield attention, "kv_heads", kv_heads
    if layer.moe is not None and isinstance(layer.moe.gate, Soft):
        yield layer.moe.gate, "slots", layer.moe.gate.slots
    bodies = [layer.ffn] if layer.moe is None else [layer.moe.shared, layer.moe.residual]
    for body in bodies:
        hidden = None if isinstance(body, Conv) else getattr(body, "hidden", None)  # `conv` is whole on every rank
        if body is not None and isinstance(hidden, int):
            yield body, "hidden", hidden


def undivided(sharing: SharingDegrees, name: str, size: int) -> str:
    """The degree that does not divide this size, `tp` or `cp`; empty if both fit.

    `tp` cuts heads and hidden widths. In attention both cut the heads, and in a soft mixture the slots of a sequence:
    ranks that share it have different ones. Ranks repeat kv heads of which they are a multiple.
    """
    for name_of_degree, pieces in (("tp", sharing.tp), ("cp", sharing.sharers)):
        if name == "hidden" and name_of_degree == "cp":
            continue
        if size % pieces and not (name == "kv_heads" and pieces % size == 0):
            return name_of_degree
    return ""


def ratio(a: int, b: int) -> float:
    """How far apart two degrees are, at least 1."""
    return max(a, b) / min(a, b)


def _fits(spec: Spec, sharing: SharingDegrees) -> bool:
    """Whether the degrees divide ranks and sizes: of layers, and the tokens of an image if they cut them."""
    if stage_ranks(spec) % sharing.sharers:
        return False
    if not spec.has_model:
        return True
    if spec.model.length is not None and spec.model.length % sequence_pieces(spec, sharing):
        return False
    layers = {id(layer): layer for layer in spec.model.layers}.values()
    sizes = {(name, size) for layer in layers for _, name, size in divided(layer)}
    return not any(undivided(sharing, name, size) for name, size in sizes)


def divides(spec: Spec, sharing: SharingDegrees) -> bool:
    """Whether the degrees divide the sizes of layers of a model, and its sequences."""
    layers = {id(layer): layer for layer in spec.model.layers}.values()
    sizes = {(name, size) for layer in layers for _, name, size in divided(layer)}
    if spec.model.length is not None and spec.model.length % sequence_pieces(spec, sharing):
        return False
    return not _sequence_remainder(spec, sharing) and not any(undivided(sharing, *pair) for pair in sizes)


def _can_stay(spec: Spec, sharing: SharingDegrees) -> bool:
    """Whether degrees divide ranks and sizes, and some sequence within the context has as many equal pieces."""
    fits = _fits(spec, sharing)
    return fits and (not _sequence_remainder(spec, sharing) or _sequence_for(spec, sharing) > 0)


def _sequence_remainder(spec: Spec, sharing: SharingDegrees) -> int:
    """The tokens of `train.sequence` that are left over when ranks cut it."""
    train = spec.train
    if train is None or train.sequence is None or not spec.has_model or spec.model.length is not None:
        return 0
    return train.sequence % sequence_pieces(spec, sharing)


def _sequence_for(spec: Spec, sharing: SharingDegrees) -> int:
    """The next length that has equal pieces: a longer one, or a shorter one if the context ends before; 0 for none."""
    assert spec.train is not None
    assert spec.train.sequence is not None
    pieces = sequence_pieces(spec, sharing)
    longer = -(-spec.train.sequence // pieces) * pieces
    context = spec.model.context
    return longer if context is None or longer <= context else longer - pieces


def _further_changes(spec: Spec, sharing: SharingDegrees) -> dict[str, int]:
    """The further changes that these degrees, which divide the ranks, need."""
    parallel, train, dp = spec.parallel, spec.train, stage_ranks(spec) // sharing.sharers
    changes = {}
    if number_of(parallel.dp) not in (None, dp):
        changes["dp"] = dp
    sequences = train.batch // dp if train is not None and train.batch % dp == 0 else None
    parts = fitting_microbatches(spec, sequences)
    if train is not None and (sequences is None or parts is None):
        parts = fitting_microbatches(spec, None)
        assert parts is not None
        changes["batch"] = -(-train.batch // (dp * parts)) * dp * parts
    stated = number_of(parallel.microbatches)
    if parts is not None and stated not in (None, parts):
        changes["microbatches"] = parts
    if _sequence_remainder(spec, sharing):
        changes["sequence"] = _sequence_for(spec, sharing)
    return changes
