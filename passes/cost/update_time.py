"""The seconds of an optimizer's step on a rank: the bytes that it moves, its products, and what it exchanges."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from moec.grammar.spec import Update
from moec.grammar.spec.optimizers import Adafactor, Muon
from moec.passes.cost.groups import Group, group_along
from moec.passes.cost.optimizers import UPDATE_CHUNK, state_bytes
from moec.passes.cost.rates import Rates
from moec.passes.cost.totals import BlockCost
from moec.passes.ir.layout import REPLICATED, Layout
from moec.passes.ir.mesh import group_name
from moec.passes.ir.op import Meshes
from moec.passes.ir.value import DTYPE_BYTES, Parameter
from moec.passes.ir.work.arrays import larger
from moec.passes.ir.work.cost import MASTER_BYTES, Product

ADAFACTOR_BYTES = 84
"""Bytes of an element that Adafactor reads and writes beside its gradient, parameter and states: 21 fp32 tensors that
its kernels take or make one by one (runtime/optimizers/adafactor.py)."""


class Updated(NamedTuple):
    """A parameter of so many `layers`, and the shape of a rank's part of it."""

    parameter: Parameter
    shape: tuple[int, ...]
    layers: int
    meshes: Meshes
    experts: str | None
    """The name of the expert mesh."""
    device: str

    @property
    def layout(self) -> Layout:
        return self.parameter.optimizer_state or REPLICATED

    def cuts(self, dims: range) -> list[str]:
        """The axes that cut these dims."""
        return [axis for dim in dims for axis in self.layout.cuts(dim)]

    @property
    def dims(self) -> tuple[range, range]:
        """The dims of rows and of columns; all dims of a vector are columns."""
        matrices = self.parameter.matrices
        return matrices.dims_of_rows(), matrices.dims_of_columns(len(self.parameter.shape))


def update_seconds(runs: Sequence[tuple[BlockCost, int]], update: Update, rates: Rates) -> float:
    """Seconds of an update of the parameters of blocks, each so many times."""
    parts = list(_parts(runs))
    moved = sum(
        count * (6 * MASTER_BYTES * math.prod(shape) + 2 * state_bytes(shape, update, p.matrices))
        for p, shape, count, *_ in parts
    )
    beside = BESIDE.get(type(update.optimizer))
    return rates.updated(moved) + (beside(parts, update, rates) if beside else 0.0)


def _parts(runs: Sequence[tuple[BlockCost, int]]) -> Iterator[Updated]:
    for cost, count in runs:
        for p in cost.block.parameters:
            if not p.frozen:
                shape = cost.workload.shape(replace(p, layout=p.optimizer_state or REPLICATED))
                yield Updated(p, shape, count, cost.workload.meshes, cost.block.experts, cost.workload.device)


# ---- Muon ------------------------------------------------------------------------------------------------


def _muon_seconds(parts: Sequence[Updated], update: Update, rates: Rates) -> float:
    """Of hidden matrices: whole ones are collected, orthogonalised on one of the ranks that share them, and returned.

    Matrices of one shape and cut are together, a chunk at a time; of too few for all ranks some get none.
    """
    together = defaultdict[tuple[Any, ...], list[Updated]](list)
    for part in parts:
        if part.parameter.matrices.hidden:
            rows, columns = (math.prod(part.parameter.shape[d] for d in dims) for dims in part.dims)
            axes = [axis for dims in part.dims for axis in part.cuts(dims)]
            groups = tuple(group_name(axis, part.experts) for axis in axes)
            together[min(rows, columns), max(rows, columns), groups].append(part)
    assert isinstance(update.optimizer, Muon)
    seconds = 0.0
    for (short, long, _), of in together.items():
        seconds = seconds + _of_matrices(short, long, of, update.optimizer, rates)
    return seconds


def _of_matrices(short: float, long: float, parts: Sequence[Updated], muon: Muon, rates: Rates) -> float:
    meshes, dtype = parts[0].meshes, "fp32" if parts[0].device == "cpu" else "bf16"
    axes = [axis for dims in parts[0].dims for axis in parts[0].cuts(dims)]
    width, ranks = DTYPE_BYTES[dtype], 1.0 * math.prod(meshes.size(axis) for axis in axes)
    number = sum(of.layers * math.prod(of.shape[: of.parameter.matrices.stack]) for of in parts)
    elements = number * short * long / ranks
    chunks = larger(1.0, -(-elements // UPDATE_CHUNK))
    seconds, whole, size = 0.0, number / chunks, elements / chunks
    for axis in axes:
        peers = meshes.size(axis)
        whole, ranks = -(-whole // peers), ranks / peers
        size = larger(size, whole * short * long / ranks)
        sent = width * size * (peers - 1) / peers
        seconds = seconds + 2 * chunks * rates.collective("all_to_all", sent, group_along(axis, meshes))
    whole = whole * chunks
    products = [(short, long), (short, short), (long, short)]  # x xᵀ; its square; both on x
    iteration = sum(
        rates.product(Product(name="ns", m=whole * short, n=n, k=k, groups=whole, dtype=dtype), backward=False)
        for n, k in products
    )
    # baddbmm copies what it adds to, and reads it.
    added = 3 * width * whole * short * (short + long)
    # One step ahead; to the iteration's dtype, stacked, divided by its norm; decay and update; parts sent and joined.
    elsewhere = elements * (3 * MASTER_BYTES * (1 + muon.nesterov) + width * (7 + 4 * len(axes)))
    return seconds + muon.ns_steps * (iteration + rates.moved(added)) + rates.moved(elsewhere)


# ---- Adafactor -------------------------------------------------------------------------------------------


def _adafactor_seconds(parts: Sequence[Updated], _: Update, rates: Rates) -> float:
    """Sums over rows, columns and whole matrices, and of squared updates: two all-reduces a chunk and axis."""
    elements = sum(of.layers * math.prod(of.shape) for of in parts)
    chunks = larger(1.0, -(-elements // UPDATE_CHUNK))
    sums, groups = defaultdict[str, list[float]](lambda: [0.0, 0.0]), dict[str, Group]()
    for of in parts:
        stack = of.layers * math.prod(of.shape[: of.parameter.matrices.stack])
        of_rows, of_columns = (stack * math.prod(of.shape[d] for d in dims) for dims in of.dims)
        for dims, factors in zip(of.dims, (of_columns + stack, of_rows if of.dims[0] else 0.0), strict=True):
            for axis in of.cuts(dims):
                name = group_name(axis, of.experts)
                first, second = sums[name]
                sums[name] = [first + 2 * stack + factors, second + stack]
                groups[name] = group_along(axis, of.meshes)
    seconds = rates.moved(ADAFACTOR_BYTES * elements)
    for name, group in groups.items():
        for total in sums[name]:
            sent = 2 * MASTER_BYTES * total / chunks * (group.ranks - 1) / group.ranks
            seconds = seconds + chunks * rates.collective("all_reduce", sent, group)
    return seconds


BESIDE: Mapping[type, Callable[[Sequence[Updated], Update, Rates], float]] = {
    Muon: _muon_seconds,
    Adafactor: _adafactor_seconds,
}
"""Seconds of what an optimizer of whole matrices does beside reading gradients and updating parameters and states."""
