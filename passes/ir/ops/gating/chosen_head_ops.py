"""Ops of a mixture of attention heads (Zhang et al. 2022, arXiv 2210.05144, section 3): each token chooses groups of
query heads, and all groups share keys and values.

Groups are numbered as experts are, and −1 is no group. A token's heads lie head by head, and within a head choice by
choice: `heads · k` of them. So the queries of one head number lie side by side for every choice, they attend to one kv
head as grouped queries do, and `tp` cuts the heads of every group alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moec.passes.ir.attribute_types import Count
from moec.passes.ir.layout import Layout, Partial, Shard
from moec.passes.ir.op import LayoutError, Meshes, Op, Placing, TokenOp, Type, layout_of, op, require
from moec.passes.ir.ops.token_layouts import TOKEN_DIMS, Blocks, own_tokens, reduced_layout
from moec.passes.ir.value import Value
from moec.passes.ir.work.cost import Cost, Direction, Product, Saved, Work
from moec.passes.ir.work.formulas import elementwise, linear_backward

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload

HEADS = 2
"""The dim of the heads in `[batch, sequence, heads · k, head_dim]`, as attention has them."""


def _token_layout(op: Op, x: Value, weight: Layout, heads: int, meshes: Meshes) -> Layout:
    """The layout of tokens that an op needs: that of x, whole where `weight` is cut by its dim `heads`, and cut where x
    is cut by its heads."""
    layout = reduced_layout(x, meshes)
    for axis, placement in layout.placements:
        if placement == Shard(HEADS) and axis not in weight.axes:
            layout = layout.replace(axis, meshes.own_tokens.get(axis))
    for axis, placement in weight.placements:
        if placement != Shard(heads):
            raise LayoutError(f"{op.mnemonic} has no rule for groups of heads with {axis}:{placement}")
        layout = layout.replace(axis, None)
    if any(not isinstance(p, Shard) or p.dim >= TOKEN_DIMS for _, p in layout.placements):
        raise LayoutError(f"{op.mnemonic} has no rule for {layout}")
    return layout


def _with_heads(tokens: Layout, weight: Layout) -> Layout:
    return Layout.of((*tokens.placements, *((axis, Shard(HEADS)) for axis in weight.axes)))


def _cost(
    op: Op, chosen: Value, weight: Value, sizes: tuple[int, int], saved: Sequence[Saved], workload: Workload
) -> Cost:
    """The products of rows `sizes[0]` wide with the groups' matrices to `sizes[1]`, and `saved` beside rows' numbers.

    Rows are gathered before the product and written to tokens after it.
    """
    result, groups = op.results[0], workload.shape(weight)[0]
    (k, n), element = sizes, workload.width(weight.dtype)
    rows, largest = workload.rows_of(workload.count(chosen), groups)
    product = Product(
        name="linear", m=rows, n=n, k=k, groups=groups, largest=largest, dtype=weight.dtype, kind="grouped"
    )

    moved = workload.bytes(chosen, result) + 2 * rows * k * element
    work = Work(
        forward=Direction(products=(product,), moved=moved, launches=7),
        backward=Direction(products=linear_backward(product), moved=moved, launches=5),
    )
    numbers = (
        workload.inner(result, "positions", workload.count(chosen), "int64"),
        workload.inner(result, "counts", groups, "int64"),
        workload.inner(result, "rows", rows * k, weight.dtype),
    )
    return Cost(
        work=work,
        saved=(*numbers, *saved, *workload.keep(weight)),
        used=workload.shape(chosen)[-1] / groups,
        scratch=(rows * n * element, 2 * rows * n * element),
    )


@op("chosen_heads", "x experts weight bias? -> q")
class ChosenHeads(TokenOp):
    """Queries of the groups that each token chose: `q[t, h, j] = W[experts[t, j], h] x[t] + bias[experts[t, j], h]`.

    x `[batch, sequence, dim]`, experts `[batch, sequence, k]`, weight `[groups, heads, head_dim, dim]`, bias `[groups,
    heads, head_dim]` → `[batch, sequence, heads · k, head_dim]`; zeros for a choice of −1, which there are only with
    `some_are_none`. Zhang et al. 2022, section 3: q_t W_i^q.
    """

    some_are_none: bool = False

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, chosen, weight, *biases = operands
        require(len(weight.shape) == 4 and x.shape[2:] == weight.shape[3:], self, "wants groups of heads of x's width")
        fits = chosen.dtype == "int64" and len(chosen.shape) == 3 and chosen.shape[:2] == x.shape[:2]
        require(fits, self, "wants groups of each token")
        require(all(bias.shape == weight.shape[:3] for bias in biases), self, "wants a bias for each output")
        require(all(v.dtype == x.dtype for v in (weight, *biases)), self, "wants one dtype")
        heads, k = weight.shape[1], chosen.shape[2]
        require(isinstance(heads, int) and isinstance(k, int), self, "wants a known number of heads and of choices")
        assert isinstance(heads, int)
        assert isinstance(k, int)
        return (Type(shape=(*x.shape[:2], heads * k, weight.shape[2]), dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        x, _, weight, *biases = operands
        heads = layout_of(weight)
        tokens = _token_layout(self, x, heads, 1, meshes)
        return Placing((tokens, tokens, heads, *(heads for _ in biases)), (_with_heads(tokens, heads),))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        _, chosen, weight, *_ = operands
        _, heads, width, dim = workload.shape(weight)
        return _cost(self, chosen, weight, (dim, heads * width), (), workload)


@op("mix_heads", "attended experts weights weight -> y")
class MixHeads(TokenOp):
    """The weighted sum of the groups' projections: `y[t] = Σⱼ weights[t, j] · W[experts[t, j]] attended[t, :, j]`.

    attended `[batch, sequence, heads · k, head_dim]`, experts and weights `[batch, sequence, k]`, weight `[groups, dim,
    heads, head_dim]` → `[batch, sequence, dim]`; a choice of −1, which there are only with `some_are_none`, adds
    nothing. Zhang et al. 2022, section 3: y_t = Σ w_{i,t} · E_i(q_t, K, V), where E_i ends with W_i^o.
    """

    some_are_none: bool = False

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        attended, chosen, weights, weight = operands
        require(len(weight.shape) == 4 and len(attended.shape) == 4, self, "wants heads, and groups of them")
        fits = chosen.dtype == "int64" and chosen.shape[:-1] == attended.shape[:2] and chosen.shape == weights.shape
        require(fits and weights.dtype in ("fp32", "fp64"), self, "wants groups of each token and their weights")
        heads, k = weight.shape[2], chosen.shape[2]
        require(isinstance(heads, int) and isinstance(k, int), self, "wants a known number of heads and of choices")
        assert isinstance(heads, int)
        assert isinstance(k, int)
        require(attended.shape[2:] == (heads * k, weight.shape[3]), self, "wants the heads of each choice")
        require(attended.dtype == weight.dtype, self, "wants one dtype")
        return (Type(shape=(*attended.shape[:2], weight.shape[1]), dtype=attended.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        attended, _, _, weight = operands
        weight_layout = layout_of(weight)
        tokens = _token_layout(self, attended, weight_layout, 2, meshes)
        partial = Layout.of((*tokens.placements, *((axis, Partial()) for axis in weight_layout.axes)))
        return Placing((_with_heads(tokens, weight_layout), tokens, tokens, weight_layout), (partial,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        _, chosen, weights, weight = operands
        _, dim, heads, width = workload.shape(weight)
        mixed = workload.inner(results[0], "projected", workload.count(chosen) * dim, weight.dtype)
        return _cost(self, chosen, weight, (heads * width, dim), (mixed, *workload.keep(weights)), workload)


@op("count_groups", "experts -> counts")
class CountGroups(Op):
    """How many of a rank's choices went to each group: experts `[batch, sequence, k]` → `[sources, groups]`, int64.

    A choice of −1 is not counted. Not differentiated.
    """

    groups: Count

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (chosen,) = operands
        require(chosen.dtype == "int64" and len(chosen.shape) == 3, self, "wants groups of each token")
        return (Type(shape=("sources", self.groups), dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        count_layout = Layout.of(dict.fromkeys(meshes.own_tokens.axes, Shard(0)))
        return Placing((meshes.own_tokens,), (count_layout,))


@op("detached_shares", "weights -> shares")
class DetachedShares(TokenOp):
    """`w / Σⱼ wⱼ` of each token's k weights, with no gradient through the sum: weights → the same shape.

    Zhang et al. 2022, section 3: w_{i,t} = p_{i,t} / Detach(Σⱼ p_{j,t}). The weight of a single choice is 1, and it
    still has a gradient.
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (weights,) = operands
        require(len(weights.shape) == 3 and weights.dtype != "int64", self, "wants weights of each token")
        return (Type(shape=weights.shape, dtype=weights.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 1, meshes)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        (weights,) = operands
        tokens = workload.count(weights) / workload.shape(weights)[-1]
        return elementwise(
            self,
            operands,
            results,
            workload,
            keeps=(workload.inner(results[0], "sums", tokens, weights.dtype),),
            forward=2,
        )
