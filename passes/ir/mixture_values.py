"""Finds the values of a block's mixture: the choices of tokens, their weights, and their rows.

Passes and checks call these functions, so they depend on no gate's op and on no value's name.
"""

from __future__ import annotations

from dataclasses import dataclass

from moec.passes.ir.ops import Combine, CombinePadded, MixtureMlp, Permute, PermuteDynamic, PermutePadded
from moec.passes.ir.program import Block
from moec.passes.ir.value import Value

Permutation = Permute | PermutePadded | PermuteDynamic


def choices_of(block: Block) -> Value | None:
    """The expert ids of each token's choices that the mixture uses, `[batch, sequence, k]`; None without a mixture."""
    for op in block.ops:
        if isinstance(op, Permutation | MixtureMlp):
            return block.scope[op.operands[1]]
    return None


def choices_per_token(block: Block) -> int:
    """Number of experts that a token chooses; 1 in a block without a mixture."""
    choices = choices_of(block)
    k = 1 if choices is None else choices.shape[-1]
    assert isinstance(k, int)
    return k


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureValues:
    """The names of a mixture's values in a lowered block, before `communicate` and `fuse`.

    `choices` are expert ids, `weights` and `positions` those of the choices, `rows` the results of the experts, and
    `mixed` the result per token.
    """

    num_experts: int
    choices: str
    weights: str
    positions: str
    rows: str
    mixed: str

    @classmethod
    def of(cls, block: Block) -> MixtureValues | None:
        """The mixture values of `block`; None without a mixture."""
        given = {value.name: op for op in block.ops for value in op.results}
        for op in block.ops:
            if isinstance(op, Combine | CombinePadded):
                rows, positions, weights = op.operands
                permute = given[positions]
                assert isinstance(permute, Permutation)
                num_experts = permute.results[1].shape[1]  # of the counts
                assert isinstance(num_experts, int)
                return cls(
                    num_experts=num_experts,
                    choices=permute.operands[1],
                    weights=weights,
                    positions=positions,
                    rows=rows,
                    mixed=op.results[0].name,
                )
        return None
