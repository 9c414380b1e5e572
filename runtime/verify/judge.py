"""Compares a recorded value of a plan, or its gradient, with the reference's, rank by rank, wherever it lies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moec.codegen.plan import Plan
from moec.passes.ir import REPLICATED, Layout, Partial, Shard, local_slices
from moec.passes.ir.mesh import EXPERT_AXES, Mesh
from moec.passes.ir.mixture_values import MixtureValues
from moec.passes.ir.ops import Conversion
from moec.runtime.verify.cluster.recorded import RecordedNode
from moec.runtime.verify.cluster.routes import layouts_of_choices
from moec.runtime.verify.cluster.uses import ReferenceValue
from moec.runtime.verify.distances import relative_error

Groups = Sequence[Sequence[int]]


class Judge:
    """Compares each rank's tensor with its part of the reference's value."""

    def __init__(
        self, plan: Plan, expected: Mapping[ReferenceValue, Tensor], mixtures: Mapping[ReferenceValue, MixtureValues]
    ) -> None:
        self.plan = plan
        self.expected = expected
        self.mixtures = mixtures
        self.routed = layouts_of_choices(plan)

    def error(
        self,
        node: RecordedNode,
        reference_value: ReferenceValue | None,
        *,
        gradient: bool = False,
        expected: Tensor | None = None,
        actual: Sequence[Tensor] | None = None,
    ) -> float:
        """The largest error of a value over ranks; 0 for one that the reference lacks or that cannot be compared.

        `gradient` compares the value's gradient; with `expected` and `actual`, one consumer's part of it.
        """
        if reference_value is None or reference_value not in self.expected:
            return 0.0
        reference = self.expected[reference_value]
        if not all(isinstance(value, Tensor) for value in (reference, *node.values)):
            # A node of several results at once has no value of its own: the nodes after it have one each.
            return math.inf if node.value is not None else 0.0
        if gradient:
            if reference.grad is None or any(value.grad is None for value in node.values):
                return 0.0
            reference = reference.grad if expected is None else expected
        if actual is None:
            actual = [value.grad for value in node.values] if gradient else node.values
        layout = (node.value.layout if node.value is not None else None) or REPLICATED
        if reference.dtype == torch.int64:
            # Counts and positions differ between ranks; a wrong count shows in the values computed from it.
            return 0.0
        for groups, reduce in self._partial(node, layout, gradient=gradient):
            actual = _reduced(actual, groups, reduce)
        if node.value is not None and node.value.ragged is not None:
            return self._ragged(reference_value, layout, actual, reference)
        if not set(EXPERT_AXES).isdisjoint(layout.axes):
            if reference_value[0] not in {path for path, _ in self.mixtures}:
                return 0.0  # slots of soft mixtures, which are no choices: a wrong row shows in the outputs
            return self._padded(reference_value, layout, actual, reference, gradient=gradient)
        if any(isinstance(p, Shard) and p.dim >= reference.dim() for _, p in layout.placements):
            return math.inf  # a conversion of another value
        mesh = self.plan.meshes["dense"]
        parts = (reference[local_slices(reference.shape, layout, mesh, rank)] for rank in range(mesh.ranks))
        pairs = zip(actual, parts, strict=True)
        return max(relative_error(value.double(), part.double(), reference, 0.0) for value, part in pairs)

    def _partial(self, node: RecordedNode, layout: Layout, *, gradient: bool) -> list[tuple[Groups, str]]:
        """The groups over which ranks have terms of a partial value, and how the terms reduce.

        For gradients: the groups of a conversion with `partial_gradient`. Every term of a partial sum has the gradient
        of the sum.
        """
        if not gradient:
            meshes = [self.plan.meshes["dense"], *filter(None, [self._expert_mesh(node.path)])]
            partial = [(axis, p.reduce) for axis, p in layout.placements if isinstance(p, Partial)]
            groups = {axis: mesh.groups(axis) for mesh in meshes for axis in mesh.wide_axes()}
            return [(groups[axis], reduce) for axis, reduce in partial if axis in groups]
        if not isinstance(node.op, Conversion) or not node.op.partial_gradient:
            return []
        if isinstance(layout.get(node.op.axis), Shard):
            # A value that is sharded over the axis has no terms there: such a plan is wrong.
            return []
        return [(self.plan.groups_in_stage[arg], "sum") for arg in node.fx_node.args if isinstance(arg, str)]

    def _ragged(
        self, reference_value: ReferenceValue, layout: Layout, actual: Sequence[Tensor], reference: Tensor
    ) -> float:
        """The largest error of rows that are sorted by expert.

        The reference has the rows of all tokens, and `positions` gives the row of each choice. A rank has the rows of
        its tokens or of its experts, in the same order.
        """
        if reference_value not in self.mixtures:
            return math.inf  # a conversion of another value
        positions = self.expected[reference_value[0], self.mixtures[reference_value].positions]
        if reference.dim() not in (1, 2) or len(reference) != int((positions >= 0).sum()):
            return math.inf  # a conversion of another value
        choices = self._choices(reference_value)
        num_experts, worst = self.mixtures[reference_value].num_experts, 0.0
        for rank, rows in enumerate(actual):
            sources, local_experts = self._local_experts(reference_value, layout, rank, num_experts)
            row_ids = []
            for source in sources:
                chosen, row_of_choice = choices[source]
                is_local = (chosen >= local_experts.start) & (chosen < local_experts.stop) & (row_of_choice >= 0)
                row_ids.append(row_of_choice[is_local][chosen[is_local].argsort(stable=True)])
            worst = max(worst, relative_error(rows, reference[torch.cat(row_ids)], reference, 0.0))
        return worst

    def _padded(
        self,
        reference_value: ReferenceValue,
        layout: Layout,
        actual: Sequence[Tensor],
        reference: Tensor,
        *,
        gradient: bool,
    ) -> float:
        """The largest error of rows in the places of their experts.

        An expert's places are sorted by source; each source's rows come in the order of its tokens, then its empty
        places. The values of empty places are never combined: they are not compared, and their gradient is zero.
        """
        if reference.dim() not in (2, 3) or reference_value not in self.mixtures:
            return math.inf  # a conversion of another value
        choices = self._choices(reference_value)
        reference_rows, worst = reference.flatten(0, 1), 0.0
        for rank, rows in enumerate(actual):
            sources, local_experts = self._local_experts(reference_value, layout, rank, len(reference))
            fits = rows.dim() == reference.dim() and len(rows) == len(local_experts)
            if not fits or rows.shape[1] % len(sources):
                return math.inf
            expected = torch.zeros_like(rows) if gradient else rows.clone()
            capacity = rows.shape[1] // len(sources)
            for index, source in enumerate(sources):
                chosen, row_of_choice = choices[source]
                for expert in local_experts:
                    row_ids = row_of_choice[(chosen == expert) & (row_of_choice >= 0)]
                    start = index * capacity
                    if len(row_ids) > capacity:
                        return math.inf
                    expected[expert - local_experts.start, start : start + len(row_ids)] = reference_rows[row_ids]
            worst = max(worst, relative_error(rows, expected, reference, 0.0))
        return worst

    def _choices(self, reference_value: ReferenceValue) -> list[tuple[Tensor, Tensor]]:
        """For the tokens that each rank routes, flattened: the experts that they chose, and the rows of these choices.

        Both are the reference's. The row of a dropped choice is negative.
        """
        path, names = reference_value[0], self.mixtures[reference_value]
        experts, positions = self.expected[path, names.choices], self.expected[path, names.positions]
        layout, mesh = self.routed.get(path, REPLICATED), self.plan.meshes["dense"]
        parts = (local_slices(experts.shape[:2], layout, mesh, rank) for rank in range(self.plan.stage_size))
        return [(experts[part].flatten(), positions[part].flatten()) for part in parts]

    def _local_experts(
        self, reference_value: ReferenceValue, layout: Layout, rank: int, num_experts: int
    ) -> tuple[Sequence[int], range]:
        """The ranks whose tokens have rows on `rank`, in the order of these rows, and the experts of the rows.

        Over an axis that shards tokens a rank has its own rows, over any other those of all ranks; `ep` varies fastest.
        """
        mesh = self._expert_mesh(reference_value[0])
        if mesh is None:
            return [rank], range(num_experts)
        axes = sorted(mesh.wide_axes(), key=lambda axis: axis == "ep")
        token_axes = [axis for axis in axes if layout.get(axis) == Shard(1)]
        coordinates = {peer: [mesh.coordinate(peer, axis) for axis in axes] for peer in range(mesh.ranks)}
        sources = [
            peer
            for peer in coordinates
            if all(mesh.coordinate(peer, axis) == mesh.coordinate(rank, axis) for axis in token_axes)
        ]
        expert_layout = Layout.of({axis: Shard(0) for axis in axes if layout.get(axis) == Shard(0)})
        (experts,) = local_slices((num_experts,), expert_layout, mesh, rank)
        return sorted(sources, key=lambda peer: coordinates[peer]), range(experts.start, experts.stop)

    def _expert_mesh(self, path: str) -> Mesh | None:
        """The mesh of the experts of the layer `layers.3.`; None elsewhere."""
        layer = path.split(".")[1] if path.startswith("layers.") else ""
        return self.plan.expert_meshes.get(int(layer)) if layer.isdecimal() else None


def _reduced(terms: Sequence[Tensor], groups: Groups, reduce: str) -> Sequence[Tensor]:
    """Each rank's reduction of the terms of its group; `terms` as they are where shapes differ in a group."""
    totals = list(terms)
    for ranks in groups:
        if len({terms[rank].shape for rank in ranks}) > 1:
            return terms
        group = torch.stack([terms[rank] for rank in ranks])
        total = group.sum(0) if reduce == "sum" else group.amax(0)
        for rank in ranks:
            totals[rank] = total
    return totals
