"""Packed sequences: which text of its sequence a token belongs to, its position there, and texts as routing groups.

With `group = sequence` a packed text, a segment, is a routing group: experts have a capacity for each segment, and
balance terms are sums over segments. The ops that count segments take whole sequences, on all ranks that share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moec.passes.ir.attribute_types import Count, TokenId, WideCount
from moec.passes.ir.layout import REPLICATED, Shard
from moec.passes.ir.op import Meshes, Op, Placing, TokenOp, Type, layout_of, op, require
from moec.passes.ir.ops.mixture_ops import group_layout
from moec.passes.ir.ops.padding_ops import require_real
from moec.passes.ir.ops.token_layouts import Blocks
from moec.passes.ir.ops.token_operands import require_training_where
from moec.passes.ir.value import Value
from moec.passes.ir.work.arrays import larger, smaller
from moec.passes.ir.work.cost import Cost
from moec.passes.ir.work.formulas import elementwise

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moec.passes.ir.work.workload import Workload


@op("segments", "ids -> segments positions")
class Segments(TokenOp):
    """Splits each sequence after every `separator`: ids `[batch, sequence]` → segments and positions, int64.

    The segments of a sequence are numbered from 0. A separator is the last token of its segment. Positions start at 0
    in each segment.
    """

    separator: TokenId

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (ids,) = operands
        require(ids.dtype == "int64" and len(ids.shape) == 2, self, "wants ids")
        return (Type(shape=ids.shape, dtype="int64"),) * 2

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        # Segments are counted from the start of a sequence.
        layout = layout_of(operands[0]).only(Shard(0))
        return Placing((layout,), (layout, layout))


@op("number_segments", "given -> segments positions")
class NumberSegments(TokenOp):
    """Numbers the texts of each sequence from 0: segments as given → segments and positions, int64 `[batch, sequence]`.

    A text ends where the given number changes. Positions start at 0 in each segment.
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (segments,) = operands
        require(segments.dtype == "int64" and len(segments.shape) == 2, self, "wants a whole number for each token")
        return (Type(shape=segments.shape, dtype="int64"),) * 2

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        # Segments are counted from the start of a sequence.
        layout = layout_of(operands[0]).only(Shard(0))
        return Placing((layout,), (layout, layout))


@op("keep_in_segments", "experts segments training? -> kept")
class KeepInSegments(Op):
    """Replaces choices beyond a capacity of each segment by −1: experts `[batch, sequence, k]`, segments → kept.

    An expert takes at most `max(least, ⌈factor · k · tokens / num_experts⌉)` choices of a segment with so many tokens,
    padding among them; `factor` is that of `Capacity`. All first choices take places before all second choices, tokens
    in order (GShard, Lepikhin et al. 2020, algorithm 1): the choices that `keep_choices` keeps of the text alone.
    """

    num_experts: Count
    parts: WideCount
    whole: WideCount
    eval_parts: WideCount
    eval_whole: WideCount
    least: Count

    def other_tokens(self, operands: Sequence[Value]) -> str:
        return "a capacity, under which the choices of a whole text compete for places"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        experts, segments, *settings = self.named(operands).values()
        _require_segments(self, experts, segments)
        varies = self.parts * self.eval_whole != self.eval_parts * self.whole
        require_training_where(self, varies, settings)
        return (Type(shape=experts.shape, dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = group_layout("sequence", meshes)
        return Placing((layout, layout, *(REPLICATED,) * len(operands[2:])), (layout,))

    def binds(self, operands: Sequence[Value], workload: Workload) -> Mapping[str, float]:
        experts = operands[0]
        k = workload.shape(experts)[-1]
        places = larger(self.least, -(-self.parts * k * workload.sequence // (self.whole * self.num_experts)))
        return {"rows": smaller(workload.whole(experts), self.num_experts * places * workload.batch)}

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        return elementwise(self, operands, results, workload, forward=20)


@op("count_in_segments", "experts segments -> choices")
class CountInSegments(Op):
    """Counts each segment's choices of each expert: experts `[batch, sequence, k]`, segments → choices.

    They are `[batch, sequence, experts]`, whose second dim numbers segments; those that a sequence lacks have zeros. A
    choice of −1 is not counted.
    """

    num_experts: Count

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        experts, segments = operands
        _require_segments(self, experts, segments)
        return (Type(shape=(*segments.shape, self.num_experts), dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = group_layout("sequence", meshes)
        return Placing((layout, layout), (layout,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        return elementwise(self, operands, results, workload, forward=4)


@op("segment_loss", "probabilities choices segments real? -> loss")
class SegmentLoss(Op):
    """Sum over segments of `tokens · E · Σ fᵢ·Pᵢ`: probabilities, choices, segments → scalar.

    The Switch loss (Fedus et al. 2021, eq. 4) with segments as routing groups. `choices` are `count_in_segments` of
    whole sequences. fᵢ is the share of a segment's choices that expert i got, Pᵢ its mean probability there;
    probabilities may be of a part of the tokens, because the sum is linear in Pᵢ. With `real`, tokens and Pᵢ are those
    of real tokens.
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        probabilities, choices, segments, *real = self.named(operands).values()
        _require_segments(self, probabilities, segments, of="probabilities")
        require(choices.shape == probabilities.shape and choices.dtype == "int64", self, "wants choices by segment")
        require_real(self, probabilities, real)
        return (Type(shape=(), dtype=probabilities.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens = meshes.own_tokens
        layouts = (tokens, group_layout("sequence", meshes), *(tokens,) * len(operands[2:]))
        return Placing(layouts, (tokens.as_partial(),))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        probabilities, _, _, *real = operands
        masks = [workload.inner(results[0], "real", workload.count(value), "bool") for value in real]
        fractions = workload.inner(results[0], "fractions", workload.count(probabilities), probabilities.dtype)
        return elementwise(self, operands, results, workload, keeps=(fractions, *masks), forward=5, backward=2)


def _require_segments(op: Op, x: Value, segments: Value, of: str = "experts") -> None:
    fits = segments.dtype == "int64" and len(x.shape) == 3 and segments.shape == x.shape[:2]
    require(fits, op, f"wants {of} and segments of the same tokens")
    require(of != "experts" or x.dtype == "int64", op, "wants experts of each token")
