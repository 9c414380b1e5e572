"""Emits the ops of a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from moec.codegen.emit.emitter import Emitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o

aten = torch.ops.aten
moec = torch.ops.moec


def _route(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.Route)
    e.results(op, moec.route.default, *e.refs(op), op.k, op.score, op.order == "after", op.normalize)


def _permute(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.Permute)
    e.results(op, moec.permute.default, *e.refs(op), op.num_experts)


def _permute_real(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.PermuteReal)
    e.results(op, moec.permute.default, *e.refs(op), op.num_experts, some_are_none=True)


def _of_operands(e: Emitter, op: Op) -> None:
    e.result(op, getattr(moec, op.mnemonic).default, *e.refs(op))


def _given_and_experts(e: Emitter, op: Op) -> tuple[list[fx.Node], list[Any]]:
    """What experts are given, and their four parameters: up, down and both biases, None for biases that are absent."""
    given = [e.ref(name) for name in op.operands if not name.startswith("@")]
    experts = [e.ref(name) for name in op.operands if name.startswith("@")]
    return given, [*experts, *[None] * (4 - len(experts))]


def _expert_mlp(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.ExpertMlp)
    (rows, counts, *weights), experts = _given_and_experts(e, op)
    whole = e.call(op, moec.expert_mlp.default, rows, counts, *experts, op.activation, _one_or_none(weights))
    e.first_of(op, whole)


def _expert_mlp_padded(e: Emitter, op: Op) -> None:
    """All places of an expert are rows to it. What becomes of an empty place is never combined."""
    assert isinstance(op, o.ExpertMlpPadded)
    (rows, *weights), experts = _given_and_experts(e, op)
    counts = e.call(op, moec.even_counts.default, rows)
    flat, *flat_weights = (e.call(op, aten.flatten.using_ints, x, 0, 1) for x in (rows, *weights))
    whole = e.call(op, moec.expert_mlp.default, flat, counts, *experts, op.activation, _one_or_none(flat_weights))
    e.result(op, aten.view_as.default, e.item(op, whole, 0), rows)


def _mixture_mlp(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.MixtureMlp)
    given, experts = _given_and_experts(e, op)
    e.results(op, moec.mixture_mlp.default, *given, *experts, op.activation)


def _one_or_none(weights: Sequence[fx.Node]) -> fx.Node | None:
    return weights[0] if weights else None


def _groups(e: Emitter, group: str) -> int:
    """The routing groups among a process's sequences, as the operators count them: 0 where each sequence is one."""
    return {"sequence": 0, "batch": 1, "rank": e.program.shares}[group]


def _spread(e: Emitter, group: str) -> int:
    """A whole routing group's tokens over a rank's tokens of it."""
    if e.meshes is None:
        return 1
    return e.meshes.dense.size("tp") * (e.meshes.dense.size("dp") if group == "batch" else 1)


def _count_choices(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.CountChoices)
    e.result(op, moec.count_choices.default, *e.refs(op), op.num_experts, _groups(e, op.group))


def _queue_starts(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.QueueStarts)
    e.result(op, moec.queue_starts.default, *e.refs(op), _groups(e, op.group))


def _capacity(e: Emitter, op: o.Capacity, setting: list[fx.Node]) -> tuple[Any, ...]:
    """The capacity as the operators take it: `$training` or None, groups, spread, both factors, the least."""
    factors = (op.parts, op.whole, op.eval_parts, op.eval_whole)
    return setting[0] if setting else None, _groups(e, op.group), _spread(e, op.group), *factors, op.least


def _permute_padded(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.PermutePadded)
    x, experts, starts, *setting = e.refs(op)
    e.results(op, moec.permute_padded.default, x, experts, starts, *_capacity(e, op, setting))


def _keep_choices(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.KeepChoices)
    experts, starts, *setting = e.refs(op)
    e.result(op, moec.keep_choices.default, experts, starts, *_capacity(e, op, setting))


def _counting(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.CountQueues | o.LargestLoad)
    e.result(op, getattr(moec, op.mnemonic).default, *e.refs(op), op.num_experts)


def _permute_dynamic(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.PermuteDynamic)
    e.results(op, moec.permute_dynamic.default, *e.refs(op), op.num_experts)


MIXTURES: dict[type[Op], Callable[[Emitter, Op], None]] = {
    o.Combine: _of_operands,
    o.CombinePadded: _of_operands,
    o.CountChoices: _count_choices,
    o.CountQueues: _counting,
    o.ExpertMlp: _expert_mlp,
    o.ExpertMlpPadded: _expert_mlp_padded,
    o.KeepChoices: _keep_choices,
    o.LargestLoad: _counting,
    o.MixtureMlp: _mixture_mlp,
    o.Permute: _permute,
    o.PermuteDynamic: _permute_dynamic,
    o.PermutePadded: _permute_padded,
    o.PermuteReal: _permute_real,
    o.PermuteWeights: _of_operands,
    o.QueueStarts: _queue_starts,
    o.Route: _route,
    o.SumRows: _of_operands,
}
