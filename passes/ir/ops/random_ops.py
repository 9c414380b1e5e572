"""Ops that draw random numbers: the keys of tokens, jitter, and normal noise.

A number is a function of the job's seed, the step, the layer, the op and the token. It depends neither on the rank
that has the token nor on the micro-batch, and recomputation draws it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from moec.passes.ir.attribute_types import Bounds, Positive, Stream
from moec.passes.ir.layout import REPLICATED, Shard
from moec.passes.ir.op import Meshes, Placing, TokenOp, Type, layout_of, op, require
from moec.passes.ir.ops.token_layouts import Blocks, own_tokens
from moec.passes.ir.ops.token_operands import require_keys, require_scores, require_training
from moec.passes.ir.value import Value, promoted
from moec.passes.ir.work.cost import Cost
from moec.passes.ir.work.formulas import elementwise

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@op("token_keys", "ids sequences seed step -> keys", operator="token_keys")
class TokenKeys(TokenOp):
    """A random 64-bit key of each token in this step: ids `[batch, sequence]` → int64 of the same shape.

    `sequences` `[batch]` numbers the sequences of the global batch. The key of a token is two words of Philox4x32-10
    (Salmon et al. 2011) of (place in the sequence, number of the sequence, step), keyed by the seed.
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        ids, sequences, seed, step = operands
        require(all(v.dtype == "int64" for v in operands) and len(ids.shape) == 2, self, "wants int64 ids")
        require(sequences.shape == ids.shape[:1], self, "wants a number for each sequence")
        require(seed.shape == step.shape == (), self, "wants the settings $seed and $step")
        return (Type(shape=ids.shape, dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        # A token's place is counted from the start of its sequence.
        layout = layout_of(operands[0]).only(Shard(0))
        return Placing((layout, layout, REPLICATED, REPLICATED), (layout,))


@op("jitter", "x keys training -> y", operator="jitter", numbered=True)
class Jitter(TokenOp):
    """`x · (1 + amount · u)` in training, with u uniform in [−1, 1) for each element; x itself in evaluation.

    x `[batch, sequence, dim]` → the same shape, in at least fp32. Fedus et al. 2021, section 2.2 (the input of a
    router). u comes from Philox4x32-10 of (element, layer, `stream`), keyed by the token's key; `stream` tells apart
    the ops of one layer that draw.
    """

    amount: Annotated[float, Bounds(gt=0, le=1)]
    stream: Stream

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, keys, training = operands
        require(len(x.shape) == 3 and isinstance(x.shape[2], int), self, "wants x [batch, sequence, dim]")
        require(x.dtype != "int64" and x.ragged is None, self, "wants floating x")
        require_keys(self, keys, x)
        require_training(self, training)
        return (Type(shape=x.shape, dtype=promoted(x.dtype)),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 2, meshes, parameters=1)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        return elementwise(self, operands, results, workload, keeps=workload.keep(operands[1]))


@op("add_noise", "logits noise -> noisy", constants={"noise"})
class AddNoise(TokenOp):
    """`logits + std · noise`: `[batch, sequence, experts]` both → the same shape. The noise gets no gradient."""

    std: Positive

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        logits, noise = operands
        require((logits.shape, logits.dtype) == (noise.shape, noise.dtype), self, "wants noise for each logit")
        return (Type(shape=logits.shape, dtype=logits.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 2, meshes)


@op("normal_noise", "logits keys training -> noise", operator="normal_noise", numbered=True, constants={"logits"})
class NormalNoise(TokenOp):
    """Standard normal numbers for each logit in training, zeros in evaluation: logits `[batch, sequence, experts]` →
    the same shape and dtype. Only the shape and dtype of the logits are used.

    Box and Muller (1958) turn two uniform numbers into two normal ones. The uniform numbers come from Philox4x32-10 of
    (element, layer, `stream`), keyed by the token's key; `stream` tells apart the ops of one layer that draw. Gates
    scale the numbers and add them to logits (Shazeer et al. 2017, arXiv 1701.06538, eq. 4).
    """

    stream: Stream

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        logits, keys, training = operands
        require_scores(self, logits, "logits")
        require(logits.dtype in ("fp32", "fp64"), self, "wants logits in at least fp32")
        require_keys(self, keys, logits)
        require_training(self, training)
        return (Type(shape=logits.shape, dtype=logits.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 2, meshes, parameters=1)
