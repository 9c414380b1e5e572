"""The op of `dselect_k`, which selects experts by binary codes, and the sum of one number per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moec.passes.ir.attribute_types import Count, Positive
from moec.passes.ir.op import Meshes, Op, Placing, TokenOp, Type, op, require
from moec.passes.ir.ops.token_layouts import Blocks, own_tokens
from moec.passes.ir.value import Value
from moec.passes.ir.work.cost import Cost, Saved
from moec.passes.ir.work.formulas import elementwise

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@op("decode_selectors", "codes alphas? -> weights experts entropies", chooses="experts", sparse=True)
class DecodeSelectors(TokenOp):
    """The weight of each of E = 2ᵐ experts from k binary codes of m numbers: codes `[batch, sequence, k · m]`.

    DSelect-k (Hazimeh et al. 2021, arXiv 2106.03760, section 2, with per-example gating): q = Σᵢ softmax(α)ᵢ · r(zᵢ).
    r(z)ⱼ is the product over bits b of S(z_b) where bit b of j is 1, else of 1 − S(z_b). The smooth step S(t) is 0 from
    −γ/2 down, 1 from γ/2 up, and −2t³/γ³ + 3t/(2γ) + 1/2 between. Number i · m + b of a token's codes is bit b of
    selector i, bit 0 the lowest. Without the operand `alphas` `[batch, sequence, k]` one selector has the weight 1.

    Gives q as weights `[batch, sequence, E]`; as choices the experts 0 to E − 1, −1 where q is exactly 0; and
    `entropies` `[batch, sequence]`, Σᵢ −Σⱼ r(zᵢ)ⱼ · log r(zᵢ)ⱼ (ibid., the regularizer Ω), which is the sum of the
    entropies of the bits.
    """

    bits: Count
    gamma: Positive

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        codes, *alphas = self.named(operands).values()
        selectors = alphas[0].shape[-1] if alphas else 1
        require(isinstance(selectors, int) and self.bits <= 16, self, "wants at most 16 bits")
        fits = len(codes.shape) == 3 and codes.dtype != "int64" and codes.shape[-1] == int(selectors) * self.bits
        require(fits, self, f"wants {self.bits} numbers for each selector")
        require(all((v.shape[:-1], v.dtype) == (codes.shape[:-1], codes.dtype) for v in alphas), self, "wants alphas")
        choice_shape = (*codes.shape[:-1], 2**self.bits)
        return (
            Type(shape=choice_shape, dtype=codes.dtype),
            Type(shape=choice_shape, dtype="int64"),
            Type(shape=codes.shape[:-1], dtype=codes.dtype),
        )

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, len(operands), meshes)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        """Backward keeps the codes, six numbers of each, and the factors of each product."""
        codes, *alphas = operands
        numbers, (weights, *_) = workload.count(codes), results

        def inner(name: str, size: float, dtype: str = codes.dtype) -> Saved:
            return workload.inner(weights, name, size, dtype)

        steps = [inner(f"step_{i}", numbers) for i in range(6)]
        halves = (self.bits - self.bits // 2, self.bits // 2)
        powers = [2**n for half in halves for n in range(2, half + 1)]
        if alphas and self.bits > 1:
            powers.append(2 ** halves[0])
        sizes = (2 * numbers, *(numbers / self.bits * power for power in powers))
        products = [inner(f"product_{i}", size) for i, size in enumerate(sizes)]
        shares = [inner("shares", workload.count(value)) for value in alphas]
        keeps = (*workload.keep(codes), *steps, *products, *shares)
        return elementwise(self, operands, results, workload, keeps=keeps, forward=20, backward=20)


@op("sum_of_tokens", "values real? -> sum")
class SumOfTokens(Op):
    """The sum of a number of each token: values `[batch, sequence]` → scalar. With `real`, that of real tokens."""

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        values, *real = self.named(operands).values()
        require(len(values.shape) == 2 and values.dtype != "int64", self, "wants a number of each token")
        require(all(v.dtype == "int64" and v.shape == values.shape for v in real), self, "wants which tokens are real")
        return (Type(shape=(), dtype=values.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens = meshes.own_tokens
        return Placing((tokens,) * len(operands), (tokens.as_partial(),))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        masks = [workload.inner(results[0], "real", workload.count(value), "bool") for value in operands[1:]]
        return elementwise(self, operands, results, workload, keeps=masks)
