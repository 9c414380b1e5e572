"""The gate on the result of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moec.passes.ir.op import Meshes, Placing, TokenOp, Type, op, require
from moec.passes.ir.ops.token_layouts import Blocks, reduced_layout
from moec.passes.ir.value import Value
from moec.passes.ir.work.cost import Cost
from moec.passes.ir.work.formulas import elementwise

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@op("gate_heads", "x logits -> gated")
class GateHeads(TokenOp):
    """x `[batch, sequence, heads, width]`, logits `[batch, sequence, heads]` or of x's shape → `x · sigmoid(logits)`.

    A gate after attention, for each head or each element (Qiu et al. 2025, arXiv 2505.06708, section 2.2).
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, logits = operands
        fits = logits.shape in (x.shape, x.shape[:3]) and logits.dtype == x.dtype
        require(len(x.shape) == 4 and fits, self, "wants a logit for each head, or for each element")
        return (Type(shape=x.shape, dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = reduced_layout(operands[0], meshes)
        return Placing((layout, layout), (layout,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        x, logits = operands
        gate = workload.inner(results[0], "gate", workload.count(logits), logits.dtype)
        return elementwise(self, operands, results, workload, keeps=(*workload.keep(x), gate), forward=2, backward=4)
