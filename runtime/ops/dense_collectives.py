"""The operators of conversions between layouts, for values that have one shape on every rank.

What each converts, and the conversion that its backward runs, its class declares
(`passes/ir/ops/dense_conversions.py`); those of ragged rows are in `runtime/ops/ragged_collectives.py`. Groups are
named (`runtime/ranks/groups.py`). PyTorch's differentiable `all_reduce` reduces again in backward, which is wrong for
a sum that all ranks then use in the same way; hence two operators, `all_reduce` and `copy_to`, where PyTorch has one.

`site` says which part of the model a collective belongs to (`codegen/emit`); `{layer}` in it stands for the number
`layer`, a 0-d int64 tensor on CPU, in which layers that share a graph differ. Both are only for messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moec.passes.ir import Layout, Shard
from moec.passes.ir import ops as o
from moec.runtime.ops.define_conversion import define_conversion
from moec.runtime.ops.registry import check
from moec.runtime.ranks.groups import resolve
from moec.runtime.ranks.watch import Layer, collective

# Renamed in torch 2.13, where the old names warn.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# ---- the arithmetic on one rank's tensor ---------------------------------------------------------------


def _all_reduced(x: Tensor, group: str, site: str, layer: Layer, op: Any, name: str) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    with collective(name, group, site, layer) as peers:
        dist.all_reduce(out, op=op, group=peers)
    return out


def _summed(x: Tensor, group: str, site: str = "", layer: Layer = None) -> Tensor:
    return _all_reduced(x, group, site, layer, dist.ReduceOp.SUM, "all_reduce")


def _largest(x: Tensor, group: str, site: str = "", layer: Layer = None) -> Tensor:
    return _all_reduced(x, group, site, layer, dist.ReduceOp.MAX, "all_reduce_max")


def _copied(x: Tensor, group: str, site: str = "", layer: Layer = None) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _gathered(x: Tensor, dim: int, group: str, site: str = "", layer: Layer = None) -> Tensor:
    pieces = x.new_empty((resolve(group).size(), *x.shape))
    # Flat: gloo requires dim 0 of the output to be as long as all inputs together, and a scalar has no dim 0.
    flat, local = pieces.view(-1), x.contiguous().view(-1)
    with collective("all_gather", group, site, layer) as peers:
        all_gather_single(flat, local, group=peers)
    return pieces.flatten(0, 1) if dim == 0 else torch.cat(pieces.unbind(0), dim)


def _scattered(x: Tensor, dim: int, group: str, site: str = "", layer: Layer = None) -> Tensor:
    pieces = torch.stack(x.chunk(resolve(group).size(), dim))
    out = torch.empty_like(pieces[0])
    with collective("reduce_scatter", group, site, layer) as peers:
        _reduce_scatter_single(out.view(-1), pieces.view(-1), group=peers)
    return out


def _sliced(x: Tensor, dim: int, group: str, site: str = "", layer: Layer = None) -> Tensor:
    peers = resolve(group)
    return x.chunk(peers.size(), dim)[peers.rank()].clone(memory_format=torch.contiguous_format)


def _kept_on_first(x: Tensor, group: str, site: str = "", layer: Layer = None) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format) if resolve(group).rank() == 0 else torch.zeros_like(x)


def _exchanged(x: Tensor, given: int, wanted: int, group: str, site: str = "", layer: Layer = None) -> Tensor:
    pieces = torch.stack(x.chunk(resolve(group).size(), wanted))
    received = torch.empty_like(pieces)
    with collective("all_to_all_padded", group, site, layer) as peers:
        dist.all_to_all_single(received, pieces, group=peers)
    return torch.cat(received.unbind(0), given)


def whole_along(x: Tensor, layout: Layout, dims: Sequence[int], groups: str, site: str) -> Tensor:
    """x gathered along the `dims` that `layout` cuts, over the groups whose names begin with `groups`; differentiable,
    for results that every rank uses alike."""
    for axis, placement in reversed(layout.placements):
        if isinstance(placement, Shard) and placement.dim in dims:
            x = all_gather_alike(x, placement.dim, groups + axis, site)
    return x


# ---- checks and fakes ------------------------------------------------------------------------------------


def _check_group(x: Tensor, group: str, site: str = "", layer: Layer = None) -> None:
    resolve(group)


def _check_dim(x: Tensor, dim: int, group: str, site: str = "", layer: Layer = None) -> None:
    resolve(group)
    check(0 <= dim < x.dim(), lambda: f"moec: there is no dim {dim} to gather of {list(x.shape)}")


def _check_divides(x: Tensor, dim: int, group: str, site: str = "", layer: Layer = None) -> None:
    _check_dim(x, dim, group)
    size = resolve(group).size()
    check(
        x.shape[dim] % size == 0,
        lambda: f'moec: dim {dim} of {list(x.shape)} does not divide over the {size} ranks of "{group}"',
    )


def _fake_like(x: Tensor, group: str, site: str = "", layer: Layer = None) -> Tensor:
    return x.new_empty(x.shape)


def _fake_gathered(x: Tensor, dim: int, group: str, site: str = "", layer: Layer = None) -> Tensor:
    return x.new_empty((*x.shape[:dim], x.shape[dim] * resolve(group).size(), *x.shape[dim + 1 :]))


def _fake_piece(x: Tensor, dim: int, group: str, site: str = "", layer: Layer = None) -> Tensor:
    return x.new_empty((*x.shape[:dim], x.shape[dim] // resolve(group).size(), *x.shape[dim + 1 :]))


def _check_exchanged(x: Tensor, given: int, wanted: int, group: str, site: str = "", layer: Layer = None) -> None:
    _check_dim(x, given, group)
    _check_divides(x, wanted, group)


def _fake_exchanged(x: Tensor, given: int, wanted: int, group: str, site: str = "", layer: Layer = None) -> Tensor:
    shape, size = list(x.shape), resolve(group).size()
    shape[given], shape[wanted] = shape[given] * size, shape[wanted] // size
    return x.new_empty(shape)


# ---- the operators ---------------------------------------------------------------------------------------

all_reduce = define_conversion(
    o.AllReduce,
    fake=_fake_like,
    check=_check_group,
    kernel=_summed,
)
"""The sum of every rank's x, on every rank; shape and dtype are x's, and must be the same on all ranks.

