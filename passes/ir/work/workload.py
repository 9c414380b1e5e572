"""The sizes behind a Program's symbols: the batch, its sequences, and how uneven the load of experts is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from moec.grammar.diagnostics.diagnostic import InternalError
from moec.grammar.spec import GateBound, LoadUse, Measured, Spec, Trace, Zipf
from moec.passes.ir.layout import REPLICATED, local_shape
from moec.passes.ir.mesh import Mesh
from moec.passes.ir.op import Meshes
from moec.passes.ir.program import Block, Program
from moec.passes.ir.value import DTYPE_BYTES, Dim, Parameter, Value
from moec.passes.ir.work.arrays import larger, of_each, of_each_pair, smaller, whole
from moec.passes.ir.work.cost import Choices, Saved

NOMINAL_SEQUENCE = 1024
"""Tokens of a sequence where the file gives no sequence length, as in a `layer` file."""

NO_MESH = Mesh("dense", ())
"""The mesh of a Program that is not placed: one rank has everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A training batch over all ranks. Costs are those of the rank with the busiest experts.

    The i-th expert's load is proportional to i ** -`exponent`, experts placed in order; 0 is an even load. `measured`
    loads replace these, for what `use` says, on ranks with so many `mixtures`. `sizes` are
    the symbols' sizes over all ranks, once bound to a block: `rows` counts choices that are not dropped, `choices` the
    choices of one token. `frozen` names the bound block's values without a gradient (`Block.frozen`). `device` is the
    device kind for which operators are chosen.

    The batch and the sizes of meshes may be numpy arrays, one number for each of several plans with the same ops: costs
    are arrays then.
    """

    batch: int
    sequence: int
    exponent: float = 0.0
    measured: Measured | None = None
    use: LoadUse = "time"
    mixtures: int = 1
    device: str = "cpu"
    meshes: Meshes = field(default_factory=lambda: Meshes(NO_MESH))
    sizes: Mapping[str, float] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    _counts: dict[object, float] = field(init=False, default_factory=dict, compare=False, repr=False)
    """The numbers of elements that were asked for, by shape and layout."""

    @classmethod
    def of(cls, spec: Spec, program: Program) -> Workload:
        """The batch and routing of `train { … }`; without it, one sequence for each data-parallel rank."""
        routing = spec.train.routing if spec.train else None
        if isinstance(routing, Trace):
            raise InternalError("a trace is read before the passes")
        mixtures = sum(moe is not None for moe in spec.subject.mixtures)
        return cls(
            batch=spec.train.batch if spec.train else _data_ranks(program),
            sequence=spec.sequence or NOMINAL_SEQUENCE,
            exponent=routing.s if isinstance(routing, Zipf) else math.inf if isinstance(routing, GateBound) else 0.0,
            measured=routing if isinstance(routing, Measured) else None,
            mixtures=-(-mixtures // len(program.stages_by_rank)),
            device=spec.cluster.device.kind,
        )

    @classmethod
    def of_microbatch(cls, spec: Spec, program: Program) -> Workload:
        """The workload of one micro-batch: the batch of `of`, divided by the micro-batches of a step."""
        batch = cls.of(spec, program)
        return replace(batch, batch=-(-batch.batch // program.microbatches))

    @property
    def even(self) -> Workload:
        """This workload with every expert equally loaded: that of an average rank."""
        return replace(self, exponent=0.0, measured=None)

    @property
    def is_even(self) -> bool:
        """Whether every expert is equally loaded."""
        return self.exponent == 0 and self.measured is None

    def planned_for(self, use: LoadUse) -> Workload:
        """This workload with the loads that count for `use`: measured ones differ."""
        return self if self.measured is None else replace(self, use=use)

    @property
    def tokens(self) -> int:
        """Tokens of the batch over all ranks."""
        return self.batch * self.sequence

    def bound_to(self, program: Program, block: Block) -> Workload:
        """This workload with the meshes of `block` and the sizes of its symbols, from its ops (`Op.binds`)."""
        meshes = program.meshes_of(block) if program.meshes else Meshes(NO_MESH)
        dense = meshes.dense
        sizes: dict[str, float] = {"batch": self.batch, "sequence": self.sequence}
        sizes |= {"pieces": meshes.sharers, "data_ranks": _data_ranks(program), "sources": dense.ranks}
        bound = replace(self, meshes=meshes, sizes=sizes, frozen=block.frozen)
        for op in block.ops:
            for symbol, size in op.binds(block.operands(op), bound).items():
                sizes.setdefault(symbol, size)
        return bound

    # ---- a rank's part of a value --------------------------------------------------------------------

    def shape(self, value: Value) -> tuple[int, ...]:
        """The shape of the rank's part of a value that is not ragged."""
        return local_shape(self._whole(value.shape), value.layout or REPLICATED, self.meshes)

    def count(self, value: Value) -> float:
        """Number of elements of the rank's part; of ragged rows, that of the busiest rank."""
        if value.ragged is None:
            key = value.shape, value.layout
            if key not in self._counts:
                self._counts[key] = math.prod(self.shape(value))
            return self._counts[key]
        ranks = math.prod(self.meshes.size(axis) for axis in (value.layout or REPLICATED).sharded_axes())
        return self.sizes["rows"] * self.share(value) * self.row(value) / ranks * self.skew(value)

    def share(self, value: Value) -> float:
        """The share of all choices that goes to the experts of `value` `[experts, …]`: 1 where there is one part."""
        experts = value.shape[0]
        assert isinstance(experts, int)
        return experts / self.sizes.get("all_experts", experts)

    def bytes(self, *values: Value) -> float:
        """Bytes of the rank's parts."""
        return sum(self.count(value) * DTYPE_BYTES[value.dtype] for value in values)

    @staticmethod
    def width(dtype: str) -> int:
        """Bytes of an element."""
        return DTYPE_BYTES[dtype]

    def row(self, rows: Value) -> int:
        """Elements of one row of ragged rows."""
        return math.prod(dim for dim in rows.shape[2:] if isinstance(dim, int))

    def whole(self, value: Value) -> int:
        """Number of elements over all ranks of a value that is not ragged."""
        return math.prod(self._whole(value.shape))

    def _whole(self, shape: Sequence[Dim]) -> tuple[int, ...]:
        return tuple(dim if isinstance(dim, int) else whole(self.sizes[dim]) for dim in shape)

    def is_frozen(self, value: Value) -> bool:
        """Whether a parameter or value of the block has no gradient: frozen, or computed from frozen ones alone."""
        return bool(self.frozen) and _name(value) in self.frozen

    def choices_of(self, rows: Value) -> Choices | None:
        """Where the rows of a token, `[experts, …]`, go in the bound block; None without a mixture."""
        if "choices" not in self.sizes:
            return None
        experts = rows.shape[0]
        assert isinstance(experts, int)
        groups, kept = self.sizes.get("expert_groups", 1), self.sizes.get("kept_groups", 1)
        of_all = self.sizes.get("all_experts", experts)
        return Choices(number=self.sizes["choices"], experts=of_all, groups=groups, kept=kept)

    # ---- saved activations ---------------------------------------------------------------------------

    def keep(self, *values: Value) -> tuple[Saved, ...]:
        """Saves values and parameters of the block for backward."""
        return tuple(Saved(_name(v), self.bytes(v)) for v in values)

    def inner(self, result: Value, name: str, count: float, dtype: str) -> Saved:
        """Saves a tensor of `count` elements that is inside the op of `result`."""
        width = 1 if dtype == "bool" else DTYPE_BYTES[dtype]
        return Saved(f"{result.name}:{name}", count * width)

    # ---- uneven loads --------------------------------------------------------------------------------

    def skew(self, value: Value) -> float:
        """Rows of the busiest rank over the mean: above 1 where ranks hold the rows of different experts."""
        cuts = (value.layout or REPLICATED).cuts(0) if value.ragged else ()
        ranks = math.prod(self.meshes.size(axis) for axis in cuts)
        experts = value.shape[0] if value.ragged else 1
        assert isinstance(experts, int)
        return self.busiest_of(experts, ranks)

    def busiest_of(self, experts: int, ranks: int) -> float:
        """Load of the busiest of `ranks` over the mean, as far as the gate allows it."""
        if self.measured is None:
            load = busiest(experts, ranks, self.exponent)
        else:
            load = of_each_pair(ranks, self.mixtures, partial(self.measured.load, self.use))
        if "expert_rows" in self.sizes:  # no expert gets more than its places
            most = self.sizes["expert_rows"] * self.sizes.get("all_experts", experts) / self.sizes["rows"]
            load = smaller(load, larger(most, 1.0))
        return smaller(load, self._most_of_a_token(experts, ranks))

    def _most_of_a_token(self, experts: int, ranks: int) -> float:
        """The largest load of one of `ranks` over the mean: a token's choices are of different experts."""
        choices = self.sizes.get("choices", 1.0)
        return ranks * smaller(choices, experts / ranks) / choices

    def most_rows(self, rows: Value) -> float:
        """Rows of a rank's busiest expert; `rows` is ragged."""
        (experts, *_), layout = rows.shape, rows.layout or REPLICATED
        assert isinstance(experts, int)
        split = math.prod(self.meshes.size(axis) for axis in layout.cuts(1))
        return self.rows_of(self.sizes["rows"] * self.share(rows) / split, experts)[1]

    def rows_that_stay(self, chosen: Value, up: Value) -> tuple[float, float]:
        """Rows of a rank that sends no tokens to other ranks, and rows of its busiest expert."""
        experts = up.shape[0]
        assert isinstance(experts, int)
        ranks = math.prod(self.meshes.size(axis) for axis in (chosen.layout or REPLICATED).sharded_axes())
        return self.rows_of(self.sizes["rows"] * self.share(up) / ranks, experts)

    def rows_of(self, rows: float, experts: int) -> tuple[float, float]:
        """The rows of all experts, `rows`, and those of the busiest expert."""
        return rows, rows / experts * self.busiest_of(experts, experts)


def _name(value: Value) -> str:
    """The name of a value by which operands use it."""
    return f"@{value.name}" if isinstance(value, Parameter) else value.name


def _data_ranks(program: Program) -> int:
    """Number of data-parallel ranks among which the sequences are divided."""
    return program.mesh("dense").size("dp") if program.meshes else program.data_ranks


def busiest(experts: int, ranks: int, exponent: float) -> float:
    """Load of the busiest of `ranks` over the mean; experts are placed in order, equally many on each rank."""
    if exponent == 0:
        return 1.0
    return of_each(ranks, lambda number: _busiest(experts, number, exponent))


@lru_cache
def _busiest(experts: int, ranks: int, exponent: float) -> float:
    if ranks <= 1:
        return 1.0
    loads: list[float] = [float(place) ** -exponent for place in range(1, experts + 1)]
    local = experts // ranks
    return sum(loads[:local]) / (sum(loads) * local / experts)
