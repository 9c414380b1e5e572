"""Emits attention: masks, PyTorch's fused attention, and repeated kv heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from moec.codegen.emit.emitter import Emitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o

aten = torch.ops.aten
moec = torch.ops.moec


def _attention(e: Emitter, op: Op) -> None:
    """Fused attention wants one width (without it torch computes all scores at once on CPU): narrow heads get zeros."""
    assert isinstance(op, o.Attention)
    given = op.named(e.refs(op))
    width, of_values = (e.value(op.operands[index]).shape[3] for index in (0, 2))
    assert isinstance(width, int)
    assert isinstance(of_values, int)
    q, k, v = (
        _widened(e, op, given[name], max(width, of_values) - own)
        for name, own in (("q", width), ("k", width), ("v", of_values))
    )
    in_blocks = op.window or "sinks" in given or "segments" in given
    scale = op.scale or (width**-0.5 if in_blocks or of_values > width else None)
    narrowed = (-1, 0, of_values) if of_values < width else None
    if in_blocks:
        beside = (given.get(name) for name in ("sinks", "segments", "real"))
        whole = e.call(op, moec.masked_attention.default, q, k, v, *beside, op.causal, op.window, scale)
        if narrowed is None:
            e.first_of(op, whole)
        else:
            e.result(op, aten.narrow.default, e.item(op, whole, 0), *narrowed)
        return
    mask = _mask(e, op, given)
    causal = op.causal and mask is None
    q, k, v = (e.call(op, aten.transpose.int, heads, 1, 2) for heads in (q, k, v))
    num_heads, kv_heads = (e.value(name).shape[2] for name in op.operands[:2])
    attend, scaled = aten.scaled_dot_product_attention.default, {} if scale is None else {"scale": scale}
    # mask, dropout, causal
    attended = e.call(op, attend, q, k, v, mask, 0.0, causal, enable_gqa=num_heads != kv_heads, **scaled)
    if narrowed is not None:
        attended = e.call(op, aten.narrow.default, attended, *narrowed)
    e.result(op, aten.transpose.int, attended, 1, 2)


def _widened(e: Emitter, op: Op, heads: fx.Node, zeros: int) -> fx.Node:
    """Heads `[batch, sequence, heads, width]` with zeros behind."""
    return e.call(op, aten.constant_pad_nd.default, heads, [0, zeros]) if zeros else heads


def _join_shared(e: Emitter, op: Op) -> None:
    """Each in its dims, zeros elsewhere, and the sum of both."""
    x, shared = e.refs(op)
    own, dims = (e.value(operand).shape[3] for operand in op.operands)
    x = e.call(op, aten.constant_pad_nd.default, x, [0, dims])
    e.result(op, aten.add.Tensor, x, e.call(op, aten.constant_pad_nd.default, shared, [own, 0]))


def _mask(e: Emitter, op: o.Attention, given: Mapping[str, fx.Node]) -> fx.Node | None:
    """Which tokens a token attends to, `[batch, 1, sequence, sequence]`; None where `causal` says it all.

    Those whose segment and kind, real or padding, are its own, if `causal` up to itself.
    """
    alike = [given[name] for name in ("segments", "real") if name in given]
    if not alike:
        return None
    compared = [_of_pairs(e, op, aten.eq.Tensor, numbers) for numbers in alike]
    if op.causal:
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
    o.JoinShared: _join_shared,
    o.RepeatHeads: _repeat_heads,
}
