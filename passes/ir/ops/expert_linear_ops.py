"""`expert_linear`: one matrix for each expert, over ragged or padded rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moec.passes.ir.attribute_types import Count, WindowFunction
from moec.passes.ir.op import Meshes, Placing, TokenOp, Type, op, require
from moec.passes.ir.ops.mixture_ops import ExpertsPlacing
from moec.passes.ir.ops.token_layouts import Blocks
from moec.passes.ir.ops.window_ops import require_window, window_saved
from moec.passes.ir.value import Value
from moec.passes.ir.work.cost import Cost, Direction, Product, Work
from moec.passes.ir.work.formulas import linear_backward, used_share

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@op("expert_linear", "rows weight bias? counts? -> y")
class ExpertLinear(TokenOp):
    """Multiplies each row by its expert's matrix: rows `[experts, rows, in]`, weight `[experts, out, in]` → `[…, out]`.

    `bias` is `[experts, out]`. `counts` are those of ragged rows; padded rows `[experts, places, in]` have none.

    With a weight `[experts, out, kernel, in]` rows are windows, `[experts, rows, (positions + kernel − 1) · in]`, and
    the map is applied at each of `positions` positions: `[…, positions · out]`; then the function `then`.
    """

    positions: Count = 1
    then: WindowFunction = "none"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        by_name = self.named(operands)
        rows, weight = by_name["rows"], by_name["weight"]
        experts, out, *window = weight.shape
        require(rows.shape[0] == experts, self, f"{rows.shape} does not fit {weight.shape}")
        require_window(self, rows, (out, *window) if len(window) == 2 else (out, 1, *window), self.positions)
        counts_name = by_name["counts"].name if "counts" in by_name else None
        require(rows.ragged == counts_name, self, f"rows are counted by {rows.ragged}, not {counts_name}")
        biases = [by_name["bias"]] if "bias" in by_name else []
        require(all(bias.shape == (experts, out) for bias in biases), self, "wants a bias for each output")
        require(all(v.dtype == rows.dtype for v in (weight, *biases)), self, "wants one dtype")
        assert isinstance(out, int)
        return (Type(shape=(*rows.shape[:-1], self.positions * out), dtype=rows.dtype, ragged=rows.ragged),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        by_name = self.named(operands)
        placing = ExpertsPlacing.of(self, by_name["weight"], meshes)
        return Placing(placing.of_operands(by_name), (placing.results,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        by_name = self.named(operands)
        rows, weight = by_name["rows"], by_name["weight"]
        groups, out, *window = workload.shape(weight)
        width, count = math.prod(window), workload.count(results[0]) / out
        largest = workload.most_rows(rows) * self.positions if rows.ragged else count / groups
        product = Product(
            name="linear", m=count, n=out, k=width, groups=groups, largest=largest, dtype=weight.dtype, kind="grouped"
        )
        backward = Direction(products=linear_backward(product), launches=2)
        work = Work(forward=Direction(products=(product,), launches=1), backward=backward)
        windows = window_saved(rows, results[0], count, width, self.positions, self.then, workload)
        saved = (*windows, *workload.keep(*(by_name[name] for name in ("weight", "counts") if name in by_name)))
        return Cost(work=work, saved=saved, used=used_share(weight, workload))
