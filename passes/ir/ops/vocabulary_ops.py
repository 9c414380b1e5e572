"""Cross-entropy in parts, for logits with a sharded vocabulary (Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moec.passes.ir.layout import Layout, Partial, Shard
from moec.passes.ir.op import LayoutError, Meshes, Op, Placing, Type, layout_of, op, require
from moec.passes.ir.ops.token_layouts import Blocks
from moec.passes.ir.value import Value, promoted
from moec.passes.ir.work.cost import Cost
from moec.passes.ir.work.formulas import elementwise, work_of_kernels

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload

VOCABULARY = 2
"""The dim of logits `[batch, sequence, vocab]` that the ops here contract."""


def _per_token(op: Op, operands: Sequence[Value], reduce: str) -> Placing:
    """Logits keep their layout; other operands get that of the logits' tokens. The result is partial over vocab."""
    logits = layout_of(operands[0])
    tokens = Layout.of((axis, p) for axis, p in logits.placements if p != Shard(VOCABULARY))
    if any(not isinstance(p, Shard) for _, p in logits.placements):
        raise LayoutError(f"{op.mnemonic} has no rule for logits that are {logits}")
    parts = ((axis, Partial(reduce)) for axis, p in logits.placements if p == Shard(VOCABULARY))
    return Placing((logits, *(tokens for _ in operands[1:])), (Layout.of((*tokens.placements, *parts)),))


def _require_wide(op: Op, logits: Value) -> None:
    """Requires fp32 or fp64 logits: two ops read them, and their gradients must be added before rounding."""
    require(promoted(logits.dtype) == logits.dtype, op, "wants logits in at least fp32")


@op("widen", "logits -> wide")
class Widen(Op):
    """Logits in fp32, once for every op that reads them: their gradients `softmax − onehot` are then added in fp32.

    Rounding each gradient to bf16 before the sum lost 11 % of a trained model's head gradient.
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (logits,) = operands
        return (Type(shape=logits.shape, dtype=promoted(logits.dtype)),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = layout_of(operands[0])
        if any(not isinstance(p, Shard) for _, p in layout.placements):
            raise LayoutError(f"widen has no rule for logits that are {layout}")
        return Placing((layout,), (layout,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        if operands[0].dtype == results[0].dtype:
            return Cost(is_view=True, passes_gradient=True)
        return elementwise(self, operands, results, workload)


@op("logit_max", "logits -> largest", constants={"logits"})
class LogitMax(Op):
    """Each token's largest logit, `[batch, sequence]`. Not differentiated."""

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (logits,) = operands
        return (Type(shape=logits.shape[:VOCABULARY], dtype=logits.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return _per_token(self, operands, "max")


@op("sum_exp", "logits largest -> sums", constants={"largest"})
class SumExp(Op):
    """`Σ exp(logit − largest)` over the vocabulary: logits, largest → `[batch, sequence]`."""

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        logits, largest = operands
        _require_wide(self, logits)
        require(largest.shape == logits.shape[:VOCABULARY], self, "wants the largest logit of each token")
        return (Type(shape=largest.shape, dtype=largest.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return _per_token(self, operands, "sum")

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        exp = workload.inner(results[0], "exp", workload.count(operands[0]), results[0].dtype)
        # The difference, its exponential and the sum: three kernels, of which two write as much as they read.
        work = work_of_kernels(forward=(5 * exp.bytes, 3), backward=(2 * exp.bytes, 1))
        return Cost(work=work, saved=(exp,), scratch=(exp.bytes, 0.0))


@op("label_logit", "logits labels -> label_logit")
class LabelLogit(Op):
    """The logit of each token's label, `[batch, sequence]`; 0 where the label is ignored."""

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        logits, labels = operands
        _require_wide(self, logits)
        require(labels.dtype == "int64" and labels.shape == logits.shape[:VOCABULARY], self, "wants labels")
        return (Type(shape=labels.shape, dtype=logits.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return _per_token(self, operands, "sum")

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        logits, labels = operands
        picked = workload.bytes(labels, *results) + workload.bytes(*results)
        # Backward fills the logits' gradient with zeros, and writes one number of each token.
        work = work_of_kernels(forward=(picked, 1), backward=(workload.bytes(logits) + picked, 2))
        return Cost(work=work, saved=workload.keep(labels))


@op("cross_entropy_of_sums", "sums largest label_logit labels -> nll", constants={"largest"})
class CrossEntropyOfSums(Op):
    """Sum over valid labels of `log(sums) + largest − label's logit`: sums, largest, label's logit, labels → scalar."""

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        sums, largest, label_logit, labels = operands
        fits = sums.shape == largest.shape == label_logit.shape == labels.shape
        require(fits and labels.dtype == "int64", self, "wants one of each for each token")
        return (Type(shape=(), dtype=sums.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        # Partial sums over the vocabulary are reduced first: every rank that has the tokens needs the whole sums.
        layout = layout_of(operands[0])
        tokens = Layout.of((axis, p) for axis, p in layout.placements if not isinstance(p, Partial))
        return Placing((tokens,) * len(operands), (tokens.as_partial(),))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        sums, *_, labels = operands
        valid = workload.inner(results[0], "valid", workload.count(labels), "bool")
        return elementwise(
            self, operands, results, workload, keeps=(*workload.keep(sums), valid), forward=6, backward=4
        )
