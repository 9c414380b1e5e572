"""The virtual cluster: every rank of a plan in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from moec.codegen.plan import Plan
from moec.passes.guests.place_guests import homes_only
from moec.passes.ir import Program
from moec.runtime.backends.triton.triton_tiles import ways_on
from moec.runtime.model.plan_layer import first_tables
from moec.runtime.verify.cluster.lockstep import Lockstep, Watch
from moec.runtime.verify.cluster.prepared_graphs import Graphs
from moec.runtime.verify.cluster.routes import Routes
from moec.runtime.verify.cluster.stage_values import InputsByRole, Loads, StageValues
from moec.runtime.verify.cluster.virtual_step import VirtualStep
from moec.runtime.verify.cluster.virtual_weights import VirtualWeights
from moec.runtime.verify.guest_maps import Maps


class VirtualCluster:
    """All ranks of `plan`, each with its part of `parameters` (full name → unsharded tensor), and with all `states`.

    `slots`: those of layers with room for guests, for a step with guests; else a step without.
    """

    def __init__(
        self,
        plan: Plan,
        parameters: Mapping[str, Tensor],
        states: Mapping[str, Tensor] | None = None,
        *,
        recompute: bool = False,
        routes: Routes | None = None,
        training: bool = True,
        watch: Watch | None = None,
        slots: Maps | None = None,
    ) -> None:
        program = homes_only(plan.program) if slots is None else plan.program
        self.plan, self.weights = plan, VirtualWeights(plan, parameters, slots or {})
        tables = _at_home(program) if slots is None else slots
        self._step: VirtualStep | None = None
        float64 = next(iter(parameters.values())).dtype == torch.float64
        self.lockstep = Lockstep(
            Graphs(program, float64=float64, ways=partial(ways_on, plan, device=torch.device("cpu"))),
            plan.stage_size,
            plan.groups_in_stage,
            self._weight,
            states=states or {},
            recompute=recompute,
            routes=routes,
            training=training,
            data_ranks=[plan.data_rank(rank) for rank in range(plan.stage_size)],
            watch=watch,
            tables=tables,
        )

    def step(
        self,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        *,
        loads: Loads | None = None,
        microbatches: int = 1,
        extra_inputs: InputsByRole | None = None,
    ) -> VirtualStep:
        """A step of every rank, which runs when its `run` is called. The arguments are those of `StageValues`."""
        stage_values = StageValues(
            self.lockstep, inputs, targets, loads=loads, microbatches=microbatches, extra_inputs=extra_inputs
        )
        self._step = VirtualStep(self.plan.program, self.weights, stage_values, microbatches)
        return self._step

    def _weight(self, name: str) -> Sequence[Tensor]:
        assert self._step is not None
        self._step.enter(self.weights.unit_of[name])
        return self.weights.weight(name)


def _at_home(program: Program) -> Maps:
    """The slots of layers without guests."""
    bodies = ((layer.number, program.body(layer).tables) for layer in program.layers)
    return {number: first_tables(tables)[0] for number, tables in bodies if tables}
