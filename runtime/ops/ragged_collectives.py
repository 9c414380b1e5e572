"""The operators of conversions of ragged rows, and of their counts.

Sizes of rows are known on the device alone, and a collective wants them on the host. The conversions of counts make the
one copy (`to_host`); those of rows take its result as `splits`, forward and backward, and never wait for the device.

What each converts, and the conversion that its backward runs, its class declares
(`passes/ir/ops/ragged_conversions.py`). Groups are named (`moec.runtime.ranks.groups`); the other conversions are in
`moec.runtime.ops.dense_collectives`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moec.passes.ir.operator_schema import schema_of
from moec.passes.ir.ops import ragged_conversions as o
from moec.runtime.ops.define_conversion import define_conversion
from moec.runtime.ops.dense_collectives import all_gather_single
from moec.runtime.ops.registry import check, define
from moec.runtime.ranks.groups import resolve
from moec.runtime.ranks.watch import Layer, collective, located

# ---- counts of rows ----------------------------------------------------------------------------------


def to_host(*tensors: Tensor) -> list[Tensor]:
    """The int64 tensors in the host's memory, by one copy: the host waits for the device once."""
    on_host = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
    parts = torch.split(on_host, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _check_counts(counts: Tensor, group: str, site: str = "", layer: Layer = None) -> None:
    resolve(group)
    check(
        counts.dim() == 2 and counts.dtype == torch.int64,
        lambda: f"moec: counts of rows must be int64 [sources, E], not {counts.dtype} {list(counts.shape)}",
    )


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


def _check_both(counts: Tensor, group: str, gather_group: str, site: str = "", layer: Layer = None) -> None:
    _check_exchange_counts(counts, group)
    resolve(gather_group)


class _Totals(NamedTuple):
    """Rows to send to, and to receive from, each rank of a group, and the same sums of the counts below 0."""

    on_device: Tensor
    name: str
    group: str

    @classmethod
    def of(cls, sent: Tensor, received: Tensor, name: str, group: str) -> _Totals:
        """From the counts that go to and come from each rank `[ranks, …]`."""
        sums = [function(counts) for function in (_row_sum, _negative_sum) for counts in (sent, received)]
        return cls(torch.stack(sums), name, group)


def _splits(totals: Sequence[_Totals], location: str) -> list[Tensor]:
    """The splits `[2, ranks]` on the host, by one copy, which also brings the sums of negative counts for the check."""
    found = to_host(*(each.on_device for each in totals))
    for (_, name, group), sums in zip(totals, found, strict=True):
        for row, direction in ((2, "to"), (3, "from")):
            _check_not_negative(name, sums[row].tolist(), direction, group, location)
    return [sums[:2].clone() for sums in found]


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


def _exchanged_counts(counts: Tensor, group: str, site: str, layer: Layer) -> tuple[Tensor, _Totals]:
    sent = counts.reshape(resolve(group).size(), -1)
    received = torch.empty_like(sent)
    with collective("exchange_counts", group, site, layer) as peers:
        dist.all_to_all_single(received, sent, group=peers)
    return received, _Totals.of(sent, received, "exchange_counts", group)


def _gathered_counts(counts: Tensor, group: str, site: str, layer: Layer) -> tuple[Tensor, _Totals]:
    size = resolve(group).size()
    gathered = counts.new_empty((size * counts.shape[0], counts.shape[1]))
    with collective("gather_counts", group, site, layer) as peers:
        all_gather_single(gathered, counts.contiguous(), group=peers)
    sent = counts.reshape(1, -1).expand(size, -1)
    return gathered, _Totals.of(sent, gathered.view(size, -1), "gather_counts", group)


def _exchange_counts(counts: Tensor, group: str, site: str = "", layer: Layer = None) -> tuple[Tensor, Tensor]:
    received, totals = _exchanged_counts(counts, group, site, layer)
    (splits,) = _splits([totals], located(site, layer))
    return received, splits


def _gather_counts(counts: Tensor, group: str, site: str = "", layer: Layer = None) -> tuple[Tensor, Tensor]:
    gathered, totals = _gathered_counts(counts, group, site, layer)
    (splits,) = _splits([totals], located(site, layer))
    return gathered, splits


def _exchange_and_gather_counts(
    counts: Tensor, group: str, gather_group: str, site: str = "", layer: Layer = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    received, to_experts = _exchanged_counts(counts, group, site, layer)
    gathered, to_all = _gathered_counts(received, gather_group, site, layer)
    splits, all_splits = _splits([to_experts, to_all], located(site, layer))
    return received, gathered, splits, all_splits


def _fake_exchange_counts(counts: Tensor, group: str, site: str = "", layer: Layer = None) -> tuple[Tensor, Tensor]:
    size = resolve(group).size()
    return counts.new_empty((size, counts.shape[1] // size)), counts.new_empty((2, size), device="cpu")


def _fake_gather_counts(counts: Tensor, group: str, site: str = "", layer: Layer = None) -> tuple[Tensor, Tensor]:
    size = resolve(group).size()
    return counts.new_empty((size * counts.shape[0], counts.shape[1])), counts.new_empty((2, size), device="cpu")


def _fake_exchange_and_gather_counts(
    counts: Tensor, group: str, gather_group: str, site: str = "", layer: Layer = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    received, splits = _fake_exchange_counts(counts, group)
    all_counts, all_splits = _fake_gather_counts(received, gather_group)
    return received, all_counts, splits, all_splits


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

gather_counts = define_conversion(
    o.GatherCounts,
    fake=_fake_gather_counts,
    check=_check_counts,
    kernel=_gather_counts,
)
"""Tell every peer how many rows of each source this rank has, before all ranks get the rows of all.

counts [S, E] int64 -> all_counts [n S, E] int64, and splits as those of `exchange_counts`: a rank sends all its rows to
each peer.
"""

exchange_and_gather_counts = define(
    schema_of(o.ExchangeAndGatherCounts),
    fake=_fake_exchange_and_gather_counts,
    check=_check_both,
    kernel=_exchange_and_gather_counts,
    gives_integers=True,
)
"""`exchange_counts` over `group`, then `gather_counts` of the received counts over `gather_group`, with one copy to the
host: received, all_counts, and the splits of both."""

# ---- rows --------------------------------------------------------------------------------------------


def _check_rows(rows: Tensor, splits: Tensor, group: str, site: str = "", layer: Layer = None) -> None:
    size = resolve(group).size()
    check(
        splits.shape == (2, size) and splits.dtype == torch.int64,
        lambda: f'moec: splits must be int64 [2, {size}] over "{group}", not {splits.dtype} {list(splits.shape)}',
    )
    check(rows.dim() >= 1, lambda: "moec: rows must be [R, ...], not a scalar")


def _check_exchanged_rows(
    rows: Tensor, splits: Tensor, reverse: bool, group: str, site: str = "", layer: Layer = None
) -> None:
    _check_rows(rows, splits, group)


def _fake_rows(rows: Tensor, splits: Tensor, group: str, site: str = "", layer: Layer = None) -> Tensor:
    return rows.new_empty((torch.library.get_ctx().new_dynamic_size(), *rows.shape[1:]))


def _fake_exchanged_rows(
    rows: Tensor, splits: Tensor, reverse: bool, group: str, site: str = "", layer: Layer = None
) -> Tensor:
    return _fake_rows(rows, splits, group)


def _sizes(
    name: str, num_rows: int, splits: Tensor, group: str, location: str, *, reverse: bool = False
) -> tuple[list[int], list[int]]:
    """The rows to send to, and to receive from, each peer, of `num_rows` in all to send.

    gloo moves what it is told and notices nothing: a wrong split is wrong numbers, or a hang.
    """
    send, receive = splits.tolist()
    if reverse:
        send, receive = receive, send
    _check_not_negative(name, send, "to", group, location)
    _check_not_negative(name, receive, "from", group, location)
    check(
        num_rows == sum(send),
        lambda: (
            f"moec::{name}: rank {dist.get_rank()} has {num_rows} rows to send, "
            f"but the splits send {sum(send)} over {_location(group, location)}"
        ),
    )
    return send, receive


def _all_to_all(rows: Tensor, splits: Tensor, reverse: bool, group: str, site: str = "", layer: Layer = None) -> Tensor:
    send, receive = _sizes("all_to_all", len(rows), splits, group, located(site, layer), reverse=reverse)
    out = rows.new_empty((sum(receive), *rows.shape[1:]))
    rows = rows.contiguous()
    with collective("all_to_all", group, site, layer) as peers:
        dist.all_to_all_single(out, rows, receive, send, group=peers)
    return out


all_to_all = define_conversion(
    o.AllToAll,
    fake=_fake_exchanged_rows,
    check=_check_exchanged_rows,
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


def _all_gather_rows(rows: Tensor, splits: Tensor, group: str, site: str = "", layer: Layer = None) -> Tensor:
    copies = torch.cat([rows] * resolve(group).size())
    send, receive = _sizes("all_gather_rows", len(copies), splits, group, located(site, layer))
    out = rows.new_empty((sum(receive), *rows.shape[1:]))
    with collective("all_gather_rows", group, site, layer) as peers:
        dist.all_to_all_single(out, copies, receive, send, group=peers)
    return out


def _reduce_scatter_rows(rows: Tensor, splits: Tensor, group: str, site: str = "", layer: Layer = None) -> Tensor:
    location = located(site, layer)
    send, receive = _sizes("reduce_scatter_rows", len(rows), splits, group, location, reverse=True)
    terms = rows.new_empty((len(receive), receive[0], *rows.shape[1:]))
    with collective("reduce_scatter_rows", group, site, layer) as peers:
        dist.all_to_all_single(terms.flatten(0, 1), rows.contiguous(), receive, send, group=peers)
    return terms.sum(0)


all_gather_rows = define_conversion(
    o.AllGatherRows,
    fake=_fake_rows,
    check=_check_rows,
    kernel=_all_gather_rows,
)
"""Every rank's rows, rank by rank, for operators that are sharded over the ranks. Backward: reduce_scatter_rows.

rows [R, ...], splits of `gather_counts` -> [R of all ranks, ...]. Any R may be 0. Raises `RuntimeError`, before
anything moves, if R is not the split to send, or a split is below 0.
"""

reduce_scatter_rows = define_conversion(
    o.ReduceScatterRows,
    fake=_fake_rows,
    check=_check_rows,
    kernel=_reduce_scatter_rows,
)
"""This rank's rows of the sum of every rank's rows, all in the order of `all_gather_rows`, which is its backward."""
