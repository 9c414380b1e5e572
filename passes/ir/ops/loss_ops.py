"""Ops of the loss: sums over the rank's tokens, counts, and the division by the global count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moec.passes.ir.layout import REPLICATED
from moec.passes.ir.op import Meshes, Op, Placing, Type, layout_of, op, require
from moec.passes.ir.ops.token_layouts import Blocks, sum_tokens
from moec.passes.ir.value import Value, promoted
from moec.passes.ir.work.cost import Cost
from moec.passes.ir.work.formulas import with_more, work_of_kernels

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload

LARGE_ROW = 190_000
"""Bytes of a row above which those of all blocks exceed the L2 cache: 50 MB for two blocks on each of an H100's 132
multiprocessors. Of a B200's it is 426,000."""


@op("cross_entropy", "logits labels -> nll")
class CrossEntropy(Op):
    """Sum over valid labels of −log softmax(logits)[label], in at least fp32; −100 is ignored."""

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        logits, labels = operands
        require(labels.dtype == "int64" and logits.shape[:-1] == labels.shape, self, "wants a label for each token")
        return (Type(shape=(), dtype=promoted(logits.dtype)),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return sum_tokens(self, operands, meshes)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        logits, labels = operands
        log_probabilities = workload.inner(results[0], "log_probabilities", workload.count(logits), results[0].dtype)
        keeps = (log_probabilities, *workload.keep(labels))
        # Backward makes the gradients of the log-probabilities and of the wide logits.
        wide, narrow = log_probabilities.bytes, workload.bytes(logits)
        is_wide = logits.dtype == results[0].dtype
        scratch = (0.0, wide) if is_wide else (wide, 2 * wide - narrow)
        # torch's kernels: the cast, log_softmax, the sum; zeros for the sum's gradient, that of log_softmax, the cast.
        cast = 0.0 if is_wide else narrow + wide
        work = work_of_kernels(forward=(cast + 2 * wide, 3 - is_wide), backward=(4 * wide + cast, 4 - is_wide))
        # log_softmax reads a row for its largest, its sum and its result, backward its gradients twice (torch 2.11,
        # SoftMax.cu); from memory where the rows of all blocks exceed the cache.
        rows_are_large = workload.device != "cpu" and wide / workload.count(labels) > LARGE_ROW
        cost = Cost(work=work, saved=keeps, scratch=scratch)
        return with_more(cost, forward=2 * wide * rows_are_large, backward=wide * rows_are_large)


@op("count_labels", "labels -> count")
class CountLabels(Op):
    """Number of labels: of the valid labels with `valid_only`, else of all."""

    valid_only: bool

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (labels,) = operands
        require(labels.dtype == "int64", self, "wants labels")
        return (Type(shape=(), dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return sum_tokens(self, operands, meshes)


@op("count_tokens", "x -> count", constants={"x"})
class CountTokens(Op):
    """Number of tokens of x `[batch, sequence, dim]`. Not differentiated."""

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (x,) = operands
        require(len(x.shape) == 3, self, "wants a vector for each token")
        return (Type(shape=(), dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return sum_tokens(self, operands, meshes)


@op("mean", "total count -> mean")
class Mean(Op):
    """`total / max(count, 1)`: total may be a partial sum, count must be the global count."""

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        total, count = operands
        require(total.shape == () and count.shape == () and count.dtype == "int64", self, "wants a scalar and a count")
        return (Type(shape=(), dtype=total.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = layout_of(operands[0])
        return Placing((layout, REPLICATED), (layout,))
