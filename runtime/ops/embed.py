"""`embed`: rows of a table, whose gradient is summed in at least float32.

torch's embedding sums the gradient of bfloat16 tables in bfloat16 on CPU, where small terms vanish beside a large sum:
63 % of the gradient of an id at half of 4,096 places was lost (measured).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moec.passes.ir import ops as o
from moec.passes.ir.operator_schema import schema_of
from moec.runtime.ops import compositions
from moec.runtime.ops.registry import check, define, differentiate


def sum_by_id(grad: Tensor, ids: Tensor, rows: int) -> Tensor:
    """Sums grad [..., D] by ids [...] into [rows, D], in at least float32; rounds once, to the gradient's dtype."""
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    total: Tensor = torch.ops.aten.embedding_dense_backward.default(wide, ids, rows, -1, False)
    return total.to(grad.dtype)


def _check_embed(ids: Tensor, table: Tensor) -> None:
    check(
        ids.dtype == torch.int64 and table.dim() == 2,
        lambda: f"moec::embed: wants int64 ids and a table [V, D], not {ids.dtype} and {list(table.shape)}",
    )


embed = define(
    schema_of(o.Embed, "embed"),
    fake=lambda ids, table: table.new_empty((*ids.shape, table.shape[1])),
    check=_check_embed,
    kernel=lambda ids, table: torch.ops.aten.embedding.default(table, ids),
)
"""Rows of a table: ids [B, S] int64, table [V, D] floating -> [B, S, D]. Other ids are an `IndexError` on CPU."""


def _check_backward(grad: Tensor, ids: Tensor, rows: int) -> None:
    check(
        grad.shape[:-1] == ids.shape,
        lambda: f"moec::embed_backward: ids {list(ids.shape)} do not fit a gradient {list(grad.shape)}",
    )


embed_backward = define(
    "embed_backward(Tensor grad, Tensor ids, SymInt rows) -> Tensor",
    fake=lambda grad, ids, rows: grad.new_empty((rows, grad.shape[-1])),
    check=_check_backward,
    kernel=sum_by_id,
)


def _setup_embed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ids, table = inputs
    ctx.rows = table.shape[0]
    ctx.save_for_backward(ids)


def _differentiate_embed(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
    (ids,) = ctx.saved_tensors
    return None, embed_backward(grad, ids, ctx.rows)


differentiate(
    embed,
    setup=_setup_embed,
    backward=_differentiate_embed,
    composition=lambda inputs, outputs: (compositions.embedded(*inputs),),
    saved_inputs=lambda ctx, grad: ((*ctx.saved_tensors, grad.new_zeros(ctx.rows, grad.shape[-1])), ()),
)
