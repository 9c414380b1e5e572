"""Ops of gates that choose at random: uniform numbers of tokens, the random second expert, and learned noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moec.passes.ir.attribute_types import Count, Stream
from moec.passes.ir.op import Meshes, Placing, TokenOp, Type, op, require
from moec.passes.ir.ops.token_layouts import Blocks, own_tokens
from moec.passes.ir.ops.token_operands import require_keys, require_training
from moec.passes.ir.value import Value
from moec.passes.ir.work.cost import Cost
from moec.passes.ir.work.formulas import elementwise

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@op("uniform", "keys training -> numbers")
class Uniform(TokenOp):
    """Uniform numbers in [0, 1) of each token, multiples of 2⁻²⁴; 1/2 in evaluation.

    keys `[batch, sequence]` → `[batch, sequence, count]`. They are the factors of `jitter` by the amount 1, halved: a
    function of the token's key, the layer, `stream` and the number's place.
    """

    count: Count
    stream: Stream

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        keys, training = operands
        require_keys(self, keys)
        require_training(self, training)
        return (Type(shape=(*keys.shape, self.count), dtype="fp32"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 1, meshes, parameters=1)


@op("second_at_random", "experts weights numbers training -> taken", chooses="taken", constants={"weights", "numbers"})
class SecondAtRandom(TokenOp):
    """Takes a token's second expert with probability `min(1, 2·w₂)` in training, and always in evaluation.

    experts, weights `[batch, sequence, 2]`, numbers `[batch, sequence, 1]` → experts, −1 in place of a second one that
    is not taken: it is where 2·w₂ ≤ number (Lepikhin et al. 2020, arXiv 2006.16668, algorithm 1, with w₂ after
    normalization). Unlike there, an expert that is not taken uses no place of its capacity. Not differentiated.
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        experts, weights, numbers, training = operands
        tokens = experts.shape[:-1]
        require(experts.dtype == "int64" and experts.shape == (*tokens, 2), self, "wants two experts of each token")
        require(weights.shape == experts.shape and weights.dtype != "int64", self, "wants a weight for each choice")
        require(numbers.shape == (*tokens, 1) and numbers.dtype != "int64", self, "wants a number for each token")
        require_training(self, training)
        return (Type(shape=experts.shape, dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 3, meshes, parameters=1)


@op("add_learned_noise", "clean spread noise -> noisy deviation", constants={"noise"})
class AddLearnedNoise(TokenOp):
    """`clean + noise · softplus(spread)`: H of Shazeer et al. 2017 (arXiv 1701.06538, eq. 4), all
    `[batch, sequence, experts]`; also the standard deviation softplus(spread). No gradient flows to the noise."""

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        clean, *noises = operands
        fits = all((v.shape, v.dtype) == (clean.shape, clean.dtype) for v in noises)
        require(fits and clean.dtype != "int64" and len(clean.shape) == 3, self, "wants three numbers for each expert")
        return (Type(shape=clean.shape, dtype=clean.dtype),) * 2

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 3, meshes)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        _, spread, noise = operands
        return elementwise(self, operands, results, workload, keeps=workload.keep(spread, noise), forward=3, backward=2)
