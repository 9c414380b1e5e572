"""The bytes of parameters on one rank: masters, compute copies, gradients, optimizer state, and buffers to send them.

The rules are those of `runtime/weights/weights.py`; ZeRO's stages are those of Rajbhandari et al. 2020, section 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from moec.grammar.spec import Spec
from moec.passes.cost.optimizers import state_bytes
from moec.passes.cost.totals import BlockCost
from moec.passes.ir.layout import REPLICATED
from moec.passes.ir.value import DTYPE_BYTES, Parameter
from moec.passes.ir.work.cost import MASTER_BYTES

GLOO_COPIES = 2
"""gloo's all_gather and reduce_scatter work on a copy of the whole tensor (torch 2.13: ProcessGroupGloo.cpp)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """Bytes of some parameters on one rank.

    `masters` and `optimizer` exist always. `copies` are weights in the compute dtype while a layer runs, where these
    are not the masters; of them `saved` stay until the layer's backward, `lasting` until the end of a step of several
    micro-batches (ZeRO 1 and 2), and `per_use` are gathered again for backward (ZeRO 3). `gathering` is the buffer of
    a gather.

    A layer's backward gives gradients `narrow` in the compute dtype, `wide` copies in fp32, and `buckets`, flat tensors
    for all_reduces, or `sent`, those that ZeRO scatters. `after` remains of one pass, `collected` of earlier
    micro-batches, `reduced` for the optimizer; `cloned` is what the end of the sums copies.
    """

    masters: float = 0
    optimizer: float = 0
    copies: float = 0
    saved: float = 0
    lasting: float = 0
    per_use: float = 0
    gathering: float = 0
    narrow: float = 0
    wide: float = 0
    buckets: float = 0
    sent: float = 0
    after: float = 0
    collected: float = 0
    reduced: float = 0
    cloned: float = 0

    def __add__(self, other: WeightBytes) -> WeightBytes:
        return WeightBytes(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


def weight_bytes(cost: BlockCost, spec: Spec, microbatches: int) -> dict[str, WeightBytes]:
    """The bytes of each parameter of a block, by its name with `@`."""
    saved = cost.saved_parameters()
    if cost.block.recompute == "layer":  # the inputs of the layer's function are kept, its weights among them
        saved = {f"@{p.name}" for p in cost.block.parameters}
    names = {f"@{p.name}": p for p in cost.block.parameters}
    return {name: _of_parameter(cost, p, spec, name in saved, microbatches > 1) for name, p in names.items()}


def _of_parameter(cost: BlockCost, p: Parameter, spec: Spec, is_saved: bool, lasts: bool) -> WeightBytes:
    if p.frozen:
        return _of_frozen(cost, p)
    shape = cost.workload.shape(replace(p, layout=p.optimizer_state or REPLICATED))
    used = math.prod(cost.workload.shape(p))
    local = math.prod(shape) * MASTER_BYTES
    weight, gradient, narrow = used * DTYPE_BYTES[p.dtype], used * MASTER_BYTES, DTYPE_BYTES[p.dtype] < MASTER_BYTES
    of_all = WeightBytes(
        masters=local,
        optimizer=state_bytes(shape, spec.update, p.matrices),
        narrow=weight,
        wide=gradient if narrow else 0,
        reduced=local,
    )
    if p.gathered == "never":
        copies, bucket = weight if narrow else 0, gradient if p.sum_over else 0
        return replace(
            of_all,
            copies=copies,
            saved=copies if is_saved else 0,
            buckets=bucket,
            after=gradient,
            collected=gradient,
            cloned=bucket,
        )
    per_use = p.gathered == "per use"
    times = GLOO_COPIES if cost.workload.device == "cpu" else 1
    return replace(
        of_all,
        copies=weight,
        saved=weight if is_saved and not per_use and not lasts else 0,
        lasting=weight if lasts and not per_use else 0,
        per_use=weight if per_use else 0,
        gathering=times * weight,
        sent=times * gradient,
        after=local,
        collected=local if p.scattered_per_pass else gradient,
        cloned=local,
    )


def _of_frozen(cost: BlockCost, p: Parameter) -> WeightBytes:
    """A parameter that does not train: its weight in the compute dtype, which ZeRO 3 gathers for each use."""
    shapes = (cost.workload.shape(replace(p, layout=layout)) for layout in (p.layout, p.weight))
    weight, part = (math.prod(shape) * DTYPE_BYTES[p.dtype] for shape in shapes)
    narrow = weight if _gets_gradient(cost, p) else 0
    if p.gathered == "never":
        return WeightBytes(masters=part, narrow=narrow)
    times = GLOO_COPIES if cost.workload.device == "cpu" else 1
    return WeightBytes(masters=part, narrow=narrow, copies=weight, per_use=weight, gathering=times * weight)


def _gets_gradient(cost: BlockCost, p: Parameter) -> bool:
    """Whether backward computes the gradient of a frozen parameter and drops it: an operator of moec's own, such as
    `expert_mlp`, computes those of all its operands where it computes one."""
    users = (op for op in cost.block.ops if f"@{p.name}" in op.operands)
    return any(op.operator is not None and not cost.block.frozen.issuperset(op.operands) for op in users)
