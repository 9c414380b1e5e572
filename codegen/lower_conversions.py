"""What each conversion between layouts is in operators."""

from __future__ import annotations

from collections.abc import Callable

from moec.codegen.emitter import BlockEmitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o


def _all_reduce(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.AllReduce)
    target = "moec.all_reduce_max.default" if op.reduce == "max" else "moec.all_reduce.default"
    e.result(op, target, *e.refs(op), e.group(op.axis))


def _copy_to(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.CopyTo)
    e.result(op, "moec.copy_to.default", *e.refs(op), e.group(op.axis))


def _along_dim(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.AllGather | o.AllGatherAlike | o.ReduceScatter | o.Slice)
    e.result(op, f"moec.{op.mnemonic}.default", *e.refs(op), op.dim, e.group(op.axis))


def _exchange_counts(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.ExchangeCounts)
    e.results(op, "moec.exchange_counts.default", *e.refs(op), e.group(op.axis))


def _all_to_all(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.AllToAll)
    rows, splits, _ = op.operands
    e.result(op, "moec.all_to_all.default", e.ref(rows), e.ref(splits), e.group(op.axis), op.reverse)


CONVERSIONS: dict[type[Op], Callable[[BlockEmitter, Op], None]] = {
    o.AllGather: _along_dim,
    o.AllGatherAlike: _along_dim,
    o.AllReduce: _all_reduce,
    o.AllToAll: _all_to_all,
    o.CopyTo: _copy_to,
    o.ExchangeCounts: _exchange_counts,
    o.ReduceScatter: _along_dim,
    o.Slice: _along_dim,
}
