"""fuse: rewrites each mixture to the form that saves the fewest activations, whether or not its rows change rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from moec.passes.ir import Block, Op, Program, Value
from moec.passes.ir.ops import (
    Combine,
    CombinePadded,
    Conversion,
    ExpertMlp,
    ExpertMlpPadded,
    KeepChoices,
    LargestLoad,
    MixtureMlp,
    Permute,
    PermuteDynamic,
    PermutePadded,
    PermuteWeights,
    SelectExperts,
    SumRows,
)

Experts = ExpertMlp | ExpertMlpPadded


@dataclass(frozen=True, slots=True)
class Fuse:
    """Rewrites permute → expert_mlp → combine, with or without a capacity.

    Without conversions between the three ops, they become one op. It computes no empty places: `keep_choices` marks
    the dropped choices. Where rows go to other ranks, their weights go with them: `expert_mlp` applies the weights, and
    `sum_rows` adds the weighted rows of each token. Some mixtures stay as they are (`_is_left_alone`).
    """

    def apply(self, program: Program) -> Program:
        """The Program with every mixture rewritten."""
        return replace(program, blocks=tuple(_fuse(block) for block in program.blocks))


@dataclass(frozen=True, slots=True)
class _Mixture:
    """The ops of a mixture, in order: `out` moves rows to their experts, `back` moves them back."""

    permute: Op
    out: tuple[Op, ...]
    experts: Experts
    back: tuple[Op, ...]
    combine: Op


def _fuse(block: Block) -> Block:
    producers = {value.name: op for op in block.ops for value in op.results}
    names = _Names(set(block.scope))
    replaced: dict[int, tuple[Op, ...]] = {}
    for combine in block.ops:
        if isinstance(combine, Combine | CombinePadded):
            mixture = _mixture(combine, producers)
            if mixture is None:
                continue
            # `mixture_mlp` saves a pre-activation for every choice, those of other parts' experts too.
            is_part = isinstance(producers.get(mixture.permute.operands[1]), SelectExperts)
            if not mixture.out and not is_part and _is_left_alone(mixture, producers):
                continue
            replaced |= (_fuse_moving_rows if mixture.out or is_part else _fuse_local_rows)(block, mixture, names)
            if isinstance(mixture.permute, PermuteDynamic) and not mixture.out:
                replaced |= {id(op): () for op in _largest_load(mixture.permute, producers)}
    return replace(block, ops=tuple(new for op in block.ops for new in replaced.get(id(op), (op,))))


def _is_left_alone(mixture: _Mixture, producers: Mapping[str, Op]) -> bool:
    """Whether `mixture_mlp` does not fit: it computes no empty places, and allocates a row for each choice.

    Where a gate is `sparse`, a token has a choice of every expert, and most are −1.
    """
    permute, experts = mixture.permute, mixture.experts
    if isinstance(experts, ExpertMlpPadded):
        return experts.all_places
    assert isinstance(permute, Permute)
    return _gate(permute.operands[1], producers).sparse


def _gate(choices: str, producers: Mapping[str, Op]) -> Op:
    """The gate that made the choices; ops between may have dropped some of them."""
    op = producers[choices]
    while (source := _source(op)) in producers:
        op = producers[source]
    return op


def _source(op: Op) -> str:
    """The operand of an op that has choices; empty where there is none."""
    return op.operands[0] if isinstance(op, Conversion) else op.named(op.operands).get("experts", "")


def _mixture(combine: Op, producers: Mapping[str, Op]) -> _Mixture | None:
    """The mixture that ends in `combine`, found by following operands back; `producers` maps a value to its op.

    None for experts without an activation, which have no fused form.
    """
    back, experts = _trace_rows(combine.operands[0], producers)
    if not isinstance(experts, Experts):
        return None
    out, permute = _trace_rows(experts.operands[0], producers)
    assert producers[combine.operands[1]] is permute
    return _Mixture(permute, out, experts, back, combine)


def _trace_rows(rows: str, producers: Mapping[str, Op]) -> tuple[tuple[Op, ...], Op]:
    """The conversions of `rows`, in order, and the op that made the rows."""
    conversions: list[Op] = []
    while isinstance(op := producers[rows], Conversion):
        conversions.insert(0, op)
        rows = op.operands[0]
    return tuple(conversions), op


# ---- rows that stay on their rank ----------------------------------------------------------------------


def _fuse_local_rows(block: Block, mixture: _Mixture, names: _Names) -> dict[int, tuple[Op, ...]]:
    permute, experts, combine = mixture.permute, mixture.experts, mixture.combine
    choices, keep_ops = _kept_choices(block, permute, names)
    by_name = experts.named(experts.operands)
    weights: dict[str, str] = {name: by_name[name] for name in by_name if name not in ("rows", "counts")}
    fused = MixtureMlp(
        **MixtureMlp.taking(weights | {"x": permute.operands[0], "experts": choices, "weights": combine.operands[2]}),
        results=(*combine.results, permute.results[1]),
        span=experts.span,
        **experts.activates(),
    )
    return {id(permute): (), id(experts): (), id(combine): (*keep_ops, fused)}


def _kept_choices(block: Block, permute: Op, names: _Names) -> tuple[str, tuple[Op, ...]]:
    """The name of the choices that a permutation keeps, and the op that computes them, if any."""
    experts = permute.operands[1]
    if not isinstance(permute, PermutePadded):
        assert isinstance(permute, Permute | PermuteDynamic)
        return experts, ()
    kept_choices = replace(block.scope[experts], name=names.fresh("kept"))
    by_name = permute.named(permute.operands)
    keep = KeepChoices(
        **KeepChoices.taking({name: operand for name, operand in by_name.items() if name != "x"}),
        results=(kept_choices,),
        span=permute.span,
        **permute.capacity(),
    )
    return kept_choices.name, (keep,)


def _largest_load(permute: PermuteDynamic, producers: Mapping[str, Op]) -> Iterator[Op]:
    """The ops that compute the number of places."""
    op = producers[permute.operands[2]]
    while not isinstance(op, LargestLoad):
        yield op
        op = producers[op.operands[0]]
    yield op


# ---- rows that change rank -----------------------------------------------------------------------------


def _fuse_moving_rows(block: Block, mixture: _Mixture, names: _Names) -> dict[int, tuple[Op, ...]]:
    """Sends weights with the rows. The returned rows are weighted, so they get new names."""
    permute, experts, combine = mixture.permute, mixture.experts, mixture.combine
    rows, counts, positions = (value.name for value in permute.results)
    weights = combine.operands[2]
    row_weights = _weights_of(block.scope[rows], block.scope[weights].dtype, names)
    permuted = PermuteWeights(operands=(weights, positions, rows), results=(row_weights,), span=combine.span)
    new_ops: tuple[Op, ...] = (permuted,)
    replaced: dict[int, tuple[Op, ...]] = {}
    if not mixture.out:
        replaced[id(permute)] = (permute, *new_ops)
    for conversion in mixture.out:
        moved = _weights_of(conversion.results[0], row_weights.dtype, names)
        moving = replace(conversion, operands=(row_weights.name, *conversion.operands[1:]), results=(moved,))
        replaced[id(conversion)], row_weights, new_ops = (conversion, *new_ops, moving), moved, ()
    weighted = names.like(experts.results[0], "weighted")
    fields = experts.taking(experts.named(experts.operands) | {"weights": row_weights.name})
    replaced[id(experts)] = (replace(experts, **fields, results=(weighted,)),)
    for conversion in mixture.back:
        moved = names.like(conversion.results[0], "weighted")
        weighted_conversion = replace(conversion, operands=(weighted.name, *conversion.operands[1:]), results=(moved,))
        replaced[id(conversion)], weighted = (weighted_conversion,), moved
    summed = SumRows(operands=(weighted.name, positions, counts), results=combine.results, span=combine.span)
    return replaced | {id(combine): (summed,)}


def _weights_of(rows: Value, dtype: str, names: _Names) -> Value:
    return replace(names.like(rows, "row_weights"), shape=rows.shape[:-1], dtype=dtype)


@dataclass(frozen=True, slots=True)
class _Names:
    """The names taken in a block, including new ones."""

    taken: set[str]

    def fresh(self, stem: str) -> str:
        """A free name that starts with `stem`; marks it as taken."""
        name, number = stem, 0
        while name in self.taken:
            number += 1
            name = f"{stem}.{number}"
        self.taken.add(name)
        return name

    def like(self, value: Value, stem: str) -> Value:
        """A copy of `value` under a new name."""
        return replace(value, name=self.fresh(stem))
