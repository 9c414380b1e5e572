"""Ops of mixtures of mixtures: the pairs of an outer and an inner expert that each token goes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from moec.passes.ir.attribute_types import Count
from moec.passes.ir.op import Meshes, Op, Placing, TokenOp, Type, op, require
from moec.passes.ir.ops.token_layouts import Blocks, own_tokens
from moec.passes.ir.value import Value
from moec.passes.ir.work.cost import Cost
from moec.passes.ir.work.formulas import elementwise

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@op("nested_route", "logits -> probabilities weights experts", scores="logits")
class NestedRoute(TokenOp):
    """Chooses k outer experts, and within each of them `inner_k` inner ones: two gates in one op.

    logits `[batch, sequence, outer + outer · inner]`, those of the outer gate first, then those of each inner gate →
    probabilities of the outer gate `[batch, sequence, outer]`, and weights and experts `[batch, sequence, k · inner_k]`
    of the pairs: weight wᵢ · vᵢⱼ, expert i · inner + j (Shazeer et al. 2017, appendix B, eq. 12; Jordan & Jacobs 1994,
    eq. 3). Each gate is as in `route`.
    """

    outer: Count
    inner: Count
    k: Count
    score: Literal["softmax", "sigmoid"]
    order: Literal["before", "after"]
    normalize: bool
    inner_k: Count
    inner_score: Literal["softmax", "sigmoid"]
    inner_order: Literal["before", "after"]
    inner_normalize: bool

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (logits,) = operands
        num_logits = self.outer * (1 + self.inner)
        require(logits.shape[-1] == num_logits, self, f"wants {num_logits} logits of each token")
        require(self.k <= self.outer and self.inner_k <= self.inner, self, "chooses more experts than there are")
        tokens, num_pairs = logits.shape[:-1], self.k * self.inner_k
        return (
            Type(shape=(*tokens, self.outer), dtype=logits.dtype),
            Type(shape=(*tokens, num_pairs), dtype=logits.dtype),
            Type(shape=(*tokens, num_pairs), dtype="int64"),
        )

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 1, meshes)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        """Backward keeps what two calls of `route` keep: the logits of all gates, and of the chosen inner ones."""
        (logits,), (_, weights, _) = operands, results
        pairs = workload.count(weights)
        chosen = pairs / self.inner_k
        tensors = (
            *(("own", chosen * self.inner, logits.dtype), ("outer", chosen, logits.dtype), ("chosen", chosen, "int64")),
            *(("within", pairs, logits.dtype), ("inside", pairs, "int64")),
        )
        keeps = (*workload.keep(logits), *(workload.inner(weights, *tensor) for tensor in tensors))
        return elementwise(self, operands, results, workload, keeps=keeps, forward=12, backward=12)


@op("outer_choices", "experts -> outer")
class OuterChoices(Op):
    """The outer experts of pairs: experts `[batch, sequence, k · inner_k]` → `[batch, sequence, k]`; −1 stays."""

    inner: Count
    inner_k: Count

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (experts,) = operands
        num_pairs = experts.shape[-1]
        fits = isinstance(num_pairs, int) and num_pairs % self.inner_k == 0
        require(fits and experts.dtype == "int64", self, f"wants {self.inner_k} choices within each outer one")
        assert isinstance(num_pairs, int)
        return (Type(shape=(*experts.shape[:-1], num_pairs // self.inner_k), dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 1, meshes)
