"""The ops that `fuse` makes: one op where rows stay on their rank, else ops that send the weights with the rows.

`communicate` runs before `fuse` and has already set the axes over which gradients of experts are summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from moec.passes.ir.layout import REPLICATED, Shard
from moec.passes.ir.op import Meshes, Placing, TokenOp, Type, op, require
from moec.passes.ir.ops.mixture_ops import Activates, experts_layout, require_experts
from moec.passes.ir.ops.token_layouts import Blocks
from moec.passes.ir.ops.token_operands import require_choices
from moec.passes.ir.value import Value, promoted
from moec.passes.ir.work.cost import Cost, Direction, Work
from moec.passes.ir.work.formulas import elementwise, experts_scratch, experts_work, saved_inside_experts, used_share

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@op(
    "mixture_mlp",
    "x experts weights up down up_bias? down_bias? -> mixed counts",
    operator="mixture_mlp",
    saved="hidden positions table",
    moves=True,
)
class MixtureMlp(Activates):
    """Each token's weighted sum of its experts' feed-forwards: x, experts, weights, up, down → mixed, counts.

    Equals permute, expert_mlp and combine with no conversion in between, but saves no copy of a token per choice. Up,
    down and the optional biases are as `require_experts` says. A choice of −1 is dropped.
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        by_name = self.named(operands)
        x, experts, weights = by_name["x"], by_name["experts"], by_name["weights"]
        require_choices(self, experts, x)
        require(experts.shape == weights.shape, self, "wants a weight for each choice")
        require_experts(self, x, by_name)
        return (Type(shape=x.shape, dtype=x.dtype), Type(shape=("sources", by_name["up"].shape[0]), dtype="int64"))

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens = meshes.own_tokens
        weights = (REPLICATED,) * len(operands[3:])
        return Placing((*(tokens,) * 3, *weights), (tokens, experts_layout(meshes, {}, Shard(0))))

    def binds(self, operands: Sequence[Value], workload: Workload) -> Mapping[str, float]:
        experts = operands[1]
        return {"rows": workload.whole(experts), "choices": workload.shape(experts)[-1]}

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        x, experts, weights, *parameters = operands
        mixed, counts = results
        rows, largest = workload.rows_that_stay(experts, parameters[0])
        # Forward gathers rows from tokens and adds the results of rows to tokens.
        moved = workload.bytes(x, experts, weights) + rows * workload.shape(x)[-1] * workload.width(x.dtype)
        work = experts_work(rows, largest, parameters, workload, forward=7, backward=7, moved=moved)
        inner = saved_inside_experts(mixed, workload.count(experts), parameters[0], workload)
        positions = workload.inner(mixed, "positions", workload.count(experts), "int64")
        saved = (*workload.keep(x, counts, weights, *parameters), *inner, positions)
        in_forward, in_backward = experts_scratch(rows, largest, parameters, workload, gathers=(1, 2))
        # Forward has a row of results for each choice; backward adds up the gradient of x in at least fp32.
        in_forward += rows * workload.shape(x)[-1] * workload.width(x.dtype) + 2 * positions.bytes
        in_backward += workload.count(x) * workload.width(promoted(x.dtype)) - workload.bytes(x)
        used = used_share(parameters[0], workload)
        return Cost(work=work, saved=saved, used=used, scratch=(in_forward, in_backward), of_experts=True)


@op(
    "permute_weights",
    "weights positions rows -> row_weights",
    operator="permute_weights",
    constants={"rows"},
    moves=True,
)
class PermuteWeights(TokenOp):
    """Each row's weight: weights, positions, rows → weights of rows `[experts, rows]` or `[experts, places]`.

    Conversions then send weights and rows alike, and `expert_mlp` applies the weights. The operand `rows` only gives
    the shape. Empty places get 0.
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        weights, positions, rows = operands
        require(positions.shape == weights.shape, self, "wants a weight for each position")
        return (Type(shape=rows.shape[:-1], dtype=weights.dtype, ragged=rows.ragged),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        rows = experts_layout(meshes, {}, Shard(1))
        return Placing((meshes.own_tokens, meshes.own_tokens, rows), (rows,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        weights, positions, _ = operands
        move = Direction(moved=workload.bytes(weights, positions, *results), launches=1)
        return Cost(work=Work(forward=move, backward=move), saved=workload.keep(positions))


@op("sum_rows", "rows positions counts -> mixed", operator="sum_rows", moves=True)
class SumRows(TokenOp):
    """Sums each token's weighted rows: rows, positions, counts → mixed; from the expert mesh to the dense mesh.

    Replaces `combine` and `combine_padded`, but saves neither rows nor weights.
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        rows, positions, counts = operands
        require(rows.ragged in (None, counts.name), self, f"rows are counted by {rows.ragged}, not {counts.name}")
        return (Type(shape=(*positions.shape[:-1], rows.shape[-1]), dtype=rows.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens = meshes.own_tokens
        rows, counts = (experts_layout(meshes, {}, Shard(dim)) for dim in (1, 0))
        return Placing((rows, tokens, counts), (tokens,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        _, positions, counts = operands
        return elementwise(self, operands, results, workload, keeps=workload.keep(positions, counts))
