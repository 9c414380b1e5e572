"""Emits the ops of convolutional feed-forwards (`passes/ir/ops/window_ops.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from moec.codegen.emit.emitter import Emissions, Emitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o
from moec.passes.ir.value import Dim

aten = torch.ops.aten


def _windows(e: Emitter, op: Op) -> None:
    """Copies the windows: a compiled graph gives the gradient of a result the result's strides, so none may overlap."""
    assert isinstance(op, o.Windows)
    operands, size = op.named(e.refs(op)), op.before + 1 + op.after
    padded = e.call(op, aten.constant_pad_nd.default, operands["x"], [0, 0, op.before, op.after])
    window = e.call(op, aten.transpose.int, e.call(op, aten.unfold.default, padded, 1, size, 1), 2, 3)
    for name, outside in (("segments", -1), ("real", 0)):
        if name in operands:
            numbers = e.call(op, aten.constant_pad_nd.default, operands[name], [op.before, op.after], outside)
            numbers = e.call(op, aten.unfold.default, numbers, 1, size, 1)
            token_numbers = e.call(op, aten.unsqueeze.default, operands[name], -1)
            if name == "real":
                inside = e.call(op, aten.gt.Scalar, numbers, 0)
            else:
                inside = e.call(op, aten.eq.Tensor, numbers, token_numbers)
            mask = e.call(op, aten.to.dtype, inside, e.dtype(op.results[0].dtype))
            window = e.call(op, aten.mul.Tensor, window, e.call(op, aten.unsqueeze.default, mask, -1))
    e.result(op, aten.contiguous.default, e.call(op, aten.flatten.using_ints, window, 2, 3))


def _window_linear(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.WindowLinear)
    operands, shape = op.named(e.refs(op)), e.shape(op.operands[1])
    x, weight = operands["x"], e.call(op, aten.flatten.using_ints, operands["weight"], 1, 2)
    steps: list[tuple[Any, tuple[object, ...]]] = []
    if op.positions > 1:
        x = windows_at(e, op, x, (0, *shape))
        steps += [(aten.flatten.using_ints, (2, 3))]
    steps += [(aten.gelu.default, ())] if op.then == "gelu" else []
    follow(e, op, (aten.linear.default, x, weight, operands.get("bias")), steps)


def windows_at(e: Emitter, op: Op, x: fx.Node, weight: Sequence[Dim]) -> fx.Node:
    """The inputs of a map `[…, out, kernel, in]` at each position: x `[…, width]` → `[…, positions, kernel · in]`."""
    *_, kernel, width = (int(dim) for dim in weight)
    return e.call(op, aten.unfold.default, x, -1, kernel * width, width)


def follow(e: Emitter, op: Op, first: tuple[Any, ...], steps: Sequence[tuple[Any, tuple[object, ...]]]) -> None:
    """Emits `first`, then each step with the result before it; the last step computes the op's result."""
    target, *arguments = first
    for next_target, next_arguments in steps:
        arguments = [e.call(op, target, *arguments), *next_arguments]
        target = next_target
    e.result(op, target, *arguments)


WINDOWS: Emissions = {o.WindowLinear: _window_linear, o.Windows: _windows}
