"""Ops for padding tokens: mark real tokens, count real tokens, and drop the choices of padding tokens."""

from __future__ import annotations

from collections.abc import Sequence

from moec.passes.ir.attribute_types import TokenId
from moec.passes.ir.op import Meshes, Op, Placing, TokenOp, Type, op, require
from moec.passes.ir.ops.token_layouts import Blocks, follow_tokens, own_tokens, sum_tokens
from moec.passes.ir.value import Value


@op("real_tokens", "ids -> real")
class RealTokens(TokenOp):
    """1 for each real token, 0 for each padding token: ids `[batch, sequence]` → int64 of the same shape."""

    padding: TokenId

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (ids,) = operands
        require(ids.dtype == "int64" and len(ids.shape) == 2, self, "wants ids")
        return (Type(shape=ids.shape, dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return follow_tokens(self, operands, meshes)


@op("count_real_tokens", "ids -> count")
class CountRealTokens(Op):
    """Number of ids that are not padding: the divisor of the balance terms."""

    padding: TokenId

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (ids,) = operands
        require(ids.dtype == "int64" and len(ids.shape) == 2, self, "wants ids")
        return (Type(shape=(), dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return sum_tokens(self, operands, meshes)


@op("mask_choices", "experts real -> masked")
class MaskChoices(TokenOp):
    """experts `[batch, sequence, k]`, real `[batch, sequence]` → experts, −1 for every choice of a padding token.

    A choice of −1 gets no row and no place, and is not counted.
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        experts, real = operands
        require(experts.dtype == real.dtype == "int64", self, "wants experts, and 1 or 0 for each token")
        require_real(self, experts, [real])
        return (Type(shape=experts.shape, dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 2, meshes)


def require_real(op: Op, x: Value, real: Sequence[Value]) -> None:
    """Requires at most one more operand, `real_tokens` of the same tokens."""
    fits = all(value.dtype == "int64" and value.shape == x.shape[:-1] for value in real)
    require(len(real) <= 1 and fits, op, "wants which tokens are real, or nothing")
