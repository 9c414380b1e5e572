"""What an optimizer keeps per parameter: elements and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moec.grammar.spec import Adafactor, AdamW, Muon, Optimizer, Sgd, Train
from moec.passes.ir.value import DTYPE_BYTES, Matrices

UPDATE_CHUNK = 1 << 26
"""Elements of a rank's parts that are updated together, unless one parameter has more: a bound on temporary memory."""


def state_bytes(shape: Sequence[int], train: Train | None, matrices: Matrices | None = None) -> float:
    """Bytes of the state that the file's optimizer keeps between steps for a rank's part of this shape."""
    if train is None:
        return state_elements(shape, AdamW(), matrices) * DTYPE_BYTES["fp32"]
    return state_elements(shape, train.optimizer, matrices) * DTYPE_BYTES[train.state]


def widened_bytes(states: float, largest: float, train: Train | None) -> float:
    """Bytes of the fp32 copies of states while a step updates a chunk; 0 where states are fp32.

    `states`: bytes of all states; `largest`: of one parameter's.
    """
    if train is None or train.state == "fp32":
        return 0.0
    per_element = 1 if isinstance(train.optimizer, Sgd) else 2
    wider = DTYPE_BYTES["fp32"] / DTYPE_BYTES[train.state]
    return min(wider * states, max(wider * largest, per_element * UPDATE_CHUNK * DTYPE_BYTES["fp32"]))


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
