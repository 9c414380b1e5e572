"""The number of elements that an optimizer keeps per parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moec.grammar.spec import Adafactor, Muon, Optimizer, Sgd
from moec.passes.ir.value import Matrices


def state_elements(shape: Sequence[int], optimizer: Optimizer, matrices: Matrices | None = None) -> float:
    """Elements of the optimizer's state for a parameter of this shape, or for a rank's part of one.

    `matrices` is the parameter's own; by default the last dim has columns and the dim before has rows. Counts of steps
    are left out: one number per parameter.
    """
    if matrices is None:
        matrices = Matrices(max(len(shape) - 2, 0), min(len(shape) - 1, 1), hidden=len(shape) > 1)
    whole = math.prod(shape)
    match optimizer:
        case Sgd():
            return whole if optimizer.momentum else 0
        case Muon():
            return whole if matrices.hidden else 2 * whole
        case Adafactor() if matrices.rows:
            rows = math.prod(shape[dim] for dim in matrices.dims_of_rows())
            columns = math.prod(shape[dim] for dim in matrices.dims_of_columns(len(shape)))
            return math.prod(shape[: matrices.stack]) * (rows + columns)
        case Adafactor():
            return whole
        case _:
            return 2 * whole