Backward is the identity: partial sums become a replicated value, whose consumers compute and differentiate the same on
every rank.
"""

all_reduce_max = define_conversion(
    o.AllReduce,
    reduce="max",
    fake=_fake_like,
    check=_check_group,
    kernel=_largest,
)
"""The elementwise maximum of all ranks' x; not differentiated."""

copy_to = define_conversion(
    o.CopyTo,
    fake=_fake_like,
    check=_check_group,
    kernel=_copied,
)
"""x, for operators that are sharded over the ranks. Backward: all_reduce (Megatron's f, Shoeybi et al. 2019)."""

reduce_scatter = define_conversion(
    o.ReduceScatter,
    fake=_fake_piece,
    check=_check_divides,
    kernel=_scattered,
)
"""This rank's piece, along `dim`, of the sum of every rank's x. Backward: all_gather."""

slice_ = define_conversion(
    o.Slice,
    fake=_fake_piece,
    check=_check_divides,
    kernel=_sliced,
)
"""This rank's piece of x along `dim`; x is the same on all ranks. Backward: all_gather."""

keep_on_first = define_conversion(
    o.KeepOnFirst,
    fake=_fake_like,
    check=_check_group,
    kernel=_kept_on_first,
)
"""x on the first rank of the group, zeros on the others: terms whose sum is x. Backward: the identity."""

all_gather = define_conversion(
    o.AllGather,
    fake=_fake_gathered,
    check=_check_dim,
    kernel=_gathered,
)
"""Every rank's x, concatenated along `dim`, for operators sharded over the ranks. Backward: reduce_scatter."""

all_gather_alike = define_conversion(
    o.AllGatherAlike,
    fake=_fake_gathered,
    check=_check_dim,
    kernel=_gathered,
)
"""Every rank's x, concatenated along `dim`, consumed the same way on every rank. Backward: slice."""

all_to_all_padded = define_conversion(
    o.AllToAllPadded,
    fake=_fake_exchanged,
    check=_check_exchanged,
    kernel=_exchanged,
)
"""x, sharded along `given`, becomes sharded along `wanted`; shapes are the same on every rank."""
