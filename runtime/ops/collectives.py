"""Tokens to their experts and back: the counts, and the ragged all-to-all of rows, as operators.

Groups are named (`moec.runtime.job.groups`); the other collectives are in `moec.runtime.ops.conversions`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moec.passes.ir import ops as o
from moec.passes.ir.operator_schema import schema_of
from moec.runtime.job.groups import resolve
from moec.runtime.job.watch import Layer, backward_of, collective, located
from moec.runtime.ops.registry import check, define, differentiate

__all__ = ["all_to_all", "exchange_counts"]

# ---- exchange_counts ---------------------------------------------------------------------------------


def _check_exchange_counts(counts: Tensor, group: str, site: str = "", layer: Layer = None) -> None:
    check(
        counts.dim() == 2 and counts.shape[0] == 1 and counts.dtype == torch.int64,
        lambda: f"moec::exchange_counts: counts must be int64 [1, E], not {counts.dtype} {list(counts.shape)}",
    )
    size = resolve(group).size()
    check(
        counts.shape[1] % size == 0,
        lambda: f'moec::exchange_counts: {counts.shape[1]} experts do not divide over the {size} ranks of "{group}"',
    )


def _exchange_counts(counts: Tensor, group: str, site: str = "", layer: Layer = None) -> tuple[Tensor, Tensor]:
    sent = counts.reshape(resolve(group).size(), -1)
    received = torch.empty_like(sent)
    with collective("exchange_counts", group, site, layer) as peers:
        dist.all_to_all_single(received, sent, group=peers)
    # One copy to the host brings the sums and the negative counts, which a sum can hide.
    totals = torch.stack([of(counts) for of in (_rows, _below_zero) for counts in (sent, received)]).cpu()
    for row, way in ((2, "to"), (3, "from")):
        _check_not_negative("exchange_counts", totals[row].tolist(), way, group, located(site, layer))
    return received, totals[:2].clone()


def _rows(counts: Tensor) -> Tensor:
    return counts.sum(dim=1)


def _below_zero(counts: Tensor) -> Tensor:
    return counts.clamp(max=0).sum(dim=1)


def _check_not_negative(name: str, counts: list[int], way: str, group: str, site: str) -> None:
    """Raises `RuntimeError` that names both ranks, by their numbers in the job; `way` is "to" or "from"."""
    for place, count in enumerate(counts):
        if count < 0:
            peer = dist.get_global_rank(resolve(group), place)
            raise RuntimeError(
                f"moec::{name}: rank {dist.get_rank()} counts {count} rows {way} rank {peer} over {_where(group, site)}"
            )


def _where(group: str, site: str) -> str:
    return f'"{group}" in {site}' if site else f'"{group}"'


def _fake_exchange_counts(counts: Tensor, group: str, site: str = "", layer: Layer = None) -> tuple[Tensor, Tensor]:
    size = resolve(group).size()
    return counts.new_empty((size, counts.shape[1] // size)), counts.new_empty((2, size), device="cpu")


exchange_counts = define(
    schema_of(o.ExchangeCounts),
    fake=_fake_exchange_counts,
    check=_check_exchange_counts,
    kernel=_exchange_counts,
)
"""Tell every peer how many rows it will get. Rank r of the n in `group` has experts r·E/n up to (r + 1)·E/n.

counts [1, E] int64, this rank's rows for each expert ->
  - received [n, E/n] int64: the rows that each source sends for each of this rank's experts;
  - splits [2, n] int64 on CPU: the rows to send to, and to receive from, each peer. The layer's only copy from device
    to host. Raises `RuntimeError` for counts below 0, on the ranks that send or receive them.
"""

# ---- all_to_all --------------------------------------------------------------------------------------


def _check_all_to_all(
    rows: Tensor, splits: Tensor, reverse: bool, group: str, site: str = "", layer: Layer = None
) -> None:
    size = resolve(group).size()
    check(
        splits.shape == (2, size) and splits.dtype == torch.int64,
        lambda: (
            f'moec::all_to_all: splits must be int64 [2, {size}] over "{group}", '
            f"not {splits.dtype} {list(splits.shape)}"
        ),
    )
    check(rows.dim() >= 1, lambda: "moec::all_to_all: rows must be [R, ...], not a scalar")


def _all_to_all(rows: Tensor, splits: Tensor, reverse: bool, group: str, site: str = "", layer: Layer = None) -> Tensor:
    send, receive = splits.tolist()
    if reverse:
        send, receive = receive, send
    _check_not_negative("all_to_all", send, "to", group, located(site, layer))
    _check_not_negative("all_to_all", receive, "from", group, located(site, layer))
    # gloo moves what it is told and notices nothing: a wrong split is wrong numbers, or a hang.
    check(
        rows.shape[0] == sum(send),
        lambda: (
            f"moec::all_to_all: rank {dist.get_rank()} has {rows.shape[0]} rows, "
            f"but the splits send {sum(send)} over {_where(group, located(site, layer))}"
        ),
    )
    out = rows.new_empty((sum(receive), *rows.shape[1:]))
    rows = rows.contiguous()
    with collective("all_to_all", group, site, layer) as peers:
        dist.all_to_all_single(out, rows, receive, send, group=peers)
    return out


def _fake_all_to_all(
    rows: Tensor, splits: Tensor, reverse: bool, group: str, site: str = "", layer: Layer = None
) -> Tensor:
    return rows.new_empty((torch.library.get_ctx().new_dynamic_size(), *rows.shape[1:]))


all_to_all = define(
    schema_of(o.AllToAll),
    fake=_fake_all_to_all,
    check=_check_all_to_all,
    kernel=_all_to_all,
)
"""Send rows to peers, as many to each as `splits` (of `exchange_counts`) says, and receive theirs, source by source.

rows [R, ...], sorted by the peers they go to -> [R', ...] of the same dtype. `reverse` swaps the two splits, and so
brings rows back; backward does the same. R and R' may be 0. Raises `RuntimeError`, before anything moves, if R is not
the sum of the splits to send, or a split is below 0.
"""


def _setup_all_to_all(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, splits, ctx.reverse, ctx.group, ctx.site, layer = inputs
    ctx.num_rows = rows.shape[0]
    ctx.save_for_backward(splits, layer)


def _differentiate_all_to_all(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    splits, layer = ctx.saved_tensors
    grad_rows = all_to_all(grad, splits, not ctx.reverse, ctx.group, backward_of(ctx.site), layer)
    # Tells a compiler, to which the size is data, that as many rows come back as were sent.
    check(
        grad_rows.shape[0] == ctx.num_rows,
        lambda: f"moec::all_to_all: {ctx.num_rows} rows went, and gradients of {grad_rows.shape[0]} came back",
    )
    return grad_rows, None, None, None, None, None


differentiate(all_to_all, setup=_setup_all_to_all, backward=_differentiate_all_to_all)
