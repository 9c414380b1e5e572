"""The operators of conversions of ragged rows, and of their counts.

What each converts, and the conversion that its backward runs, its class declares
(`passes/ir/ops/ragged_conversions.py`). Groups are named (`moec.runtime.ranks.groups`); the other conversions are in
`moec.runtime.ops.dense_collectives`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from moec.passes.ir.ops import ragged_conversions as o
from moec.runtime.ops.define_conversion import define_conversion
from moec.runtime.ops.registry import check
from moec.runtime.ranks.groups import resolve
from moec.runtime.ranks.watch import Layer, collective, located

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
    sums = [function(counts) for function in (_row_sum, _negative_sum) for counts in (sent, received)]
    totals = torch.stack(sums).cpu()
    for row, direction in ((2, "to"), (3, "from")):
        _check_not_negative("exchange_counts", totals[row].tolist(), direction, group, located(site, layer))
    return received, totals[:2].clone()


def _row_sum(counts: Tensor) -> Tensor:
    return counts.sum(dim=1)


def _negative_sum(counts: Tensor) -> Tensor:
    return counts.clamp(max=0).sum(dim=1)


def _check_not_negative(name: str, counts: list[int], direction: str, group: str, site: str) -> None:
    """Raises `RuntimeError` that names both ranks, by their numbers in the job; `direction` is "to" or "from"."""
    for peer_index, count in enumerate(counts):
        if count < 0:
            peer, location = dist.get_global_rank(resolve(group), peer_index), _location(group, site)
            raise RuntimeError(
                f"moec::{name}: rank {dist.get_rank()} counts {count} rows {direction} rank {peer} over {location}"
            )


def _location(group: str, site: str) -> str:
    return f'"{group}" in {site}' if site else f'"{group}"'


def _fake_exchange_counts(counts: Tensor, group: str, site: str = "", layer: Layer = None) -> tuple[Tensor, Tensor]:
    size = resolve(group).size()
    return counts.new_empty((size, counts.shape[1] // size)), counts.new_empty((2, size), device="cpu")


exchange_counts = define_conversion(
    o.ExchangeCounts,
    fake=_fake_exchange_counts,
    check=_check_exchange_counts,
    kernel=_exchange_counts,
)
"""Tell every peer how many rows it will get. Rank r of the n in `group` has experts r·E/n up to (r + 1)·E/n.

counts [1, E] int64, this rank's rows for each expert ->
  - received [n, E/n] int64: the rows that each source sends for each of this rank's experts;
  - splits [2, n] int64 on CPU: the rows to send to, and to receive from, each peer. Raises
    `RuntimeError` for counts below 0, on the ranks that send or receive them.
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
            f"but the splits send {sum(send)} over {_location(group, located(site, layer))}"
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


all_to_all = define_conversion(
    o.AllToAll,
    fake=_fake_all_to_all,
    check=_check_all_to_all,
    kernel=_all_to_all,
)
"""Send rows to peers, as many to each as `splits` (of `exchange_counts`) says, and receive theirs, source by source.

rows [R, ...], sorted by the peers they go to -> [R', ...] of the same dtype. `reverse` swaps the two splits, and so
brings rows back; backward does the same. R and R' may be 0. Raises `RuntimeError`, before anything moves, if R is not
the sum of the splits to send, or a split is below 0.
"""


# ---- rows of all ranks' tokens -----------------------------------------------------------------------
#
# gloo has no all-gather and no reduce-scatter of pieces of different sizes. Padded to the largest piece, every rank
# would send as many rows as the busiest. `all_to_all_single` takes any sizes, 0 among them, on gloo and on NCCL: ranks
# send the same number of bytes as a ring does, and none for padding.


def _check_gathered(rows: Tensor, counts: Tensor, group: str, site: str = "", layer: Layer = None) -> None:
    size = resolve(group).size()
    check(
        counts.dim() == 2 and counts.dtype == torch.int64,
        lambda: f"moec: counts of gathered rows must be int64 [sources, E], not {counts.dtype} {list(counts.shape)}",
    )
    check(
        counts.shape[0] % size == 0,
        lambda: f'moec: counts of {counts.shape[0]} sources do not divide over the {size} ranks of "{group}"',
    )
    check(rows.dim() >= 1, lambda: "moec: gathered rows must be [R, ...], not a scalar")


