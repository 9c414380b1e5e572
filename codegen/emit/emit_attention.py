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
    mask = _mask(e, op, given)
    causal = op.causal and mask is None
    width, of_values = (e.value(op.operands[index]).shape[3] for index in (0, 2))
    assert isinstance(width, int)
    assert isinstance(of_values, int)
    q, k, v = (
        _widened(e, op, given[name], max(width, of_values) - own)
        for name, own in (("q", width), ("k", width), ("v", of_values))
    )
    scale = op.scale or (width**-0.5 if "sinks" in given or of_values > width else None)
    narrowed = (-1, 0, of_values) if of_values < width else None
    if "sinks" in given:
        whole = e.call(op, moec.sink_attention.default, q, k, v, given["sinks"], mask, causal, scale)
        if narrowed is None:
            e.first_of(op, whole)
        else:
            e.result(op, aten.narrow.default, e.item(op, whole, 0), *narrowed)
        return
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
    """Which tokens a token attends to, `[batch or 1, 1, sequence, sequence]`; None where `causal` says it all.

    Those whose segment and kind, real or padding, are its own, if `causal` up to itself, and in its window.
    """
    alike = [given[name] for name in ("segments", "real") if name in given]
    if not alike and not op.window:
        return None
    compared = [_of_pairs(e, op, aten.eq.Tensor, numbers, numbers) for numbers in alike]
    if op.causal or op.window:
        index = _index(e, op, alike[0] if alike else None, given["q"])
        if op.causal:
            compared.append(_of_pairs(e, op, aten.ge.Tensor, index, index))
        if op.window:
            first = e.call(op, aten.sub.Scalar, index, op.window)
            compared.append(_of_pairs(e, op, aten.lt.Tensor, first, index))
        if op.window and not op.causal:
            last = e.call(op, aten.add.Scalar, index, op.window)
            compared.append(_of_pairs(e, op, aten.gt.Tensor, last, index))
    mask, *others = compared
    for other in others:
        mask = e.call(op, aten.logical_and.default, mask, other)
    return e.call(op, aten.unsqueeze.default, mask, 1)


def _index(e: Emitter, op: Op, numbers: fx.Node | None, q: fx.Node) -> fx.Node:
    """1, 2, … along the sequence, `[batch or 1, sequence]`, counted so that the graph holds no length: of `numbers`
    `[batch, sequence]`, else of q."""
    if numbers is None:
        column = e.call(op, aten.select.int, e.call(op, aten.select.int, q, 3, 0), 2, 0)
        numbers = e.call(op, aten.sum.dim_IntList, column, [0], True)  # one row, also of an empty batch
        ones = e.call(op, aten.ones_like.default, numbers, dtype=torch.int32)
        return e.call(op, aten.cumsum.default, ones, 1, dtype=torch.int32)
    return e.call(op, aten.cumsum.default, e.call(op, aten.ones_like.default, numbers), 1)


def _of_pairs(e: Emitter, op: Op, compare: Any, of_queries: fx.Node, of_keys: fx.Node) -> fx.Node:
    """`compare` of each query's number with each key's, `[batch, sequence, sequence]`."""
    rows, columns = (e.call(op, aten.unsqueeze.default, x, dim) for x, dim in ((of_queries, 2), (of_keys, 1)))
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
