"""Ops of soft mixtures: experts take weighted means of a sequence's tokens, in slots.

Puigcerver et al. 2023, arXiv 2308.00951, section 2.1. A slot belongs to an expert; the slots of a sequence are
`[experts, slots]`, expert by expert in a dim of `experts · slots`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from moec.passes.ir.attribute_types import Count
from moec.passes.ir.layout import Layout, Partial, Shard
from moec.passes.ir.op import Meshes, Op, Placing, Type, op, require
from moec.passes.ir.ops.mixture_ops import experts_layout, group_layout
from moec.passes.ir.ops.padding_ops import require_real
from moec.passes.ir.ops.token_layouts import Blocks
from moec.passes.ir.value import Value
from moec.passes.ir.work.cost import Cost
from moec.passes.ir.work.formulas import elementwise

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload

SLOTS = 2
"""The dim of `[batch, experts, slots, dim]` that `cp` and `tp` cut: each rank sends other slots to the experts."""


def _slots(meshes: Meshes) -> Layout:
    return Layout.of((axis, Shard(SLOTS) if p == Shard(1) else p) for axis, p in meshes.own_tokens.placements)


@op("slot_weights", "logits real? -> dispatch combine")
class SlotWeights(Op):
    """logits `[batch, sequence, slots of all experts]` → dispatch, combine, of the same shape (eq. 1 and 3).

    dispatch is the softmax over the sequence's tokens, combine the softmax over all slots. With the operand `real`, the
    softmax is over real tokens, and both are 0 for padding.
    """

    def other_tokens(self, operands: Sequence[Value]) -> str:
        return "`soft`, whose experts take means of a whole sequence"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        logits, *real = operands
        require(logits.dtype != "int64" and len(logits.shape) == 3, self, "wants logits of every slot")
        require_real(self, logits, real)
        return (Type(shape=logits.shape, dtype=logits.dtype),) * 2

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = group_layout("sequence", meshes)
        return Placing((layout,) * len(operands), (layout, layout))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        _, *real = operands
        saved = workload.keep(*results)
        if real:  # the softmax before padding is masked, and the mask
            saved = (
                *(workload.inner(v, "softmax", workload.count(v), v.dtype) for v in results),
                workload.inner(results[0], "real", workload.count(*real), "bool"),
            )
        return elementwise(self, operands, results, workload, keeps=saved, forward=3, backward=3)


@op("slot_inputs", "x dispatch -> inputs")
class SlotInputs(Op):
    """The mean of tokens in each slot (eq. 2): x `[batch, sequence, dim]`, dispatch → `[batch, experts, slots, dim]`.

    Computed in the dtype of dispatch, and rounded to that of x.
    """

    num_experts: Count
    slots: Count

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, dispatch = operands
        shape = (*x.shape[:-1], self.num_experts * self.slots)
        require(len(x.shape) == 3 and dispatch.shape == shape, self, "wants a weight of each token in each slot")
        return (Type(shape=(x.shape[0], self.num_experts, self.slots, x.shape[2]), dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens = meshes.own_tokens
        sums = Layout.of((axis, Partial() if p == Shard(1) else p) for axis, p in tokens.placements)
        return Placing((tokens, tokens), (sums,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        x, dispatch = operands
        saved = workload.keep(x)
        if x.dtype != dispatch.dtype:
            saved = (workload.inner(results[0], "x", workload.count(x), dispatch.dtype),)
        return elementwise(self, operands, results, workload, keeps=(*saved, *workload.keep(dispatch)), forward=2)


@op("slot_rows", "inputs -> rows counts", moves=True)
class SlotRows(Op):
    """Slots as rows in places: inputs `[batch, experts, slots, dim]` → rows `[experts, places, dim]`, counts.

    From the dense mesh to the expert mesh. Every place is filled: counts `[sources, experts]` are constant.
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (inputs,) = operands
        require(len(inputs.shape) == 4, self, "wants slots of every expert")
        experts, dim = inputs.shape[1], inputs.shape[3]
        return (
            Type(shape=(experts, "places", dim), dtype=inputs.dtype),
            Type(shape=("sources", experts), dtype="int64"),
        )

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        rows, counts = (experts_layout(meshes, {}, Shard(dim)) for dim in (1, 0))
        return Placing((_slots(meshes),), (rows, counts))

    def binds(self, operands: Sequence[Value], workload: Workload) -> Mapping[str, float]:
        _, experts, *_, dim = operands[0].shape
        assert isinstance(experts, int)
        assert isinstance(dim, int)
        return {"places": workload.whole(operands[0]) // (experts * dim), "choices": 1}


@op("slot_outputs", "rows inputs -> outputs", constants={"inputs"}, moves=True)
class SlotOutputs(Op):
    """The inverse of `slot_rows`: rows `[experts, places, dim]`, inputs → outputs of the shape of inputs.

    The operand `inputs` only gives the shape.
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        rows, inputs = operands
        fits = len(inputs.shape) == 4 and (rows.shape[0], rows.shape[-1]) == inputs.shape[1::2]
        require(fits, self, "wants the rows of every slot")
        return (Type(shape=inputs.shape, dtype=rows.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        slots = _slots(meshes)
        return Placing((experts_layout(meshes, {}, Shard(1)), slots), (slots,))


@op("slot_combine", "outputs combine -> mixed")
class SlotCombine(Op):
    """Each token's weighted mean of all slots: outputs `[batch, experts, slots, dim]`, combine → mixed.

    mixed `[batch, sequence, dim]` has the dtype of outputs; the sum is in that of combine (eq. 3).
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        outputs, combine = operands
        _, experts, slots, dim = outputs.shape
        assert isinstance(experts, int)
        assert isinstance(slots, int)
        require(combine.shape[-1] == experts * slots, self, "wants a weight of each token in each slot")
        return (Type(shape=(*combine.shape[:-1], dim), dtype=outputs.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens = meshes.own_tokens
        return Placing((group_layout("sequence", meshes), tokens), (tokens,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        outputs, combine = operands
        saved = workload.keep(outputs)
        if outputs.dtype != combine.dtype:
            saved = (workload.inner(results[0], "outputs", workload.count(outputs), combine.dtype),)
        return elementwise(self, operands, results, workload, keeps=(*saved, *workload.keep(combine)), forward=2)
