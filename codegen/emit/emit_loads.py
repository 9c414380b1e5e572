"""Emits the ops of balance terms over the loads of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moec.codegen.emit.emitter import Emitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o

aten = torch.ops.aten


def _first_choices(e: Emitter, op: Op) -> None:
    e.result(op, aten.narrow.default, *e.refs(op), -1, 0, 1)


LOADS: dict[type[Op], Callable[[Emitter, Op], None]] = {
    o.FirstChoices: _first_choices,
}
