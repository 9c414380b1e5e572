"""Emits attention: masks, PyTorch's fused attention, and repeated kv heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from moec.codegen.emit.emitter import Emissions, Emitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o

aten = torch.ops.aten
moec = torch.ops.moec


def _attention(e: Emitter, op: Op) -> None:
    """Pads narrow heads with zeros: torch's fused attention needs one width, else CPUs compute all scores at once."""
    assert isinstance(op, o.Attention)
    operands = op.named(e.refs(op))
    width, value_width = (e.value(op.operands[index]).shape[3] for index in (0, 2))
    assert isinstance(width, int)
    assert isinstance(value_width, int)
    q, k, v = (
        pad_heads(e, op, operands[name], max(width, value_width) - width_of)
        for name, width_of in (("q", width), ("k", width), ("v", value_width))
    )
    in_blocks = op.window or "sinks" in operands or "segments" in operands
    scale = op.scale or (width**-0.5 if in_blocks or value_width > width else None)
    narrowed = (-1, 0, value_width) if value_width < width else None
    if in_blocks:
        optional = (operands.get(name) for name in ("sinks", "segments", "real"))
        results = e.call(op, moec.masked_attention.default, q, k, v, *optional, op.causal, op.window, scale)
        if narrowed is None:
            e.unpack_first(op, results)
        else:
            e.result(op, aten.narrow.default, e.item(op, results, 0), *narrowed)
        return
    mask = _mask(e, op, operands)
    causal = op.causal and mask is None
    q, k, v = (e.call(op, aten.transpose.int, heads, 1, 2) for heads in (q, k, v))
    num_heads, kv_heads = (e.value(name).shape[2] for name in op.operands[:2])
    attend, scaled = aten.scaled_dot_product_attention.default, {} if scale is None else {"scale": scale}
    # mask, dropout, causal
    attended = e.call(op, attend, q, k, v, mask, 0.0, causal, enable_gqa=num_heads != kv_heads, **scaled)
    if narrowed is not None:
        attended = e.call(op, aten.narrow.default, attended, *narrowed)
    e.result(op, aten.transpose.int, attended, 1, 2)


def pad_heads(e: Emitter, op: Op, heads: fx.Node, zeros: int) -> fx.Node:
    """Heads `[batch, sequence, heads, width]` with `zeros` more dims."""
    return e.call(op, aten.constant_pad_nd.default, heads, [0, zeros]) if zeros else heads


def _join_shared(e: Emitter, op: Op) -> None:
    """Pads x and the shared dims with zeros to the width of the result, and adds them."""
    x, shared = e.refs(op)
    head_dim, shared_dim = (e.value(operand).shape[3] for operand in op.operands)
    x = e.call(op, aten.constant_pad_nd.default, x, [0, shared_dim])
    e.result(op, aten.add.Tensor, x, e.call(op, aten.constant_pad_nd.default, shared, [head_dim, 0]))


def _mask(e: Emitter, op: o.Attention, operands: Mapping[str, fx.Node]) -> fx.Node | None:
    """The tokens that each token attends to, `[batch, 1, sequence, sequence]`; None where only `causal` limits them.

    They are of its segment and of its kind, real or padding; if `causal`, none comes after it.
    """
    token_numbers = [operands[name] for name in ("segments", "real") if name in operands]
    if not token_numbers:
        return None
    masks = [_compare_pairs(e, op, aten.eq.Tensor, numbers) for numbers in token_numbers]
    if op.causal:
        index = e.call(op, aten.cumsum.default, e.call(op, aten.ones_like.default, token_numbers[0]), 1)
        masks.append(_compare_pairs(e, op, aten.ge.Tensor, index))
    mask, *others = masks
    for other in others:
        mask = e.call(op, aten.logical_and.default, mask, other)
    return e.call(op, aten.unsqueeze.default, mask, 1)


def _compare_pairs(e: Emitter, op: Op, compare: Any, numbers: fx.Node) -> fx.Node:
    """`compare` of each query's number with each key's, `[batch, sequence, sequence]`."""
    rows, columns = (e.call(op, aten.unsqueeze.default, numbers, dim) for dim in (2, 1))
    return e.call(op, compare, rows, columns)


def _clip(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.Clip)
    e.result(op, aten.clamp.default, *e.refs(op), -op.limit, op.limit)


def _repeat_heads(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.RepeatHeads)
    e.result(op, aten.repeat_interleave.self_int, *e.refs(op), op.copies, op.dim)


ATTENTION: Emissions = {
    o.Attention: _attention,
    o.Clip: _clip,
    o.JoinShared: _join_shared,
    o.RepeatHeads: _repeat_heads,
}
