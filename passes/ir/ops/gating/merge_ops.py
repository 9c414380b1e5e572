"""Ops of merged experts: one feed-forward for each sequence, made of the parameters of all experts.

Muqeeth et al. 2023, arXiv 2306.03745, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moec.passes.ir.layout import REPLICATED
from moec.passes.ir.op import Meshes, Op, Placing, Type, op, require
from moec.passes.ir.ops.mixture_ops import group_layout
from moec.passes.ir.ops.padding_ops import require_real
from moec.passes.ir.ops.token_layouts import Blocks
from moec.passes.ir.value import Value, promoted
from moec.passes.ir.work.arrays import larger
from moec.passes.ir.work.cost import Cost, Direction, Product, Work
from moec.passes.ir.work.formulas import elementwise

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@op("merge_shares", "x weight real? -> shares")
class MergeShares(Op):
    """The share of each expert in a sequence's: x `[batch, sequence, dim]`, weight `[experts, dim]` → shares.

    shares `[batch, experts]` are the softmax of a linear router on the mean of the sequence's tokens, in at least fp32.
    With the operand `real` the mean is over real tokens; that of a sequence without any is 0.
    """

    def other_tokens(self, operands: Sequence[Value]) -> str:
        return "`smear`, whose expert is made of a whole sequence"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, weight, *real = operands
        require(len(x.shape) == 3 and x.shape[2:] == weight.shape[1:], self, "wants tokens and a row of each expert")
        require(promoted(x.dtype) == promoted(weight.dtype), self, "wants one dtype, or fp32")
        require_real(self, x, real)
        return (Type(shape=(x.shape[0], weight.shape[0]), dtype=promoted(weight.dtype)),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = group_layout("sequence", meshes)
        return Placing((layout, REPLICATED, *(layout,) * len(operands[2:])), (layout,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        _, weight, *_ = operands
        (shares,) = results
        means = workload.shape(shares)[0] * workload.shape(weight)[1]
        keeps = (*workload.keep(shares), workload.inner(shares, "means", means, shares.dtype))
        if weight.dtype != shares.dtype:
            keeps = (*keeps, workload.inner(shares, "weight", workload.count(weight), shares.dtype))
        return elementwise(self, operands, results, workload, keeps=keeps, forward=4, backward=5)


@op("merge_experts", "shares experts -> merged")
class MergeExperts(Op):
    """`Σ_e shares_e · θ_e` for each sequence: shares `[batch, experts]`, experts `[experts, …]` → `[batch, …]`.

    In the dtype of experts. Experts are whole on every rank.
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        shares, experts = operands
        require(shares.shape[1:] == experts.shape[:1] and len(experts.shape) > 1, self, "wants a share of each expert")
        return (Type(shape=(shares.shape[0], *experts.shape[1:]), dtype=experts.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = group_layout("sequence", meshes)
        return Placing((layout, REPLICATED), (layout,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        shares, experts = operands
        (merged,) = results
        sequences, num_experts = workload.shape(shares)
        size = workload.count(merged) / larger(sequences, 1)
        narrow = workload.inner(merged, "shares", workload.count(shares), merged.dtype)
        return Cost(
            work=_products("merge", sequences, size, num_experts, 1, merged.dtype),
            saved=(*workload.keep(experts), *(() if shares.dtype == merged.dtype else (narrow,))),
        )


@op("sequence_linear", "x weight bias? real? -> y")
class SequenceLinear(Op):
    """A linear map of each sequence: x `[batch, sequence, in]`, weight `[batch, out…, in]` → `[batch, sequence, out…]`.

    Adds the bias `[batch, out…]`. With the operand `real`, padding tokens get 0.
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        by_name = self.named(operands)
        x, weight = by_name["x"], by_name["weight"]
        fits = len(x.shape) == 3 and x.shape[2] == weight.shape[-1] and x.shape[0] == weight.shape[0]
        require(fits and x.dtype == weight.dtype, self, "wants a weight of each sequence")
        require(
            "bias" not in by_name or by_name["bias"].shape == weight.shape[:-1], self, "wants a bias of each output"
        )
        require_real(self, x, [by_name["real"]] if "real" in by_name else [])
        return (Type(shape=(*x.shape[:2], *weight.shape[1:-1]), dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens, weight_layout = meshes.own_tokens, group_layout("sequence", meshes)
        layouts = (weight_layout if name in ("weight", "bias") else tokens for name in self.named(operands))
        return Placing(tuple(layouts), (tokens,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        by_name = self.named(operands)
        x, weight = by_name["x"], by_name["weight"]
        batch, tokens, _ = workload.shape(x)
        _, *out, width = workload.shape(weight)
        saved = workload.keep(x, weight)
        if "real" in by_name:
            saved = (*saved, workload.inner(results[0], "real", workload.count(by_name["real"]), "bool"))
        return Cost(work=_products("sequence_linear", tokens, math.prod(out), width, batch, x.dtype), saved=saved)


def _products(name: str, m: float, n: float, k: float, groups: float, dtype: str) -> Work:
    """A product `[m, k] × [k, n]` in each of `groups`, and the two of its backward."""
    product = Product(name=name, m=m * groups, n=n, k=k, groups=groups, dtype=dtype, kind="grouped")
    backward = Direction(products=(product, product), launches=2)
    return Work(forward=Direction(products=(product,), launches=1), backward=backward)
