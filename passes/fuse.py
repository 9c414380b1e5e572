"""fuse: a mixture whose rows stay on their rank becomes one op, so that no copy of a token per choice is made."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moec.passes.ir import Block, Op, Program
from moec.passes.ir.ops import (
    Combine,
    CombinePadded,
    ExpertMlp,
    ExpertMlpPadded,
    KeepChoices,
    LargestLoad,
    MixtureMlp,
    Permute,
    PermuteDynamic,
    PermutePadded,
)


@dataclass(frozen=True, slots=True)
class Fuse:
    """permute → expert_mlp → combine, of whatever capacity, where no conversion stands between them.

    Places that a capacity leaves empty are not computed with then: what it drops, `keep_choices` says.
    """

    def apply(self, program: Program) -> Program:
        """The Program with its local mixtures fused."""
        return replace(program, blocks=tuple(_fused(block) for block in program.blocks))


def _fused(block: Block) -> Block:
    given = {value.name: op for op in block.ops for value in op.results}
    replaced: dict[int, tuple[Op, ...]] = {}
    for combine in block.ops:
        if not isinstance(combine, Combine | CombinePadded):
            continue
        rows, positions, weights = combine.operands
        experts, permute = given[rows], given[positions]
        if not isinstance(experts, ExpertMlp | ExpertMlpPadded) or given[experts.operands[0]] is not permute:
            continue
        given_rows = 2 if isinstance(experts, ExpertMlp) else 1
        chosen, kept = _kept(block, permute)
        counts = permute.results[1]
        mixture = MixtureMlp(
            operands=(permute.operands[0], chosen, weights, *experts.operands[given_rows:]),
            results=(*combine.results, counts),
            span=experts.span,
            activation=experts.activation,
        )
        replaced |= {id(permute): (), id(experts): (), id(combine): (*kept, mixture)}
        if isinstance(permute, PermuteDynamic):
            largest = given[permute.operands[2]]
            while not isinstance(largest, LargestLoad):
                replaced[id(largest)] = ()
                largest = given[largest.operands[0]]
            replaced[id(largest)] = ()
    ops = tuple(op for each in block.ops for op in replaced.get(id(each), (each,)))
    return replace(block, ops=ops)


def _kept(block: Block, permute: Op) -> tuple[str, tuple[Op, ...]]:
    """The choices that a permutation keeps, and the op that says which."""
    experts = permute.operands[1]
    if not isinstance(permute, PermutePadded):
        assert isinstance(permute, Permute | PermuteDynamic)
        return experts, ()
    name = _fresh(block, "kept")
    keep = KeepChoices(
        operands=permute.operands[1:],
        results=(replace(block.scope[experts], name=name),),
        span=permute.span,
        group=permute.group,
        shares=permute.shares,
        parts=permute.parts,
        whole=permute.whole,
        eval_parts=permute.eval_parts,
        eval_whole=permute.eval_whole,
        least=permute.least,
    )
    return name, (keep,)


def _fresh(block: Block, stem: str) -> str:
    name, number = stem, 0
    while name in block.scope:
        number += 1
        name = f"{stem}.{number}"
    return name
