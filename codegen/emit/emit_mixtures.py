"""Emits the ops of a mixture of experts after its gate."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moec.codegen.emit.emitter import Emitter
from moec.codegen.emit.operators import recomputes
from moec.passes.ir import Op
from moec.passes.ir import ops as o

aten = torch.ops.aten
moec = torch.ops.moec


def _expert_mlp_padded(e: Emitter, op: Op) -> None:
    """Runs `expert_mlp` over all places of each expert, empty ones too; no token combines an empty place."""
    assert isinstance(op, o.ExpertMlpPadded)
    given = op.named(e.refs(op))
    rows, weights = given["rows"], given.get("weights")
    counts = e.call(op, moec.even_counts.default, rows)
    flat = e.call(op, aten.flatten.using_ints, rows, 0, 1)
    flat_weights = None if weights is None else e.call(op, aten.flatten.using_ints, weights, 0, 1)
    experts = (given["up"], given["down"], given.get("up_bias"), given.get("down_bias"))
    arguments = (flat, counts, *experts, flat_weights, op.activation)
    if recomputes(e, op):
        out = e.call(op, moec.expert_mlp_recomputed.default, *arguments)
    else:
        out = e.item(op, e.call(op, moec.expert_mlp.default, *arguments), 0)
    e.result(op, aten.view_as.default, out, rows)


MIXTURES: dict[type[Op], Callable[[Emitter, Op], None]] = {o.ExpertMlpPadded: _expert_mlp_padded}
