"""Emits conversions between layouts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moec.codegen.emit.emitter import Emitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o

moec = torch.ops.moec


def _all_reduce(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.AllReduce)
    target = moec.all_reduce_max.default if op.reduce == "max" else moec.all_reduce.default
    e.result(op, target, *e.refs(op), e.group(op.axis), **e.site(op))


def _copy_to(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.CopyTo)
    e.result(op, moec.copy_to.default, *e.refs(op), e.group(op.axis), **e.site(op))


def _along_dim(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.AllGather | o.AllGatherAlike | o.ReduceScatter | o.Slice)
    target = getattr(moec, op.mnemonic).default
    e.result(op, target, *e.refs(op), op.dim, e.group(op.axis), **e.site(op))


def _exchange_counts(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.ExchangeCounts)
    e.results(op, moec.exchange_counts.default, *e.refs(op), e.group(op.axis), **e.site(op))


def _all_to_all(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.AllToAll)
    rows, splits, _ = e.refs(op)
    e.result(op, moec.all_to_all.default, rows, splits, e.group(op.axis), op.reverse, **e.site(op))


def _all_to_all_padded(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.AllToAllPadded)
    target = moec.all_to_all_padded.default
    e.result(op, target, *e.refs(op), op.given, op.wanted, e.group(op.axis), **e.site(op))


CONVERSIONS: dict[type[Op], Callable[[Emitter, Op], None]] = {
    o.AllGather: _along_dim,
    o.AllGatherAlike: _along_dim,
    o.AllReduce: _all_reduce,
    o.AllToAll: _all_to_all,
    o.AllToAllPadded: _all_to_all_padded,
    o.CopyTo: _copy_to,
    o.ExchangeCounts: _exchange_counts,
    o.ReduceScatter: _along_dim,
    o.Slice: _along_dim,
}
