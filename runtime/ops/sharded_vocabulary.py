"""Lookups in a vocabulary that is sharded: each rank of the group has the same number of consecutive ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moec.passes.ir import ops as o
from moec.passes.ir.operator_schema import schema_of
from moec.runtime.ops.embed import embed, sum_by_id
from moec.runtime.ops.registry import check, define, differentiate
from moec.runtime.ranks.groups import resolve


def local_ids(ids: Tensor, size: int, rank: int) -> tuple[Tensor, Tensor]:
    """ids relative to the first of `rank`'s `size` ids, 0 for ids of other ranks; and a mask of the ids of `rank`."""
    local = ids - rank * size
    is_local = (local >= 0) & (local < size)
    return local.where(is_local, 0), is_local


# ---- embed_part --------------------------------------------------------------------------------------


def embed_rows(ids: Tensor, table: Tensor, rank: int) -> Tensor:
    """The result of `embed_part` on `rank`."""
    local, is_local = local_ids(ids, table.shape[0], rank)
    rows: Tensor = embed(local, table)
    return rows * is_local[..., None]


def _check_embed(ids: Tensor, table: Tensor, group: str) -> None:
    check(
        ids.dtype == torch.int64 and table.dim() == 2,
        lambda: f"moec::embed_part: wants int64 ids and a table [V, D], not {ids.dtype} and {list(table.shape)}",
    )
    resolve(group)


def _embed_part(ids: Tensor, table: Tensor, group: str) -> Tensor:
    return embed_rows(ids, table, resolve(group).rank())


def _fake_embed(ids: Tensor, table: Tensor, group: str) -> Tensor:
    return table.new_empty((*ids.shape, table.shape[1]))


embed_part = define(
    schema_of(o.Embed, "embed_part", also="str group"),
    fake=_fake_embed,
    check=_check_embed,
    kernel=_embed_part,
)
"""Rows of this rank's part of a table: ids [B, S] int64, table [V / n, D] -> [B, S, D], zeros for other ranks' ids.

The sum over the n ranks of `group` is the embedding. Communicates nothing.
"""


def _embed_part_backward(grad: Tensor, ids: Tensor, rows: int, group: str) -> Tensor:
    local, is_local = local_ids(ids, rows, resolve(group).rank())
    return sum_by_id(grad * is_local[..., None], local, rows)


embed_part_backward = define(
    "embed_part_backward(Tensor grad, Tensor ids, int rows, str group) -> Tensor",
    fake=lambda grad, ids, rows, group: grad.new_empty((rows, grad.shape[-1])),
    check=lambda grad, ids, rows, group: None,
    kernel=_embed_part_backward,
)


def _setup_embed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ids, table, ctx.group = inputs
    ctx.rows = table.shape[0]
    ctx.save_for_backward(ids)


def _differentiate_embed(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
    (ids,) = ctx.saved_tensors
    return None, embed_part_backward(grad, ids, ctx.rows, ctx.group), None


differentiate(
    embed_part,
    setup=_setup_embed,
    backward=_differentiate_embed,
    composition=lambda inputs, outputs: (embed_rows(inputs[0], inputs[1], resolve(inputs[2]).rank()),),
    saved_inputs=lambda ctx, grad: ((*ctx.saved_tensors, grad.new_zeros(ctx.rows, grad.shape[-1]), ctx.group), ()),
)

# ---- label_logit -------------------------------------------------------------------------------------


def pick_logits(logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    """The result of `label_logit` on `rank`."""
    local, is_local = local_ids(labels, logits.shape[-1], rank)
    return logits.gather(-1, local[..., None])[..., 0] * is_local


def _check_labels(logits: Tensor, labels: Tensor, group: str) -> None:
    check(
        labels.dtype == torch.int64 and logits.shape[:-1] == labels.shape,
        lambda: f"moec::label_logit: wants a label for each of {list(logits.shape[:-1])}, not {list(labels.shape)}",
    )
    resolve(group)


def _label_logit(logits: Tensor, labels: Tensor, group: str) -> Tensor:
    return pick_logits(logits, labels, resolve(group).rank())


label_logit = define(
    schema_of(o.LabelLogit, "label_logit", also="str group"),
    fake=lambda logits, labels, group: logits.new_empty(labels.shape),
    check=_check_labels,
    kernel=_label_logit,
)
"""The logit of each token's label where this rank has it, else 0: logits [B, S, V / n], labels [B, S] -> [B, S].

An ignored label (−100) gives 0 on every rank. Communicates nothing.
"""


def _label_logit_backward(grad: Tensor, labels: Tensor, width: int, group: str) -> Tensor:
    local, is_local = local_ids(labels, width, resolve(group).rank())
    return grad.new_zeros((*labels.shape, width)).scatter_(-1, local[..., None], (grad * is_local)[..., None])


label_logit_backward = define(
    "label_logit_backward(Tensor grad, Tensor labels, int width, str group) -> Tensor",
    fake=lambda grad, labels, width, group: grad.new_empty((*labels.shape, width)),
    check=lambda grad, labels, width, group: None,
    kernel=_label_logit_backward,
)


def _setup_labels(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, labels, ctx.group = inputs
    ctx.width = logits.shape[-1]
    ctx.save_for_backward(labels)


def _differentiate_labels(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (labels,) = ctx.saved_tensors
    return label_logit_backward(grad, labels, ctx.width, ctx.group), None, None


differentiate(
    label_logit,
    setup=_setup_labels,
    backward=_differentiate_labels,
    composition=lambda inputs, outputs: (pick_logits(inputs[0], inputs[1], resolve(inputs[2]).rank()),),
    saved_inputs=lambda ctx, grad: ((grad.new_zeros(*grad.shape, ctx.width), *ctx.saved_tensors, ctx.group), ()),
)
