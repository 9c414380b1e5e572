"""The bytes of parameters on one rank: masters, compute copies, gradients, optimizer state, and buffers to send them.

The rules are those of `runtime/weights/weights.py`; ZeRO's stages are those of Rajbhandari et al. 2020, section 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from moec.grammar.spec import Spec
from moec.passes.cost.optimizers import state_bytes
from moec.passes.cost.totals import BlockCost
from moec.passes.ir.layout import REPLICATED
from moec.passes.ir.value import DTYPE_BYTES, Parameter
from moec.passes.ir.work.cost import MASTER_BYTES
from moec.passes.place.schedule import gathers_again, is_summed, keeps_weights

GLOO_COPIES = 2
"""gloo's all_gather and reduce_scatter work on a copy of the whole tensor (torch 2.13: ProcessGroupGloo.cpp)."""

EXCHANGED = 2
"""Copies of a rank's guests, or of their gradients, while they travel: as sent, and as received. A rank whose own
experts have more guests than it has slots sends more, at most one of each expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """Bytes of some parameters on one rank."""

    masters: float = 0
    """Parameters between uses: in fp32, frozen ones in the compute dtype."""
    optimizer_states: float = 0
    """What the optimizer keeps between steps."""
    compute_copies: float = 0
    """Weights in the compute dtype while a layer runs, where these are not the masters."""
    saved_copies: float = 0
    """Compute copies that stay until the layer's backward."""
    step_copies: float = 0
    """Compute copies that stay until the end of a step of several micro-batches (ZeRO 0 to 2)."""
    regathered: float = 0
    """Compute copies that are gathered again for backward (ZeRO 3)."""
    gather_buffers: float = 0
    """What a gather allocates."""
    narrow_gradients: float = 0
    """What a layer's backward gives, in the compute dtype."""
    wide_gradients: float = 0
    """fp32 copies of gradients in a narrower dtype."""
    all_reduce_buffers: float = 0
    """What an all-reduce of gradients allocates."""
    reduce_scatter_buffers: float = 0
    """What a reduce-scatter of gradients allocates (ZeRO)."""
    sum_copies: float = 0
    """What the end of a sum allocates."""
    pass_gradients: float = 0
    """Gradients that remain of a pass that sums."""
    collected_gradients: float = 0
    """Gradients of earlier micro-batches."""
    final_gradients: float = 0
    """Gradients that the optimizer reads."""
    scatters_per_pass: bool = False
    """Whether each backward pass scatters the gradients (ZeRO 2 and 3); of several parameters, those of any."""

    def __add__(self, other: WeightBytes) -> WeightBytes:
        names = [field.name for field in fields(self) if field.name != "scatters_per_pass"]
        return WeightBytes(
            **{name: getattr(self, name) + getattr(other, name) for name in names},
            scatters_per_pass=self.scatters_per_pass or other.scatters_per_pass,
        )


class _Passes(NamedTuple):
    """The passes of a step through a block, and whether the first one casts weights for all of them."""

    number: int
    cast_once: bool


def weight_bytes(cost: BlockCost, spec: Spec, microbatches: int, *, in_pipeline: bool) -> dict[str, WeightBytes]:
    """The bytes of each parameter of a block, by its name with `@`."""
    passes = _Passes(microbatches, keeps_weights(cost.block, microbatches, in_pipeline=in_pipeline))
    saved = cost.saved_parameters()
    if cost.block.recompute == "layer":  # the inputs of the layer's function are kept, its weights among them
        saved = {f"@{p.name}" for p in cost.block.parameters}
    parameters = {f"@{p.name}": p for p in cost.block.parameters}
    return {
        name: _bytes_of_frozen(cost, p) if p.frozen else _bytes_of_trained(cost, p, spec, name in saved, passes)
        for name, p in parameters.items()
    }


def _bytes_of_trained(cost: BlockCost, p: Parameter, spec: Spec, is_saved: bool, passes: _Passes) -> WeightBytes:
    master_shape = cost.workload.shape(replace(p, layout=p.optimizer_state or REPLICATED))
    elements, master = math.prod(cost.workload.shape(p)), math.prod(master_shape) * MASTER_BYTES
    guests = math.prod(cost.workload.shape(p.used())) - elements
    weight, gradient = elements * DTYPE_BYTES[p.dtype], elements * MASTER_BYTES
    used, of_slots = weight + guests * DTYPE_BYTES[p.dtype], gradient + guests * MASTER_BYTES
    is_narrow = DTYPE_BYTES[p.dtype] < MASTER_BYTES
    always = WeightBytes(
        masters=master,
        optimizer_states=state_bytes(master_shape, spec.update, p.matrices),
        gather_buffers=EXCHANGED * (used - weight),
        narrow_gradients=used,
        wide_gradients=of_slots if is_narrow else 0,
        final_gradients=master,
    )
    sent_home = EXCHANGED * (of_slots - gradient)
    if p.gathered == "never":
        copy, buffer = used if is_narrow or p.guests else 0, gradient if p.sum_over else 0
        return replace(
            always,
            compute_copies=copy,
            saved_copies=copy * is_saved * (1 - passes.cast_once),
            step_copies=copy * passes.cast_once,
            all_reduce_buffers=buffer + sent_home,
            sum_copies=buffer,
            pass_gradients=gradient,
            collected_gradients=of_slots,
        )
    stays, scatters = not gathers_again(p), is_summed(p, last=False)
    return replace(
        always,
        compute_copies=used,
        saved_copies=used * (stays and is_saved) * (passes.number == 1),
        step_copies=used * stays * (passes.number > 1),
        regathered=0 if stays else used,
        gather_buffers=always.gather_buffers + _buffer_copies(cost) * weight,
        reduce_scatter_buffers=_buffer_copies(cost) * gradient + sent_home,
        sum_copies=master,
        pass_gradients=master,
        collected_gradients=master if scatters else of_slots,
        scatters_per_pass=scatters,
    )


def _bytes_of_frozen(cost: BlockCost, p: Parameter) -> WeightBytes:
    """A parameter that does not train: its weight in the compute dtype, which ZeRO 3 gathers for each use."""
    shapes = (cost.workload.shape(replace(p, layout=layout)) for layout in (p.layout, p.weight))
    weight, part = (math.prod(shape) * DTYPE_BYTES[p.dtype] for shape in shapes)
    always = WeightBytes(masters=part, narrow_gradients=weight if _gets_gradient(cost, p) else 0)
    if p.gathered == "never":
        return always
    return replace(always, compute_copies=weight, regathered=weight, gather_buffers=_buffer_copies(cost) * weight)


def _buffer_copies(cost: BlockCost) -> int:
    return GLOO_COPIES if cost.workload.device == "cpu" else 1


def _gets_gradient(cost: BlockCost, p: Parameter) -> bool:
    """Whether backward computes the gradient of a frozen parameter and drops it: an operator of moec's own, such as
    `expert_mlp`, computes those of all its operands where it computes one."""
    users = (op for op in cost.block.ops if f"@{p.name}" in op.operands)
    return any(op.operator is not None and not cost.block.frozen.issuperset(op.operands) for op in users)
