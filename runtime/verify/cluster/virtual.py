"""The virtual cluster: every rank of a plan in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from moec.codegen.plan import Plan, PlanParameter
from moec.passes.ir import Layout, local_slices
from moec.passes.place.between_steps import conversions_between
from moec.runtime.backends.triton.triton_tiles import ways_on
from moec.runtime.verify.cluster.lockstep import Lockstep, Watch
from moec.runtime.verify.cluster.prepared_graphs import Graphs
from moec.runtime.verify.cluster.recorded import FAILURES, BackwardError, PerRank
from moec.runtime.verify.cluster.routes import Routes
from moec.runtime.verify.cluster.shuffles import forward_shuffle


class VirtualCluster:
    """All ranks of `plan`, each with its part of `parameters` (full name → whole tensor), and with whole `states`.

    A rank starts with its parts of the masters. Weights are gathered from them, and gradients end in their layout, by
    the conversions between the declared layouts (`between_steps`).
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
    ) -> None:
        self.plan = plan
        self.masters: dict[str, list[Tensor]] = {name: self._masters(name, whole) for name, whole in parameters.items()}
        self.parameters: dict[str, list[Tensor]] = {
            name: self._leaves(name, whole) for name, whole in parameters.items()
        }
        float64 = next(iter(parameters.values())).dtype == torch.float64
        self.lockstep = Lockstep(
            Graphs(plan.program, float64=float64, ways=partial(ways_on, plan, device=torch.device("cpu"))),
            plan.world_size,
            plan.groups,
            self.parameters,
            states=states or {},
            recompute=recompute,
            routes=routes,
            training=training,
            data_ranks=[plan.data_rank(rank) for rank in range(plan.world_size)],
            watch=watch,
        )

    def _masters(self, name: str, whole: Tensor) -> list[Tensor]:
        """Each rank's part of a parameter's master, in the memory of `whole`; equal parts are one tensor."""
        data, parts = self.plan.parameters[name], dict[object, Tensor]()
        mesh, found = self.plan.meshes[data.mesh], []
        for rank in range(self.plan.world_size):
            index = local_slices(data.shape, data.master, mesh, rank)
            key = tuple((cut.start, cut.stop) for cut in index)
            if key not in parts:
                parts[key] = whole.detach()[index]
            found.append(parts[key])
        return found

    def _leaves(self, name: str, whole: Tensor) -> list[Tensor]:
        """Each rank's weight: a part of `whole` in its memory, or gathered from the masters.

        Ranks that sum the gradient over the same list of the first group of `sum_over`, and hold the same part, share
        a leaf: autograd adds their gradients. Each rank has its own leaf in bf16, where autograd would round each sum,
        and in a wrong plan in which a rank is in several lists.
        """
        data = self.plan.parameters[name]
        mesh, lists = self.plan.meshes[data.mesh], self.plan.groups[data.sum_over[0]] if data.sum_over else ()
        listed = [rank for ranks in lists for rank in ranks]
        shares = torch.finfo(whole.dtype).bits >= 32 and len(set(listed)) == len(listed)
        owner = {rank: ranks[0] for ranks in lists for rank in ranks} if shares else {}
        gathered = self._converted(data, self.masters[name], data.master, data.layout)
        leaves: dict[object, Tensor] = {}
        parts = []
        for rank in range(self.plan.world_size):
            index = local_slices(data.shape, data.layout, mesh, rank)
            key = (owner.get(rank, rank), *((cut.start, cut.stop) for cut in index))
            if key not in leaves:
                weight = whole.detach()[index] if data.master == data.layout else gathered[rank]
                leaves[key] = weight.requires_grad_(not data.frozen)
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
        """Each trained parameter's gradient on every rank, after the sums over the plan's groups, in at least fp32.

        It has the master's layout. Raises `BackwardError` if a wrong plan's gradient does not divide.
        """
        try:
            trained = {name: parts for name, parts in self.parameters.items() if not self.plan.parameters[name].frozen}
            return {name: self._summed(name, parts) for name, parts in trained.items()}
        except FAILURES as error:
            raise BackwardError(f"the gradients' way to the optimizer, which stopped: {error}") from error

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
        return self._converted(self.plan.parameters[name], gradients, self.plan.parameters[name].layout)

    def _converted(
        self, data: PlanParameter, parts: Sequence[Tensor], layout: Layout, wanted: Layout | None = None
    ) -> list[Tensor]:
        """Every rank's part of a parameter or a gradient, taken from `layout` to `wanted`, by default the master's.

        A sum and the slice after it are what a reduce_scatter gives.
        """
        parts = list(parts)
        for conversion in conversions_between(layout, data.master if wanted is None else wanted):
            shuffle = forward_shuffle(conversion)
            for ranks in self.plan.meshes[data.mesh].groups(conversion.axis):
                for rank, part in zip(ranks, shuffle(conversion, [parts[rank] for rank in ranks]), strict=True):
                    parts[rank] = part
        return parts


def _widened(gradient: Tensor) -> Tensor:
    """The gradient in at least fp32, as a job widens it before it sums over ranks."""
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))
