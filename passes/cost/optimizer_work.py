"""What an optimizer allocates while it steps, beside parameters, gradients and states: bytes on one rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from moec.grammar.spec import Update
from moec.passes.cost.optimizers import FP32, UPDATE_CHUNK, Part, kind_of, state_elements
from moec.passes.cost.totals import BlockCost
from moec.passes.ir.layout import REPLICATED
from moec.passes.ir.value import DTYPE_BYTES, VECTOR


def work_bytes(blocks: Iterable[BlockCost], states: float, largest: float, update: Update) -> float:
    """The most bytes that a step allocates. `blocks`: one for each layer, and the top level's.

    `states`: bytes of all states; `largest`: of one parameter's.
    """
    kind = kind_of(update.optimizer)
    work, widened = kind.work(update, list(_parts(blocks))), widened_bytes(states, largest, update)
    # Optimizers of whole matrices give narrow states back before the moment of their most bytes.
    return max(work, widened) if kind.whole_matrices else work + widened


def widened_bytes(states: float, largest: float, update: Update) -> float:
    """Bytes of the fp32 copies of states while a step updates a chunk; 0 where states are fp32."""
    if update.state == "fp32":
        return 0.0
    chunk = state_elements((UPDATE_CHUNK,), update.optimizer, VECTOR) * FP32
    wider = FP32 / DTYPE_BYTES[update.state]
    return min(wider * states, max(wider * largest, chunk))


def _parts(blocks: Iterable[BlockCost]) -> Iterator[Part]:
    for cost in blocks:
        for p in cost.block.parameters:
            if not p.frozen:
                shape = cost.workload.shape(replace(p, layout=p.optimizer_state or REPLICATED))
                yield Part(p, math.prod(shape), cost.workload.device)
