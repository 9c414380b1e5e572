"""Emits attention: masks, PyTorch's fused attention, and repeated kv heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from moec.codegen.emit.emitter import Emitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o

aten = torch.ops.aten


def _attention(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.Attention)
    given = op.named(e.refs(op))
    q, k, v = (e.call(op, aten.transpose.int, given[name], 1, 2) for name in ("q", "k", "v"))
    heads, kv_heads = (e.value(name).shape[2] for name in op.operands[:2])
    # mask, dropout, causal
    attend = aten.scaled_dot_product_attention.default
    mask = _mask(e, op, [given[name] for name in ("segments", "real") if name in given], op.causal)
    fused_causal = op.causal and mask is None
    scale = {"scale": op.scale} if op.scale else {}
    attended = e.call(op, attend, q, k, v, mask, 0.0, fused_causal, enable_gqa=heads != kv_heads, **scale)
    e.result(op, aten.transpose.int, attended, 1, 2)


def _mask(e: Emitter, op: Op, alike: Sequence[fx.Node], causal: bool) -> fx.Node | None:
    """Which tokens a token attends to, `[batch, 1, sequence, sequence]`: those whose numbers, `alike` `[batch,
    sequence]`, are its own, if `causal` up to itself. None where `alike` is empty."""
    if not alike:
        return None
    compared = [_of_pairs(e, op, aten.eq.Tensor, numbers) for numbers in alike]
    if causal:
        index = e.call(op, aten.cumsum.default, e.call(op, aten.ones_like.default, alike[0]), 1)
        compared.append(_of_pairs(e, op, aten.ge.Tensor, index))
    mask, *others = compared
    for other in others:
        mask = e.call(op, aten.logical_and.default, mask, other)
    return e.call(op, aten.unsqueeze.default, mask, 1)


def _of_pairs(e: Emitter, op: Op, compare: Any, numbers: fx.Node) -> fx.Node:
    """`compare` of each query's number with each key's, `[batch, sequence, sequence]`."""
    rows, columns = (e.call(op, aten.unsqueeze.default, numbers, dim) for dim in (2, 1))
    return e.call(op, compare, rows, columns)


def _clip(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.Clip)
    e.result(op, aten.clamp.default, *e.refs(op), -op.limit, op.limit)


def _repeat_heads(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.RepeatHeads)
    e.result(op, aten.repeat_interleave.self_int, *e.refs(op), op.copies, 0)


ATTENTION: dict[type[Op], Callable[[Emitter, Op], None]] = {
    o.Attention: _attention,
    o.Clip: _clip,
    o.RepeatHeads: _repeat_heads,
}
