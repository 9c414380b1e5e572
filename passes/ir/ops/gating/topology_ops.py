"""Ops of the gate `topology`: how far experts are from the tokens of a data-parallel rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from moec.passes.ir.attribute_types import Bounds, Count, Positive
from moec.passes.ir.layout import REPLICATED
from moec.passes.ir.limits import MAX_AXES, MAX_RANKS
from moec.passes.ir.op import LayoutError, Meshes, Op, Placing, TokenOp, Type, op, require
from moec.passes.ir.ops.mixture_ops import group_layout
from moec.passes.ir.ops.padding_ops import require_real
from moec.passes.ir.ops.token_layouts import Blocks, own_tokens
from moec.passes.ir.ops.token_operands import require_choices, require_training
from moec.passes.ir.value import Value
from moec.passes.ir.work.cost import Cost
from moec.passes.ir.work.formulas import elementwise

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload

Part = Annotated[int, Bounds(ge=0, lt=2**32)]
"""A numerator or denominator whose product with a number of choices fits 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed(Op):
    """An op that knows where data-parallel ranks and experts are: the base of those below.

    `levels` are the sizes of the cluster's levels, from the innermost out; ranks are numbered innermost first. Data
    rank d is the `sharers` ranks from `d · sharers` on, those of `cp` and `tp`. For the tokens of rank r, expert j of a
    part of n experts is on the rank `⌊r / (ep · etp)⌋ · ep · etp + ⌊j · ep / n⌋ · etp + r mod etp` of its
    expert-parallel group, and, if `etp` cuts it, a slice of it on each other rank of that one's `etp` group; `parts`
    has the n of each part. So the text of a Program holds no table of ranks and experts, whatever their number.
    """

    levels: tuple[Count, ...]
    parts: tuple[Count, ...]
    sharers: Count = 1
    ep: Count = 1
    etp: Count = 1

    def require_placed(self, experts: object, ranks: Value) -> None:
        """Requires levels of all ranks, `ep` equal pieces of each part, and the number of each data rank."""
        fits = len(self.levels) <= MAX_AXES and math.prod(self.levels) <= MAX_RANKS
        require(fits, self, f"wants at most {MAX_AXES} levels")
        require(sum(self.parts) == experts, self, f"wants parts of {experts} experts")
        require(all(n % self.ep == 0 for n in self.parts), self, f"{self.ep} ranks do not divide the experts")
        divides = all(math.prod(self.levels) % degree == 0 for degree in (self.sharers, self.ep * self.etp))
        require(divides, self, "wants whole groups of ranks")
        require(ranks.dtype == "int64" and len(ranks.shape) == 1, self, "wants the number of each data rank")

    def require_meshes(self, meshes: Meshes) -> None:
        """Requires degrees of the meshes. Raises `LayoutError`."""
        degrees = self.sharers, self.ep, self.etp
        mesh_degrees = meshes.sharers, meshes.size("ep"), meshes.size("etp")
        if degrees != mesh_degrees or math.prod(self.levels) != meshes.dense.ranks:
            raise LayoutError(f"{self.mnemonic} is of other ranks than its meshes")


