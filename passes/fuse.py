"""fuse: mixtures in the form in which backward needs least, whether their rows stay on their rank or travel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from moec.passes.ir import Block, Op, Program, Value
from moec.passes.ir.ops import (
    AllToAll,
    AllToAllPadded,
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
    PermuteWeights,
    SumRows,
)

Experts = ExpertMlp | ExpertMlpPadded


@dataclass(frozen=True, slots=True)
class Fuse:
    """permute → expert_mlp → combine, of whatever capacity.

    Where no conversion stands between them, they become one op. Places that a capacity leaves empty are not computed
    with then: what it drops, `keep_choices` says. Where rows travel, their weights do too: experts apply them, and
    tokens add up what comes back.
    """

    def apply(self, program: Program) -> Program:
        """The Program with its mixtures fused."""
        return replace(program, blocks=tuple(_fused(block) for block in program.blocks))


@dataclass(frozen=True, slots=True)
class _Mixture:
    """The ops of a mixture, in order: what takes rows to their experts and back stands in between."""

    permute: Op
    out: tuple[Op, ...]
    experts: Experts
    back: tuple[Op, ...]
    combine: Op


def _fused(block: Block) -> Block:
    given = {value.name: op for op in block.ops for value in op.results}
    names = _Names(set(block.scope))
    replaced: dict[int, tuple[Op, ...]] = {}
    for combine in block.ops:
        if isinstance(combine, Combine | CombinePadded):
            mixture = _mixture(combine, given)
            replaced |= (_travelling if mixture.out else _local)(block, mixture, names)
            if isinstance(mixture.permute, PermuteDynamic) and not mixture.out:
                replaced |= {id(op): () for op in _largest_load(mixture.permute, given)}
    return replace(block, ops=tuple(op for each in block.ops for op in replaced.get(id(each), (each,))))


def _mixture(combine: Op, given: Mapping[str, Op]) -> _Mixture:
    """From its last op, by what each is given."""
    back, experts = _journey(combine.operands[0], given)
    out, permute = _journey(experts.operands[0], given)
    assert isinstance(experts, Experts)
    assert given[combine.operands[1]] is permute
    return _Mixture(permute, out, experts, back, combine)


def _journey(rows: str, given: Mapping[str, Op]) -> tuple[tuple[Op, ...], Op]:
    """The conversions that rows went through, in order, and the op that they come from."""
    conversions: list[Op] = []
    while isinstance(op := given[rows], AllToAll | AllToAllPadded):
        conversions.insert(0, op)
        rows = op.operands[0]
    return tuple(conversions), op


# ---- rows that stay ------------------------------------------------------------------------------------


def _local(block: Block, mixture: _Mixture, names: _Names) -> dict[int, tuple[Op, ...]]:
    permute, experts, combine = mixture.permute, mixture.experts, mixture.combine
    chosen, kept = _kept(block, permute, names)
    fused = MixtureMlp(
        operands=(permute.operands[0], chosen, combine.operands[2], *_parameters(experts)),
        results=(*combine.results, permute.results[1]),
        span=experts.span,
        activation=experts.activation,
    )
    return {id(permute): (), id(experts): (), id(combine): (*kept, fused)}


def _parameters(experts: Experts) -> tuple[str, ...]:
    return tuple(name for name in experts.operands if name.startswith("@"))


def _kept(block: Block, permute: Op, names: _Names) -> tuple[str, tuple[Op, ...]]:
    """The choices that a permutation keeps, and the op that says which."""
    experts = permute.operands[1]
    if not isinstance(permute, PermutePadded):
        assert isinstance(permute, Permute | PermuteDynamic)
        return experts, ()
    kept = replace(block.scope[experts], name=names.fresh("kept"))
    keep = KeepChoices(
        operands=permute.operands[1:],
        results=(kept,),
        span=permute.span,
        **permute.capacity(),
    )
    return kept.name, (keep,)


def _largest_load(permute: PermuteDynamic, given: Mapping[str, Op]) -> Iterator[Op]:
    """What says how many places there must be."""
    op = given[permute.operands[2]]
    while not isinstance(op, LargestLoad):
        yield op
        op = given[op.operands[0]]
    yield op


# ---- rows that travel ----------------------------------------------------------------------------------


def _travelling(block: Block, mixture: _Mixture, names: _Names) -> dict[int, tuple[Op, ...]]:
    """Weights go with the rows, and what comes back is weighted: other values, by other names."""
    permute, experts, combine = mixture.permute, mixture.experts, mixture.combine
    rows, counts, positions = (value.name for value in permute.results)
    weights = combine.operands[2]
    own = _weights_of(block.scope[rows], block.scope[weights].dtype, names)
    beside: tuple[Op, ...] = (PermuteWeights(operands=(weights, positions, rows), results=(own,), span=combine.span),)
    replaced: dict[int, tuple[Op, ...]] = {}
    for conversion in mixture.out:
        moved = _weights_of(conversion.results[0], own.dtype, names)
        also = replace(conversion, operands=(own.name, *conversion.operands[1:]), results=(moved,))
        replaced[id(conversion)], own, beside = (conversion, *beside, also), moved, ()
    first = len(experts.operands) - len(_parameters(experts))
    operands = (*experts.operands[:first], own.name, *experts.operands[first:])
    last = names.like(experts.results[0], "weighted")
    replaced[id(experts)] = (replace(experts, operands=operands, results=(last,)),)
    for conversion in mixture.back:
        moved = names.like(conversion.results[0], "weighted")
        travelled = replace(conversion, operands=(last.name, *conversion.operands[1:]), results=(moved,))
        replaced[id(conversion)], last = (travelled,), moved
    summed = SumRows(operands=(last.name, positions, counts), results=combine.results, span=combine.span)
    return replaced | {id(combine): (summed,)}


def _weights_of(rows: Value, dtype: str, names: _Names) -> Value:
    return replace(names.like(rows, "row_weights"), shape=rows.shape[:-1], dtype=dtype)


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of a block's values, those that were made up among them."""

    taken: set[str]

    def fresh(self, stem: str) -> str:
        """A name that starts with `stem`, and is taken from now on."""
        name, number = stem, 0
        while name in self.taken:
            number += 1
            name = f"{stem}.{number}"
        self.taken.add(name)
        return name

    def like(self, value: Value, stem: str) -> Value:
        """A value such as this one, by another name."""
        return replace(value, name=self.fresh(stem))
