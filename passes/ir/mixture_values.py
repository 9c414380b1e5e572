"""Finds the values of a block's mixture: the choices of tokens, their weights, and their rows.

Passes and checks call these functions, so they depend on no gate's op and on no value's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moec.passes.ir.op import Op
from moec.passes.ir.ops import Combine, CombinePadded, MixtureMlp, Permute, PermuteDynamic, PermutePadded, SelectExperts
from moec.passes.ir.program import Block
from moec.passes.ir.value import Value

Permutation = Permute | PermutePadded | PermuteDynamic


def choices_of(block: Block) -> Value | None:
    """The expert ids of each token's choices that the mixture uses, `[batch, sequence, k]`; None without a mixture."""
    producers = {value.name: op for op in block.ops for value in op.results}
    for op in block.ops:
        if isinstance(op, Permutation | MixtureMlp):
            experts = op.operands[1]
            selection = producers.get(experts)
            return block.scope[selection.operands[0] if isinstance(selection, SelectExperts) else experts]
    return None


def choices_per_token(block: Block) -> int:
    """Number of experts that a token chooses; 1 in a block without a mixture."""
    choices = choices_of(block)
    k = 1 if choices is None else choices.shape[-1]
    assert isinstance(k, int)
    return k


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureValues:
    """The names of a mixture's values in a lowered block, before `communicate` and `fuse`; of one part of its experts.

    `choices` are expert ids, `weights` and `positions` belong to the choices, `rows` are the results of the experts,
    and `mixed` is the result per token. `row_values` are all values with a row for each choice.
    """

    num_experts: int
    choices: str
    weights: str
    positions: str
    rows: str
    mixed: str
    row_values: frozenset[str]

    @classmethod
    def of(cls, block: Block) -> tuple[MixtureValues, ...]:
        """The mixture values of `block`, one entry for each part of its experts; none without a mixture."""
        producers = {value.name: op for op in block.ops for value in op.results}
        mixtures = []
        for op in block.ops:
            if isinstance(op, Combine | CombinePadded):
                rows, positions, weights = op.operands
                permute = producers[positions]
                assert isinstance(permute, Permutation)
                num_experts = permute.results[1].shape[1]  # of the counts
                assert isinstance(num_experts, int)
                mixture = cls(
                    num_experts=num_experts,
                    choices=permute.operands[1],
                    weights=weights,
                    positions=positions,
                    rows=rows,
                    mixed=op.results[0].name,
                    row_values=frozenset(_row_chain(permute.results[0].name, rows, producers)),
                )
                mixtures.append(mixture)
        return tuple(mixtures)


def _row_chain(first: str, last: str, producers: Mapping[str, Op]) -> Iterator[str]:
    """The names of the values from `last` back to `first`, by the first operands of their ops."""
    while last != first:
        yield last
        last = producers[last].operands[0]
    yield first
