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
            name: self._leaves(name, whole) for name, whole in parameters.items()
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

    def _leaves(self, name: str, whole: Tensor) -> list[Tensor]:
        """Each rank's part of a parameter, in the memory of `whole`.

        Ranks that sum the gradient over the same list of the first group of `sum_over`, and hold the same part, share
        a leaf: autograd adds their gradients. Each rank has its own leaf in bf16, where autograd would round each sum,
        and in a wrong plan in which a rank is in several lists.
        """
        data = self.plan.parameters[name]
        mesh, lists = self.plan.meshes[data.mesh], self.plan.groups[data.sum_over[0]] if data.sum_over else ()
        listed = [rank for ranks in lists for rank in ranks]
        shares = torch.finfo(whole.dtype).bits >= 32 and len(set(listed)) == len(listed)
        owner = {rank: ranks[0] for ranks in lists for rank in ranks} if shares else {}
        leaves: dict[object, Tensor] = {}
        parts = []
        for rank in range(self.plan.world_size):
            index = local_slices(data.shape, data.layout, mesh, rank)
            key = (owner.get(rank, rank), *((cut.start, cut.stop) for cut in index))
            if key not in leaves:
                leaves[key] = whole.detach()[index].requires_grad_()
            parts.append(leaves[key])
        return parts

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
        of_leaf = {id(p): _widened(torch.zeros_like(p) if p.grad is None else p.grad) for p in parts}
        gradients = [of_leaf[id(p)] for p in parts]
        shared = len(of_leaf) < len(parts)
        for number, group in enumerate(self.plan.parameters[name].sum_over):
            for ranks in self.plan.groups[group]:
                terms = [gradients[rank] for rank in ranks]
                if shared and number == 0:  # a shared leaf has the sum of its ranks' gradients already
                    terms = list({id(parts[rank]): gradients[rank] for rank in ranks}.values())
                total = torch.stack(terms).sum(0)
                for rank in ranks:
                    gradients[rank] = total
        return gradients


def _widened(gradient: Tensor) -> Tensor:
    """The gradient in at least fp32, as a job widens it before it sums over ranks."""
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))
