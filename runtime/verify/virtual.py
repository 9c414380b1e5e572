"""The virtual cluster: every rank of a plan in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moec.codegen.plan import Plan
from moec.passes.ir import local_slices
from moec.runtime.verify.lockstep import FAILURES, BackwardError, Lockstep, PerRank
from moec.runtime.verify.prepared_graphs import Graphs
from moec.runtime.verify.routes import Routes


class VirtualCluster:
    """All ranks of `plan`, each with its part of `parameters` (full name → whole tensor), and with whole `states`."""

    def __init__(
        self,
        plan: Plan,
        parameters: Mapping[str, Tensor],
        states: Mapping[str, Tensor] | None = None,
        *,
        recompute: bool = False,
        routes: Routes | None = None,
        training: bool = True,
    ) -> None:
        self.plan = plan
        self.parameters: dict[str, list[Tensor]] = {
            name: [self._part(name, whole, rank) for rank in range(plan.world_size)]
            for name, whole in parameters.items()
        }
        float64 = next(iter(parameters.values())).dtype == torch.float64
        self.lockstep = Lockstep(
            Graphs(plan.program, float64=float64),
            plan.world_size,
            plan.groups,
            self.parameters,
            states=states or {},
            recompute=recompute,
            routes=routes,
            training=training,
            data_ranks=[plan.data_rank(rank) for rank in range(plan.world_size)],
        )

    def _part(self, name: str, whole: Tensor, rank: int) -> Tensor:
        data = self.plan.parameters[name]
        index = local_slices(data.shape, data.layout, self.plan.meshes[data.mesh], rank)
        # A replicated parameter has the same memory on every rank, but each rank has its own leaf.
        return whole.detach()[index].requires_grad_()

    def backward(self, loss: PerRank) -> dict[str, list[Tensor]]:
        """Runs backward on every rank and sums gradients over the plan's groups: parameter → gradient of each rank.

        Raises `BackwardError` if an op's backward fails.
        """
        for parts in self.parameters.values():
            for leaf in parts:
                leaf.grad = None
        # A wrong plan's loss may depend on no parameter.
        live = [value for value in loss if value.requires_grad]
        try:
            torch.autograd.backward(live, [torch.ones_like(value) for value in live])
        except FAILURES as error:
            raise BackwardError(f"the backward pass, which stopped: {error}") from error
        return self.gradients()

    def gradients(self) -> dict[str, list[Tensor]]:
        """Each parameter's gradient on every rank, after the sums over the plan's groups, in at least fp32."""
        return {name: self._summed(name, parts) for name, parts in self.parameters.items()}

    def _summed(self, name: str, parts: Sequence[Tensor]) -> list[Tensor]:
        gradients = [_widened(torch.zeros_like(p) if p.grad is None else p.grad) for p in parts]
        for group in self.plan.parameters[name].sum_over:
            for ranks in self.plan.groups[group]:
                total = torch.stack([gradients[rank] for rank in ranks]).sum(0)
                for rank in ranks:
                    gradients[rank] = total
        return gradients


def _widened(gradient: Tensor) -> Tensor:
    """The gradient in at least fp32, as a job widens it before it sums over ranks."""
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))