@op("data_ranks", "x -> ranks", constants={"x"})
class DataRanks(TokenOp):
    """The numbers of all data-parallel ranks, `0 … data_ranks − 1`: int64 `[data_ranks]`. `x` gives only the device.

    In the reference of a plan with micro-batches they repeat for each of them. Where they are cut over `dp`, a rank has
    its own number.
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        require(len(operands[0].shape) == 3, self, "wants numbers of each token")
        return (Type(shape=("data_ranks",), dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return Placing((meshes.own_tokens,), (REPLICATED,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        return elementwise(self, operands, results, workload)


@op("topology_loss", "probabilities choices ranks real? -> loss")
class TopologyLoss(Placed):
    """Sum over data ranks of `tokens · E · Σₑ pₑ · fₑ · Pₑ`: probabilities `[batch, sequence, E]`, choices
    `[data_ranks, E]`, ranks `[data_ranks]` → scalar (Chen et al. 2022, arXiv 2302.09915, section 4).

    f is the share of the rank's choices, P the mean probability, and `p = Norm(1 / ĉ)`: the target count ĉₑ is
    proportional to the bandwidth between the rank's tokens and expert e, so that pₑ is proportional to the seconds per
    byte. The paper leaves Norm open; here it divides by the mean over experts, so that equal bandwidths make p = 1 and
    the loss that of `switch_loss`. `bandwidths`, in bytes/s, are those inside of a rank and between two ranks that
    `levels[0]`, `levels[1]`, … joins and no level below. The seconds are the mean over the ranks that share sequences,
    each of which sends an equal part of the tokens. With the operand `real`, padding tokens are left out of P.
    """

    bandwidths: tuple[Positive, ...]

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        probabilities, choices, ranks, *real = self.named(operands).values()
        require(len(probabilities.shape) == 3 and probabilities.dtype != "int64", self, "wants probabilities")
        self.require_placed(probabilities.shape[2], ranks)
        require(len(self.bandwidths) == len(self.levels) + 1, self, "wants a bandwidth for each level, and one inside")
        require(choices.shape == (*ranks.shape, probabilities.shape[2]), self, "wants the choices of each data rank")
        require_real(self, probabilities, real)
        return (Type(shape=(), dtype=probabilities.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        self.require_meshes(meshes)
        tokens, per_rank = meshes.own_tokens, group_layout("rank", meshes)
        layouts = (tokens, per_rank, per_rank, *(tokens,) * len(operands[3:]))
        return Placing(layouts, (tokens.as_partial(),))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        probabilities, _, _, *real = operands
        sequences, _, experts = workload.shape(probabilities)
        rows = workload.inner(results[0], "rows", sequences * experts, probabilities.dtype)
        masks = [workload.inner(results[0], "real", workload.count(value), "bool") for value in real]
        forward = 20 + 3 * len(self.levels)
        return elementwise(self, operands, results, workload, keeps=(rows, *masks), forward=forward, backward=3)


@op("bound_far", "weights experts ranks training real? -> kept", chooses="kept", constants={"weights"})
class BoundFar(Placed, TokenOp):
    """Replaces far choices beyond a bound by −1, in training: weights, experts `[batch, sequence, k]`, ranks → kept.

    At most `⌊share / whole · n⌋` of a data rank's n choices may go to other nodes (He et al. 2022, FasterMoE,
    PPoPP, section 4.3). Those with the largest weights stay, of equal ones the earlier. A node is the ranks that share
    every level below the outermost one. A choice is near where each rank that shares the token has the expert in its
    own node. With the operand `real`, choices of padding tokens are neither counted nor replaced. Not differentiated.
    """

    share: Part
    whole: Part

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        weights, experts, ranks, training, *real = self.named(operands).values()
        require(weights.shape == experts.shape and weights.dtype != "int64", self, "wants a weight for each choice")
        require_choices(self, experts)
        self.require_placed(sum(self.parts), ranks)
        require(self.share <= self.whole and self.whole > 0, self, "wants a share of at most 1")
        require_training(self, training)
        require_real(self, weights, real)
        return (Type(shape=experts.shape, dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        self.require_meshes(meshes)
        layout = group_layout("rank", meshes)
        layouts = (layout, layout, layout, REPLICATED, *(layout,) * len(operands[4:]))
        return Placing(layouts, (layout,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        return elementwise(self, operands, results, workload, forward=40 + 2 * len(self.levels))


@op("choose_near", "scores kept ranks -> experts", chooses="experts", constants={"scores"})
class ChooseNear(Placed, TokenOp):
    """Each choice of −1 becomes the token's next best near expert: scores `[batch, sequence, E]`, kept `[batch,
    sequence, k]`, ranks → experts, of the shape of kept.

    Best are those with the largest scores that the token has not chosen, ties to the lower index; near is as in
    `bound_far`. Kept choices are among the k best of all experts, and at least k experts are near each rank. Not
    differentiated.
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        scores, kept, ranks = operands
        require_choices(self, kept)
        require(scores.dtype != "int64" and scores.shape[:-1] == kept.shape[:-1], self, "wants scores of each token")
        self.require_placed(scores.shape[-1], ranks)
        return (Type(shape=kept.shape, dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        self.require_meshes(meshes)
        placing = own_tokens(self, 2, meshes)
        return Placing((*placing.operands, group_layout("rank", meshes)), placing.results)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        k = workload.shape(operands[1])[-1]
        return elementwise(self, operands, results, workload, forward=24 + 2 * (k + len(self.levels)))
