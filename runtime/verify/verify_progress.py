"""Progress of a verification: the run, its layer, and the steps done of all steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from moec.codegen.plan import Plan
from moec.passes.ir.interface import layer_calls
from moec.runtime.verify.comparison import has_modes
from moec.runtime.verify.inputs import microbatches_of
from moec.runtime.verify.rounding import UNSHARDED_RUNS

Progress = Callable[[str, int, int], None]
"""Called with what runs now ("float64, 32 ranks: backward, layer 12 of 32"), the steps done, and the steps in all."""


class Steps:
    """Counts steps, each one rank's forward or backward pass of a layer, and calls `progress` for each.

    A run begins with the unsharded model and ends with comparisons, which count as half a pass of all ranks together.
    """

    def __init__(self, plan: Plan, progress: Progress) -> None:
        self._progress = progress
        self._ranks = "1 rank" if plan.stage_size == 1 else f"{plan.stage_size} ranks"
        self._layers = len({call.layer for call in layer_calls(plan.program)})
        passes = self._layers * plan.stage_size
        self._comparison_steps = passes * (2 * microbatches_of(plan) * (2 if has_modes(plan) else 1)) + passes // 2
        self._rounding_steps = 2 * (passes + self._layers * UNSHARDED_RUNS) + passes // 2
        self._run, self._done, self._end, self._total = "", 0, 0, 0

    def expect(self, comparisons: int, roundings: int) -> None:
        """Adds the steps of `comparisons`, and of `roundings`: measurements of rounding."""
        self._total += comparisons * self._comparison_steps + roundings * self._rounding_steps

    def begin(self, run: str, *, rounding: bool = False) -> None:
        """Begins a run, named such as "float64", to which the next steps belong."""
        self._run, self._done = run, self._end
        self._end += self._rounding_steps if rounding else self._comparison_steps
        self._progress(f"{run}: the unsharded model", self._done, self._total)

    def __call__(self, direction: Literal["forward", "backward"], layer: int, ranks: int) -> None:
        """The layer's pass begins (forward), or ends (backward)."""
        self._done = min(self._done + ranks, self._end)
        last = direction == "backward" and layer == 0
        where = "comparing" if last else f"{direction}, layer {layer + 1} of {self._layers}"
        ranks_text = "the unsharded model" if ranks == 1 and self._ranks != "1 rank" else self._ranks
        self._progress(f"{self._run}, {ranks_text}: {where}", self._done, self._total)
