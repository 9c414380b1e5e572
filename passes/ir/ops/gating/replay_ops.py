"""Ops of a model that takes the experts of each token, and gives them, to replay a rollout (R3, arXiv 2510.11370).

Routes are int64 `[batch, sequence, mixtures, k]` over the layers with a mixture; k is the largest of all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moec.passes.ir.attribute_types import Count, LayerNumber
from moec.passes.ir.layout import Shard
from moec.passes.ir.op import Meshes, Op, Placing, TokenOp, Type, layout_of, op, require
from moec.passes.ir.ops.token_layouts import Blocks, follow_tokens, own_tokens
from moec.passes.ir.value import Value
from moec.passes.ir.work.cost import Cost
from moec.passes.ir.work.formulas import elementwise

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@op("replay", "scores experts choices -> weights experts")
class Replay(TokenOp):
    """Replaces a gate's choices by given ones: scores `[batch, sequence, experts]`, experts and choices
    `[batch, sequence, k]` → weights of the choices in the scores' dtype, experts.

    `experts` are the choices of the gate by these scores; where a given choice is `FREE_ROUTE`, the gate's stays. A
    choice of −1 is none. The weights are those that the gate gives to the choices, a choice of −1 left out: the table
    `WEIGHTS` of `codegen/emit`. The router's gradient flows through them (Ma et al. 2025, arXiv 2510.11370, section 4).
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        scores, experts, choices = operands
        require(
            experts.dtype == choices.dtype == "int64" and len(experts.shape) == 3, self, "wants experts and choices"
        )
        require(experts.shape == choices.shape, self, "wants as many given choices as the gate makes")
        require(scores.shape[:-1] == experts.shape[:-1] and scores.dtype != "int64", self, "wants scores of each token")
        return Type(shape=experts.shape, dtype=scores.dtype), Type(shape=experts.shape, dtype="int64")

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 3, meshes)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        (scores, *_), (weights, experts) = operands, results
        # At most: gates that normalise do not keep the softmax of all scores.
        softmax = workload.inner(weights, "softmax", workload.count(scores), scores.dtype)
        chosen = workload.inner(weights, "chosen", workload.count(experts), "int64")
        dropped = workload.inner(weights, "none", workload.count(experts), "bool")
        saved = (*workload.keep(weights), softmax, chosen, dropped)
        return elementwise(self, operands, results, workload, keeps=saved, forward=3, backward=3)


@op("take_routes", "routes -> choices")
class TakeRoutes(TokenOp):
    """The first k choices of one mixture: routes `[batch, sequence, mixtures, most]` → `[batch, sequence, k]`.

    `mixture` numbers the layers with a mixture from 0.
    """

    mixture: LayerNumber
    k: Count

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (routes,) = operands
        require(routes.dtype == "int64" and len(routes.shape) == 4, self, "wants routes of every mixture")
        *tokens, mixtures, places = routes.shape
        fits = isinstance(mixtures, int) and isinstance(places, int) and self.mixture < mixtures and self.k <= places
        require(fits, self, f"routes are of {mixtures} mixtures, with {places} choices")
        return (Type(shape=(*tokens, self.k), dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return follow_tokens(self, operands, meshes)


@op("stack_routes", "choices* -> routes")
class StackRoutes(Op):
    """Every mixture's choices side by side: choices `[batch, sequence, kᵢ]` → `[batch, sequence, mixtures, most]`.

    `most` is at least each k; −1 fills the places beyond.
    """

    most: Count

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        tokens = operands[0].shape[:2]
        fits = all(v.dtype == "int64" and len(v.shape) == 3 and v.shape[:2] == tokens for v in operands)
        require(fits, self, "wants choices of the same tokens")
        require(
            all(isinstance(v.shape[2], int) and v.shape[2] <= self.most for v in operands), self, "has too few places"
        )
        return (Type(shape=(*tokens, len(operands), self.most), dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return follow_tokens(self, operands, meshes)


@op("whole_sequences", "x -> whole", moves=True)
class WholeSequences(TokenOp):
    """The same whole numbers `[batch, sequence, …]`, of whole sequences on all ranks that share them, as tokens are."""

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (x,) = operands
        require(x.dtype == "int64" and len(x.shape) >= 2, self, "wants whole numbers of tokens")
        return (Type(shape=x.shape, dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = layout_of(operands[0]).only(Shard(0))
        return Placing((layout,), (layout,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        return Cost()
