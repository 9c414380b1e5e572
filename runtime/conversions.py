"""The conversions between layouts, each an operator with its declared backward: the conversion table at run time.

| from → to | forward | backward |
|---|---|---|
| partial → replicated | `all_reduce` | identity |
| partial → sharded | `reduce_scatter` | all_gather |
| replicated → replicated, for ops sharded on the axis | `copy_to` | all_reduce |
| replicated → sharded | `slice` | all_gather |
| sharded → replicated, consumed alike on every rank | `all_gather_alike` | slice |
| sharded → replicated, for ops sharded on the axis | `all_gather` | reduce_scatter |

`passes/communicate.py` says which is inserted where; ragged rows are in `runtime/collectives.py`. Groups are named
(`moec.runtime.groups`). PyTorch's differentiable `all_reduce` reduces again in backward, which is wrong for a sum that
every rank goes on to use alike; hence two operators where it has one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moec.runtime.groups import resolve
from moec.runtime.ops.registry import check, define, differentiate

__all__ = ["all_gather", "all_gather_alike", "all_reduce", "all_reduce_max", "copy_to", "reduce_scatter", "slice_"]

# Renamed in torch 2.13, where the old names warn.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# ---- what each does with one rank's tensor -------------------------------------------------------------


def _reduced(x: Tensor, group: str, op: Any = dist.ReduceOp.SUM) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, op=op, group=resolve(group))
    return out


def _gathered(x: Tensor, dim: int, group: str) -> Tensor:
    peers = resolve(group)
    pieces = x.new_empty((peers.size(), *x.shape))
    # Flat: gloo wants the output as long as all inputs together along dim 0, and a scalar has none.
    _all_gather_single(pieces.view(-1), x.contiguous().view(-1), group=peers)
    return pieces.flatten(0, 1) if dim == 0 else torch.cat(pieces.unbind(0), dim)


def _scattered(x: Tensor, dim: int, group: str) -> Tensor:
    peers = resolve(group)
    pieces = torch.stack(x.chunk(peers.size(), dim))
    out = torch.empty_like(pieces[0])
    _reduce_scatter_single(out.view(-1), pieces.view(-1), group=peers)
    return out


def _sliced(x: Tensor, dim: int, group: str) -> Tensor:
    peers = resolve(group)
    return x.chunk(peers.size(), dim)[peers.rank()].clone(memory_format=torch.contiguous_format)


# ---- checks and fakes ------------------------------------------------------------------------------------


def _check_group(x: Tensor, group: str) -> None:
    resolve(group)


def _check_dim(x: Tensor, dim: int, group: str) -> None:
    resolve(group)
    check(0 <= dim < x.dim(), lambda: f"moec: there is no dim {dim} to gather of {list(x.shape)}")


def _check_divides(x: Tensor, dim: int, group: str) -> None:
    _check_dim(x, dim, group)
    size = resolve(group).size()
    check(
        x.shape[dim] % size == 0,
        lambda: f'moec: dim {dim} of {list(x.shape)} does not divide over the {size} ranks of "{group}"',
    )


def _fake_like(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape)


def _fake_gathered(x: Tensor, dim: int, group: str) -> Tensor:
    return x.new_empty((*x.shape[:dim], x.shape[dim] * resolve(group).size(), *x.shape[dim + 1 :]))


def _fake_piece(x: Tensor, dim: int, group: str) -> Tensor:
    return x.new_empty((*x.shape[:dim], x.shape[dim] // resolve(group).size(), *x.shape[dim + 1 :]))


# ---- the operators ---------------------------------------------------------------------------------------

all_reduce = define("all_reduce(Tensor x, str group) -> Tensor", fake=_fake_like, check=_check_group, kernel=_reduced)
"""The sum of every rank's x, on every rank; shape and dtype of x, which must be alike on all ranks.

Backward is the identity: partial sums become a replicated value, and what follows is done, and differentiated, alike
on every rank.
"""

all_reduce_max = define(
    "all_reduce_max(Tensor x, str group) -> Tensor",
    fake=_fake_like,
    check=_check_group,
    kernel=lambda x, group: _reduced(x, group, dist.ReduceOp.MAX),
)
"""The largest of every rank's x, element by element; not differentiated."""

copy_to = define(
    "copy_to(Tensor x, str group) -> Tensor",
    fake=_fake_like,
    check=_check_group,
    kernel=lambda x, group: x.clone(memory_format=torch.contiguous_format),
)
"""x, for operators of which each rank does a part. Backward: all_reduce (Megatron's f, Shoeybi et al. 2019)."""

reduce_scatter = define(
    "reduce_scatter(Tensor x, int dim, str group) -> Tensor", fake=_fake_piece, check=_check_divides, kernel=_scattered
)
"""The sum of every rank's x, cut along `dim`: each rank its piece. Backward: all_gather."""

slice_ = define("slice(Tensor x, int dim, str group) -> Tensor", fake=_fake_piece, check=_check_divides, kernel=_sliced)
"""This rank's piece of x along `dim`; x is alike on all ranks. Backward: all_gather."""

all_gather = define(
    "all_gather(Tensor x, int dim, str group) -> Tensor", fake=_fake_gathered, check=_check_dim, kernel=_gathered
)
"""Every rank's x side by side along `dim`, for operators of which each rank does a part. Backward: reduce_scatter."""

all_gather_alike = define(
    "all_gather_alike(Tensor x, int dim, str group) -> Tensor", fake=_fake_gathered, check=_check_dim, kernel=_gathered
)
"""Every rank's x side by side along `dim`, consumed alike on every rank. Backward: slice."""


# ---- and their backward ----------------------------------------------------------------------------------


def _declare(operator: Any, backward: Callable[..., Tensor]) -> None:
    """`backward(gradient, *attributes)` with the attributes that the forward got (`dim`, `group`)."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.attributes = inputs[1:]

    def differentiated(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return (backward(gradient, *ctx.attributes), *(None for _ in ctx.attributes))

    differentiate(operator, setup=setup, backward=differentiated)


_declare(all_reduce, lambda gradient, group: gradient)
_declare(copy_to, all_reduce)
_declare(reduce_scatter, all_gather)
_declare(slice_, all_gather)
_declare(all_gather, reduce_scatter)
_declare(all_gather_alike, slice_)
