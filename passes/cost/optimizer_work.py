"""What an optimizer allocates while it steps, beside parameters, gradients and states: bytes on one rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from moec.grammar.spec import Adafactor, Muon, Train
from moec.passes.cost.optimizer_state import UPDATE_CHUNK
from moec.passes.cost.totals import BlockCost
from moec.passes.ir.layout import REPLICATED
from moec.passes.ir.value import DTYPE_BYTES, Parameter

FP32 = DTYPE_BYTES["fp32"]


def work_bytes(blocks: Iterable[BlockCost], train: Train | None) -> float:
    """The most bytes that a step of the file's optimizer allocates. `blocks`: one for each layer, and the top level's.

    Fused AdamW and SGD allocate none; the fp32 copies of narrow states are `widened_bytes`.
    """
    optimizer = train.optimizer if train else None
    if not isinstance(optimizer, Muon | Adafactor):
        return 0.0
    together: defaultdict[tuple[float, ...], list[_Part]] = defaultdict(list)
    for part in _parts(blocks):
        if isinstance(optimizer, Adafactor):
            together[(part.parameter.decays,)].append(part)
        elif part.parameter.matrices.hidden:
            together[part.matrix].append(part)
    of_chunk = _of_adafactor if isinstance(optimizer, Adafactor) else _of_muon
    return max((of_chunk(parts) for parts in together.values()), default=0.0)


@dataclass(frozen=True, slots=True)
class _Part:
    """A rank's part of a parameter, as its optimizer's state is laid out."""

    parameter: Parameter
    elements: int
    device: str

    @property
    def matrix(self) -> tuple[float, ...]:
        """Rows and columns of one whole matrix, and the number of axes that cut it."""
        p, matrices, layout = self.parameter, self.parameter.matrices, self.parameter.optimizer_state or REPLICATED
        dims = matrices.dims_of_rows(), matrices.dims_of_columns(len(p.shape))
        rows, columns = (math.prod(size for d in of if isinstance(size := p.shape[d], int)) for of in dims)
        return rows, columns, sum(len(layout.cuts(d)) for of in dims for d in of)


def _parts(blocks: Iterable[BlockCost]) -> Iterator[_Part]:
    for cost in blocks:
        for p in cost.block.parameters:
            if p.frozen:
                continue
            shape = cost.workload.shape(replace(p, layout=p.optimizer_state or REPLICATED))
            yield _Part(p, math.prod(shape), cost.workload.device)


def _chunk(parts: Iterable[_Part]) -> tuple[int, int]:
    """Elements of the parts that are updated at a time, and of the largest one."""
    sizes = [part.elements for part in parts]
    return min(sum(sizes), max(UPDATE_CHUNK, *sizes)), max(sizes)


def _of_adafactor(parts: list[_Part]) -> float:
    """The directions of a chunk; of one parameter also its second moment and the inverse root of it."""
    elements, largest = _chunk(parts)
    return FP32 * (elements + 2.0 * largest)


def _of_muon(parts: list[_Part]) -> float:
    """The matrices of a chunk, whole ones for each cut, and those of two iterations with their two products.

    On an accelerator the iteration is in bf16 (`runtime/optimizers/newton_schulz.py`).
    """
    elements, largest = _chunk(parts)
    rows, columns, cuts = parts[0].matrix
    is_cpu = parts[0].device == "cpu"
    products = 2 * min(rows, columns) / max(rows, columns)
    direction = 0 if is_cpu else FP32 * largest
    return DTYPE_BYTES["fp32" if is_cpu else "bf16"] * elements * (3 + cuts + products) + direction
