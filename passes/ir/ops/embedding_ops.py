"""Embeddings and norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moec.passes.ir.attribute_types import Positive
from moec.passes.ir.layout import REPLICATED, Layout, Partial, Shard
from moec.passes.ir.op import LayoutError, Meshes, Placing, TokenOp, Type, layout_of, op, require
from moec.passes.ir.ops.token_layouts import TOKEN_DIMS, Blocks, follow_tokens, reduced_layout
from moec.passes.ir.value import Value, promoted
from moec.passes.ir.work.cost import Cost, Direction, Saved, Work
from moec.passes.ir.work.formulas import elementwise

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@op("embed", "ids table -> x")
class Embed(TokenOp):
    """Looks up rows of a table: ids `[batch, sequence]`, table `[vocab, dim]` → `[batch, sequence, dim]`."""

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        ids, table = operands
        require(ids.dtype == "int64" and len(table.shape) == 2, self, "wants int64 ids and a [vocab, dim] table")
        return (Type(shape=(*ids.shape, table.shape[1]), dtype=table.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        table = layout_of(operands[1])
        ids = meshes.tokens
        for axis, placement in table.placements:
            if placement != Shard(0):
                raise LayoutError(f"embed has no rule for a table with {axis}:{placement}")
            # Each rank takes all tokens and looks up the ids in its part of the table: the result is a partial sum.
            ids = ids.replace(axis, None)
        result = Layout.of((*ids.placements, *((axis, Partial()) for axis in table.axes)))
        return Placing((ids, table), (result,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        return _lookup(workload.keep(operands[0]), operands, results, workload)


@op("embed_positions", "ids table positions? -> x")
class EmbedPositions(TokenOp):
    """Rows of a table by position: ids `[batch, sequence]`, table `[context, dim]` → as `embed`.

    `positions` `[batch, sequence]`: default 0, 1, … in each sequence.
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        ids, table, *positions = operands
        require(len(ids.shape) == 2 and len(table.shape) == 2, self, "wants ids and a [context, dim] table")
        fits = all(v.dtype == "int64" and v.shape == ids.shape for v in positions)
        require(fits, self, "wants a position for each token")
        return (Type(shape=(*ids.shape, table.shape[1]), dtype=table.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        # Positions are counted from the start of a sequence.
        layout = layout_of(operands[0]).only(Shard(0))
        return Placing((layout, REPLICATED, *(layout for _ in operands[2:])), (layout,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        if operands[2:]:
            return _lookup(workload.keep(operands[2]), operands, results, workload)
        positions = workload.inner(results[0], "positions", workload.count(operands[0]), "int64")
        return _lookup((positions,), operands, results, workload)


@op("rms_norm", "x weight -> y")
class RmsNorm(TokenOp):
    """`x / sqrt(mean(x²) + eps) * weight` over the last dims of x, which are those of weight; in at least fp32.

    Zhang & Sennrich 2019.
    """

    eps: Positive

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, weight = operands
        normed = len(x.shape) - len(weight.shape)
        require(TOKEN_DIMS <= normed < len(x.shape), self, "wants a weight for the last dims, tokens apart")
        require(weight.shape == x.shape[normed:], self, "wants a weight as wide as the last dims")
        require(weight.dtype == x.dtype, self, "wants one dtype")
        return (Type(shape=x.shape, dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        x, weight = operands
        layout, normed = reduced_layout(x, meshes), len(x.shape) - len(weight.shape)
        for axis, placement in layout.placements:
            if isinstance(placement, Shard) and placement.dim >= normed:
                # A cut of a dim that the norm sums over becomes a cut of the tokens: one all-to-all before the norm and
                # one after it, as DeepSpeed-Ulysses changes heads for tokens (arXiv 2309.14509). This sends less than
                # gathering x, and each token is normed on one rank only.
                layout = layout.replace(axis, meshes.own_tokens.get(axis))
        return Placing((layout, REPLICATED), (layout,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        x, weight = operands
        (y,) = results
        wide, tokens = promoted(x.dtype), workload.count(x) / workload.count(weight)
        saved = (*workload.keep(weight), workload.inner(y, "rstd", tokens, wide))
        if workload.device != "cpu":  # `_fused_rms_norm` (torch's derivatives.yaml)
            return elementwise(self, operands, results, workload, keeps=(*workload.keep(x), *saved))
        # On CPUs torch composes the norm from operators, which save x in fp32 and x/rms.
        x_saved = workload.keep(x) if wide == x.dtype else (workload.inner(y, "wide", workload.count(x), wide),)
        normalized = workload.inner(y, "normalized", workload.count(x), wide)
        weight_saved = () if workload.is_frozen(weight) else (normalized,)
        keeps = (*x_saved, *weight_saved, *saved)
        scratch = normalized.bytes, 2 * normalized.bytes
        return elementwise(self, operands, results, workload, keeps=keeps, forward=5, backward=8, scratch=scratch)


@op("layer_norm", "x weight bias? -> y")
class LayerNorm(TokenOp):
    """`(x − mean) / sqrt(variance + eps) * weight + bias` over the last dim, in at least fp32 (Ba et al. 2016).

    The bias is optional.
    """

    eps: Positive

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, *vectors = operands
        require(len(vectors) in (1, 2), self, "wants a weight, and at most a bias")
        require(all(v.shape == x.shape[-1:] for v in vectors), self, "wants vectors as wide as the last dim")
        require(all(v.dtype == x.dtype for v in vectors), self, "wants one dtype")
        return (Type(shape=x.shape, dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return follow_tokens(self, operands[:1], meshes, parameters=len(operands) - 1)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        x, weight, *_ = operands
        keeps = workload.keep(x, weight)
        if x.dtype == promoted(x.dtype):  # torch's norm saves mean and rstd; moec's kernel recomputes both
            tokens = workload.count(x) / workload.shape(x)[-1]
            keeps += tuple(workload.inner(results[0], name, tokens, x.dtype) for name in ("mean", "rstd"))
        return elementwise(self, operands, results, workload, keeps=keeps)


def _lookup(saved: tuple[Saved, ...], operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
    """The cost of a lookup. Forward reads and writes the looked-up rows; backward writes the whole table's gradient."""
    ids, table = operands[:2]
    forward = Direction(moved=workload.bytes(ids, *results, *results), launches=1)
    if workload.is_frozen(table):
        return Cost(work=Work(forward=forward))
    backward = Direction(moved=workload.bytes(ids, *results, table), launches=1)
    return Cost(work=Work(forward=forward, backward=backward), saved=saved)
