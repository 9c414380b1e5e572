"""Emits the ops that give states their new values."""

from __future__ import annotations

import torch

from moec.codegen.emit.emitter import Emissions, Emitter
from moec.passes.ir import Op
from moec.passes.ir.ops import MoveBias, SumSources

aten = torch.ops.aten


def _sum_sources(e: Emitter, op: Op) -> None:
    e.result(op, aten.sum.dim_IntList, *e.refs(op), [0])


def _move_bias(e: Emitter, op: Op) -> None:
    """Compares in whole numbers: `sum(loads)` with `experts · loadsᵢ`."""
    assert isinstance(op, MoveBias)
    bias, loads = e.refs(op)
    (experts,) = op.results[0].shape
    scaled = e.call(op, aten.mul.Scalar, loads, experts)
    missing = e.call(op, aten.sub.Tensor, e.call(op, aten.sum.default, loads), scaled)
    sign = e.call(op, aten.to.dtype, e.call(op, aten.sign.default, missing), e.dtype(op.results[0].dtype))
    e.result(op, aten.add.Tensor, bias, sign, alpha=op.rate)


STATES: Emissions = {
    MoveBias: _move_bias,
    SumSources: _sum_sources,
}
