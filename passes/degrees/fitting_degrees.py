"""The numbers nearest to the stated ones with which all rules of degrees hold.

All diagnostics of a file advise these degrees, so that they agree, and a file that follows one of them has no new
error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from moec.grammar.spec import Conv, Layer, Moe, Soft, Spec, Topology
from moec.grammar.spec.base import Node
from moec.passes.degrees.near_rules import near_parts, ranks_of_node
from moec.passes.degrees.sequence_cuts import sequence_pieces
from moec.passes.degrees.stated_degrees import Mixtures, Stated, divisors, number_of

Changes = Mapping[str, int]
"""New values of `tp`, `dp`, `microbatches`, `batch` and `sequence`, by name."""


def dense_changes(spec: Spec) -> Changes:
    """The changes with which `tp`, `dp`, the batch and its micro-batches fit each other; empty if they do.

    A stated `tp` stays if it divides the ranks and the sizes that it shards. Otherwise the nearest such `tp` replaces
    it, if possible one with which the batch stays.
    """
    tp = number_of(spec.parallel.tp) or 1
    if _can_stay(spec, tp):
        return _further_changes(spec, tp)
    sizes = shard_sizes(spec)
    fitting = [d for d in divisors(spec.cluster.ranks) if _divides(d, sizes) and not _sequence_remainder(spec, d)]
    best = min(fitting, key=lambda d: ("batch" in _further_changes(spec, d), _ratio(d, tp), d))
    return {"tp": best, **_further_changes(spec, best)}


def fitting_ep(spec: Spec, stated: Stated, mixtures: Mixtures) -> int:
    """The degree nearest to `stated` that divides the ranks and the experts of all its layers."""
    own_mixtures = [moe for moe, ep, _ in mixtures if ep == stated]
    common = math.gcd(spec.cluster.ranks, *(count for moe in own_mixtures for count in moe.counts))
    tp = dense_changes(spec).get("tp", number_of(spec.parallel.tp) or 1)
    near = [d for d in divisors(common) if all(_has_near_experts(spec, moe, tp, d) for moe in own_mixtures)]
    return min(near or divisors(common), key=lambda d: (_ratio(d, stated.ep), d))


def written(changes: Changes) -> str:
    """`set `tp = 2``, or `set `tp = 2` and `dp = 4``."""
    *earlier, last = (f"`{name} = {value}`" for name, value in changes.items())
    return f"set {', '.join(earlier)} and {last}" if earlier else f"set {last}"


def shard_sizes(spec: Spec) -> set[tuple[str, int]]:
    """The sizes that `tp` must divide, by the field's name: of layers, and the tokens of an image if it cuts them."""
    if not spec.has_model:
        return set()
    layers = {id(layer): layer for layer in spec.model.layers}.values()
    sizes = {(name, size) for layer in layers for _, name, size in divided(layer)}
    if spec.model.length is not None and sequence_pieces(spec) > 1:
        sizes.add(("tokens", spec.model.length))
    return sizes


def divided(layer: Layer) -> Iterator[tuple[Node, str, int]]:
    """The sizes of a layer that `tp` must divide: the declaring node, the field's name, the size."""
    attention = layer.attention
    yield attention, "heads", attention.heads
    if (kv_heads := getattr(attention, "kv_heads", None)) is not None:
        yield attention, "kv_heads", kv_heads
    if layer.moe is not None and isinstance(layer.moe.gate, Soft):
        yield layer.moe.gate, "slots", layer.moe.gate.slots
    bodies = [layer.ffn] if layer.moe is None else [layer.moe.shared, layer.moe.residual]
    for body in bodies:
        hidden = None if isinstance(body, Conv) else getattr(body, "hidden", None)  # whole on every rank
        if body is not None and isinstance(hidden, int):
            yield body, "hidden", hidden


def is_divided(tp: int, name: str, size: int) -> bool:
    """Whether `tp` shards this size: it divides it, or is a multiple of the kv heads, which ranks then repeat."""
    return size % tp == 0 or (name == "kv_heads" and tp % size == 0)


def _divides(tp: int, sizes: set[tuple[str, int]]) -> bool:
    return all(is_divided(tp, name, size) for name, size in sizes)


def _can_stay(spec: Spec, tp: int) -> bool:
    """Whether `tp` divides ranks and sizes, and some sequence within the context has `tp` equal pieces."""
    if spec.cluster.ranks % tp or not _divides(tp, shard_sizes(spec)):
        return False
    return not _sequence_remainder(spec, tp) or _sequence_for(spec, tp) > 0


def _sequence_remainder(spec: Spec, tp: int) -> int:
    """The tokens of `train.sequence` that are left over when `tp` ranks cut it."""
    train = spec.train
    if train is None or train.sequence is None or not spec.has_model or spec.model.length is not None:
        return 0
    return train.sequence % tp if sequence_pieces(spec) > 1 else 0


def _sequence_for(spec: Spec, tp: int) -> int:
    """The next length that `tp` divides: a longer one, or a shorter one if the context ends before; 0 for none."""
    assert spec.train is not None
    assert spec.train.sequence is not None
    longer = -(-spec.train.sequence // tp) * tp
    context = spec.model.context
    return longer if context is None or longer <= context else longer - tp


def _further_changes(spec: Spec, tp: int) -> dict[str, int]:
    """The further changes that this `tp`, which divides the ranks, needs."""
    parallel, train, dp = spec.parallel, spec.train, spec.cluster.ranks // tp
    changes = {}
    if number_of(parallel.dp) not in (None, dp):
        changes["dp"] = dp
    if train is None:
        return changes
    parts = number_of(parallel.microbatches) or 1
    if train.batch % dp:
        changes["batch"] = -(-train.batch // (dp * parts)) * dp * parts
    elif train.batch // dp % parts:
        changes["microbatches"] = max(d for d in divisors(train.batch // dp) if d < parts)
    if _sequence_remainder(spec, tp):
        changes["sequence"] = _sequence_for(spec, tp)
    return changes


def _has_near_experts(spec: Spec, moe: Moe, tp: int, ep: int) -> bool:
    """Whether a token finds k experts in its own node, if its gate asks for them there (`near_rules`)."""
    gate = moe.gate
    if not isinstance(gate, Topology) or gate.share is None:
        return True
    parts = near_parts(spec.cluster.ranks, ranks_of_node(spec), tp, ep)
    return min(parts) * moe.num_experts // ep >= gate.k


def _ratio(a: int, b: int) -> float:
    return max(a, b) / min(a, b)
