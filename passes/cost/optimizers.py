"""The states of each optimizer and the memory of its update, declared once.

Its options are in `grammar/spec/optimizers.py`, its update in `runtime/optimizers`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moec.grammar.diagnostics.diagnostic import InternalError
from moec.grammar.spec.optimizers import Adafactor, AdamW, Lion, Muon, Optimizer, Sgd, Update
from moec.passes.ir.layout import REPLICATED
from moec.passes.ir.value import DTYPE_BYTES, Matrices, Parameter

FP32 = DTYPE_BYTES["fp32"]
UPDATE_CHUNK = 1 << 26
"""Elements of a rank's parts that are updated together, unless one parameter has more: a bound on temporary memory."""


@dataclass(frozen=True, slots=True)
class Part:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerKind:
    """An optimizer, as cost, jobs, checkpoints and `moec verify` need to know it.

    `states(optimizer, shape, matrices)`: the elements of each state for a part of this shape, by the state's name in
    checkpoints; counts of steps are left out. `work(update, parts)`: bytes that a step over a rank's parts allocates
    beside parameters, gradients and states. `whole_matrices`: an update follows from whole matrices, so that ranks that
    share one exchange their parts; else every element is updated by itself. `amplifies`: rounding in a gradient's small
    singular values becomes large in the update of a hidden matrix.
    """

    states: Callable[[Any, Sequence[int], Matrices], Mapping[str, int]]
    work: Callable[[Update, Sequence[Part]], float] = lambda update, parts: 0.0
    whole_matrices: bool = False
    amplifies: bool = False


def kind_of(optimizer: Optimizer) -> OptimizerKind:
    """The declaration of an optimizer."""
    if type(optimizer) not in KINDS:
        raise InternalError(f"`{optimizer.word}` has no declaration in {__name__}")
    return KINDS[type(optimizer)]


def state_elements(shape: Sequence[int], optimizer: Optimizer, matrices: Matrices) -> int:
    """Elements of the states of a parameter of this shape, or of a rank's part of one."""
    return sum(kind_of(optimizer).states(optimizer, shape, matrices).values())


def state_bytes(shape: Sequence[int], update: Update, matrices: Matrices) -> int:
    """Bytes of these states between steps."""
    return state_elements(shape, update.optimizer, matrices) * DTYPE_BYTES[update.state]


def _adamw_states(_: Any, shape: Sequence[int], __: Matrices) -> Mapping[str, int]:
    return dict.fromkeys(("exp_avg", "exp_avg_sq"), math.prod(shape))


def _sgd_states(optimizer: Sgd, shape: Sequence[int], _: Matrices) -> Mapping[str, int]:
    return {"momentum_buffer": math.prod(shape)} if optimizer.momentum else {}


def _adafactor_states(_: Any, shape: Sequence[int], matrices: Matrices) -> Mapping[str, int]:
    if not matrices.rows:
        return {"variance": math.prod(shape)}
    stack, dims = math.prod(shape[: matrices.stack]), (matrices.dims_of_rows(), matrices.dims_of_columns(len(shape)))
    rows, columns = (stack * math.prod(shape[dim] for dim in of) for of in dims)
    return {"row_var": rows, "col_var": columns}


def _muon_states(optimizer: Muon, shape: Sequence[int], matrices: Matrices) -> Mapping[str, int]:
    if not matrices.hidden:
        return _adamw_states(optimizer.adamw, shape, matrices)
    return {"momentum_buffer": math.prod(shape)}


def _lion_states(_: Any, shape: Sequence[int], __: Matrices) -> Mapping[str, int]:
    return {"exp_avg": math.prod(shape)}


def _chunk(parts: Iterable[Part]) -> tuple[int, int]:
    """Elements of the parts that are updated at a time, and of the largest one."""
    sizes = [part.elements for part in parts]
    return min(sum(sizes), max(UPDATE_CHUNK, *sizes)), max(sizes)


def _together(parts: Iterable[Part], key: Callable[[Part], Hashable]) -> Iterable[list[Part]]:
    groups: defaultdict[Hashable, list[Part]] = defaultdict(list)
    for part in parts:
        groups[key(part)].append(part)
    return groups.values()


def _decays(part: Part) -> bool:
    return part.parameter.decays


def _sgd_work(update: Update, parts: Sequence[Part]) -> float:
    """Copies of the gradients to which the decay is added: of all at once in torch's own step, for wide states."""
    decaying = [part for part in parts if part.parameter.decays and update.optimizer.weight_decay]
    if not decaying:
        return 0.0
    return FP32 * (sum(part.elements for part in decaying) if update.state == "fp32" else _chunk(decaying)[0])


def _lion_work(_: Update, parts: Sequence[Part]) -> float:
    """The directions of a chunk."""
    return FP32 * max((_chunk(together)[0] for together in _together(parts, _decays)), default=0)


def _adafactor_work(_: Update, parts: Sequence[Part]) -> float:
    """The directions of a chunk; of one parameter also its second moment and the inverse root of it."""
    chunks = map(_chunk, _together(parts, _decays))
    return max((FP32 * (elements + 2.0 * largest) for elements, largest in chunks), default=0.0)


def _muon_work(_: Update, parts: Sequence[Part]) -> float:
    """A chunk's matrices, a whole copy of them for each cut, and the matrices and products of two iterations.

    On an accelerator the iteration is in bf16 (`runtime/optimizers/newton_schulz.py`).
    """
    most = 0.0
    for matrices in _together((part for part in parts if part.parameter.matrices.hidden), lambda part: part.matrix):
        elements, largest = _chunk(matrices)
        rows, columns, cuts = matrices[0].matrix
        is_cpu = matrices[0].device == "cpu"
        products = 2 * min(rows, columns) / max(rows, columns)
        direction = 0 if is_cpu else FP32 * largest
        most = max(most, (FP32 if is_cpu else DTYPE_BYTES["bf16"]) * elements * (3 + cuts + products) + direction)
    return most


KINDS: Mapping[type, OptimizerKind] = {
    AdamW: OptimizerKind(states=_adamw_states),
    Sgd: OptimizerKind(states=_sgd_states, work=_sgd_work),
    Adafactor: OptimizerKind(states=_adafactor_states, work=_adafactor_work, whole_matrices=True),
    Muon: OptimizerKind(states=_muon_states, work=_muon_work, whole_matrices=True, amplifies=True),
    Lion: OptimizerKind(states=_lion_states, work=_lion_work),
}
"""The optimizers by their class."""