def _rows_of_ranks(name: str, counts: Tensor, group: str, location: str) -> list[int]:
    """Number of rows of each rank of the group, from the counts of all: a copy from device to host.

    Raises `RuntimeError`, on every rank, for counts below 0.
    """
    counts_by_rank = counts.reshape(resolve(group).size(), -1)
    totals, negative = torch.stack([_row_sum(counts_by_rank), _negative_sum(counts_by_rank)]).tolist()
    _check_not_negative(name, negative, "from", group, location)
    return list(totals)


def _check_row_count(name: str, rows: Tensor, counted: int, group: str, location: str) -> None:
    check(
        rows.shape[0] == counted,
        lambda: (
            f"moec::{name}: rank {dist.get_rank()} has {rows.shape[0]} rows, "
            f"but the counts say {counted} over {_location(group, location)}"
        ),
    )


def _gathered(name: str, rows: Tensor, counts: Tensor, group: str, site: str, layer: Layer) -> Tensor:
    location = located(site, layer)
    sizes, rank = _rows_of_ranks(name, counts, group, location), resolve(group).rank()
    _check_row_count(name, rows, sizes[rank], group, location)
    out = rows.new_empty((sum(sizes), *rows.shape[1:]))
    copies = torch.cat([rows for _ in sizes])
    with collective(name, group, site, layer) as peers:
        dist.all_to_all_single(out, copies, sizes, [rows.shape[0] for _ in sizes], group=peers)
    return out


def _all_gather_rows(rows: Tensor, counts: Tensor, group: str, site: str = "", layer: Layer = None) -> Tensor:
    return _gathered("all_gather_rows", rows, counts, group, site, layer)


def _all_gather_rows_alike(rows: Tensor, counts: Tensor, group: str, site: str = "", layer: Layer = None) -> Tensor:
    return _gathered("all_gather_rows_alike", rows, counts, group, site, layer)


def _reduce_scatter_rows(rows: Tensor, all_counts: Tensor, group: str, site: str = "", layer: Layer = None) -> Tensor:
    location = located(site, layer)
    sizes = _rows_of_ranks("reduce_scatter_rows", all_counts, group, location)
    _check_row_count("reduce_scatter_rows", rows, sum(sizes), group, location)
    num_local = sizes[resolve(group).rank()]
    terms = rows.new_empty((len(sizes), num_local, *rows.shape[1:]))
    with collective("reduce_scatter_rows", group, site, layer) as peers:
        dist.all_to_all_single(terms.flatten(0, 1), rows.contiguous(), [num_local for _ in sizes], sizes, group=peers)
    return terms.sum(0)


def _slice_rows(rows: Tensor, all_counts: Tensor, group: str, site: str = "", layer: Layer = None) -> Tensor:
    location = located(site, layer)
    sizes = _rows_of_ranks("slice_rows", all_counts, group, location)
    _check_row_count("slice_rows", rows, sum(sizes), group, location)
    return torch.split(rows, sizes)[resolve(group).rank()].clone(memory_format=torch.contiguous_format)


def _fake_rows(rows: Tensor, counts: Tensor, group: str, site: str = "", layer: Layer = None) -> Tensor:
    return rows.new_empty((torch.library.get_ctx().new_dynamic_size(), *rows.shape[1:]))


all_gather_rows = define_conversion(
    o.AllGatherRows,
    fake=_fake_rows,
    check=_check_gathered,
    kernel=_all_gather_rows,
)
"""Every rank's rows, rank by rank, for operators that are sharded over the ranks. Backward: reduce_scatter_rows.

rows [R, ...], counts [sources of all ranks, E] int64, the same on all ranks -> [R of all ranks, ...]. Any R may be 0.
Raises `RuntimeError`, before anything moves, for counts below 0, and where R is not what the counts say.
"""

all_gather_rows_alike = define_conversion(
    o.AllGatherRowsAlike,
    fake=_fake_rows,
    check=_check_gathered,
    kernel=_all_gather_rows_alike,
)
"""`all_gather_rows` for results that are consumed the same way on every rank. Backward: slice_rows."""

reduce_scatter_rows = define_conversion(
    o.ReduceScatterRows,
    fake=_fake_rows,
    check=_check_gathered,
    kernel=_reduce_scatter_rows,
)
"""This rank's rows of the sum of every rank's rows, all in the order of `all_gather_rows`, which is its backward."""

slice_rows = define_conversion(
    o.SliceRows,
    fake=_fake_rows,
    check=_check_gathered,
    kernel=_slice_rows,
)
"""This rank's rows of rows that are the same on all ranks. Backward: all_gather_rows. Communicates nothing."""
