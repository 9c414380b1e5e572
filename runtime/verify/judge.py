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

    def error(self, step: RecordedNode, reference_value: ReferenceValue | None) -> float:
        """The largest error of a value over ranks; 0 for one that the reference lacks or that cannot be compared."""
        if reference_value is None or reference_value not in self.expected:
            return 0.0
        whole = self.expected[reference_value]
        if not _are_tensors(whole, *step.values):
            # A node of several results at once has no value of its own: the nodes after it have one each.
            return math.inf if step.value is not None else 0.0
        return self._error(step, reference_value, whole, step.values, gradient=False)

    def gradient_error(
        self,
        step: RecordedNode,
        reference_value: ReferenceValue | None,
        wanted: Tensor | None = None,
        got: Sequence[Tensor] | None = None,
    ) -> float:
        """The largest error of a value's gradient, or of the part of it that `wanted` and `got` give."""
        if reference_value is None or reference_value not in self.expected:
            return 0.0
        whole = self.expected[reference_value]
        if not _are_tensors(whole, *step.values):
            return math.inf if step.value is not None else 0.0
        if any(value.grad is None for value in (whole, *step.values)):
            return 0.0
        assert whole.grad is not None
        whole = whole.grad if wanted is None else wanted
        gradients = [value.grad for value in step.values] if got is None else got
        return self._error(step, reference_value, whole, gradients, gradient=True)

    def _error(
        self,
        step: RecordedNode,
        reference_value: ReferenceValue,
        whole: Tensor,
        got: Sequence[Tensor],
        *,
        gradient: bool,
    ) -> float:
        layout = _layout_of(step)
        if whole.dtype == torch.int64:
            # Counts and positions differ between ranks; a wrong count shows in the values computed from it.
            return 0.0
        for groups, reduce in self._partial(step, layout, gradient=gradient):
            got = _reduced(got, groups, reduce)
        if step.value is not None and step.value.ragged is not None:
            return self._ragged(reference_value, layout, got, whole)
        if not set(EXPERT_AXES).isdisjoint(layout.axes):
            if reference_value[0] not in {path for path, _ in self.mixtures}:
                return 0.0  # slots of soft mixtures, which are no choices: a wrong row shows in the outputs
            return self._padded(reference_value, layout, got, whole, gradient=gradient)
        if any(isinstance(p, Shard) and p.dim >= whole.dim() for _, p in layout.placements):
            return math.inf  # a conversion of something else
        mesh = self.plan.meshes["dense"]
        parts = (whole[local_slices(whole.shape, layout, mesh, rank)] for rank in range(mesh.ranks))
        return max(relative_error(g.double(), p.double(), whole, 0.0) for g, p in zip(got, parts, strict=True))

    def _partial(self, step: RecordedNode, layout: Layout, *, gradient: bool) -> list[tuple[Groups, str]]:
        """The groups over which ranks have terms of a partial value, and how the terms reduce.

        For gradients: the groups of a conversion with `partial_gradient`. Every term of a partial sum has the gradient
        of the sum.
        """
        if not gradient:
            meshes = [self.plan.meshes["dense"], *filter(None, [self._expert_mesh(step.path)])]
            partial = [(axis, p.reduce) for axis, p in layout.placements if isinstance(p, Partial)]
            of_axes = {axis: mesh.groups(axis) for mesh in meshes for axis in mesh.wide_axes()}
            return [(of_axes[axis], reduce) for axis, reduce in partial if axis in of_axes]
        if not isinstance(step.op, Conversion) or not step.op.partial_gradient:
            return []
        if isinstance(layout.get(step.op.axis), Shard):
            # A value that is sharded over the axis has no terms there: such a plan is wrong.
            return []
        groups = [arg for arg in step.node.args if isinstance(arg, str)]
        return [(self.plan.groups_in_stage[group], "sum") for group in groups]

    def _ragged(self, reference_value: ReferenceValue, layout: Layout, got: Sequence[Tensor], whole: Tensor) -> float:
        """The largest error of rows that are sorted by expert.

        The reference has the rows of all tokens, and `positions` gives the row of each choice. A rank has the rows of
        its tokens or of its experts, in the same order.
        """
        if reference_value not in self.mixtures:
            return math.inf  # a conversion of something else
        experts, positions = self._choices(reference_value)
        if whole.dim() not in (1, 2) or len(whole) != int((positions >= 0).sum()):
            return math.inf  # a conversion of something else
        own = [
            torch.stack(
                [whole_ids[self._tokens_of(reference_value, rank)].flatten() for whole_ids in (experts, positions)]
            )
            for rank in range(self.plan.stage_size)
        ]
        count = self.mixtures[reference_value].num_experts
        worst = 0.0
        for rank, rows in enumerate(got):
            sources, experts_here = self._experts_of(reference_value, layout, rank, count)
            pieces = []
            for source in sources:
                chosen, where = own[source]
                mine = (chosen >= experts_here.start) & (chosen < experts_here.stop) & (where >= 0)
                pieces.append(where[mine][chosen[mine].argsort(stable=True)])
            worst = max(worst, relative_error(rows, whole[torch.cat(pieces)], whole, 0.0))
        return worst

    def _padded(
        self, reference_value: ReferenceValue, layout: Layout, got: Sequence[Tensor], whole: Tensor, *, gradient: bool
    ) -> float:
        """The largest error of rows in the places of their experts.

        An expert's places are sorted by source; each source's rows come in the order of its tokens, then its empty
        places. The values of empty places are never combined: they are not compared, and their gradient is zero.
        """
        if whole.dim() not in (2, 3) or reference_value not in self.mixtures:
            return math.inf  # a conversion of something else
        experts, positions = self._choices(reference_value)
        reference, worst = whole.flatten(0, 1), 0.0
        for rank, rows in enumerate(got):
            sources, experts_here = self._experts_of(reference_value, layout, rank, len(whole))
            if rows.dim() != whole.dim() or len(rows) != len(experts_here) or rows.shape[1] % len(sources):
                return math.inf
            expected, each = torch.zeros_like(rows) if gradient else rows.clone(), rows.shape[1] // len(sources)
            for index, source in enumerate(sources):
                chosen, where = (
                    ids[self._tokens_of(reference_value, source)].flatten() for ids in (experts, positions)
                )
                for expert in experts_here:
                    mine = where[(chosen == expert) & (where >= 0)]
                    start = index * each
                    if len(mine) > each:
                        return math.inf
                    expected[expert - experts_here.start, start : start + len(mine)] = reference[mine]
            worst = max(worst, relative_error(rows, expected, whole, 0.0))
        return worst

    def _choices(self, reference_value: ReferenceValue) -> tuple[Tensor, Tensor]:
        """The experts that the reference's tokens chose, and the rows of these choices."""
        path, names = reference_value[0], self.mixtures[reference_value]
        return self.expected[path, names.choices], self.expected[path, names.positions]

    def _tokens_of(self, reference_value: ReferenceValue, rank: int) -> tuple[slice, ...]:
        """Which of the global batch's tokens `rank` routes."""
        shape = self._choices(reference_value)[0].shape[:2]
        return local_slices(shape, self.routed.get(reference_value[0], REPLICATED), self.plan.meshes["dense"], rank)

    def _experts_of(
        self, reference_value: ReferenceValue, layout: Layout, rank: int, count: int
    ) -> tuple[Sequence[int], range]:
        """The ranks that `rank`'s rows come from, in the order of their rows, and the experts that they go to.

        Over an axis that cuts tokens a rank has its own rows, over any other those of all ranks; `ep` varies fastest.
        """
        mesh = self._expert_mesh(reference_value[0])
        if mesh is None:
            return [rank], range(count)
        axes = sorted(mesh.wide_axes(), key=lambda axis: axis == "ep")
        own = [axis for axis in axes if layout.get(axis) == Shard(1)]
        places = {each: [mesh.coordinate(each, axis) for axis in axes] for each in range(mesh.ranks)}
        alike = [r for r in places if all(mesh.coordinate(r, a) == mesh.coordinate(rank, a) for a in own)]
        (experts,) = local_slices(
            (count,), Layout.of({a: Shard(0) for a in axes if layout.get(a) == Shard(0)}), mesh, rank
        )
        return sorted(alike, key=lambda each: places[each]), range(experts.start, experts.stop)

    def _expert_mesh(self, path: str) -> Mesh | None:
        """The mesh of the experts of the layer `layers.3.`; None elsewhere."""
        layer = path.split(".")[1] if path.startswith("layers.") else ""
        return self.plan.expert_meshes.get(int(layer)) if layer.isdecimal() else None


def _layout_of(step: RecordedNode) -> Layout:
    """The layout of the value that a step gives; what lies on the way to one is not compared."""
    return (step.value.layout if step.value is not None else None) or REPLICATED


def _are_tensors(*values: object) -> bool:
    return all(isinstance(value, Tensor) for value in values)


def _reduced(terms: Sequence[Tensor], groups: Groups, reduce: str) -> Sequence[Tensor]:
    totals = list(terms)
    for ranks in groups:
        if len({terms[rank].shape for rank in ranks}) > 1:
            return terms  # no terms of one value, and wrong as they are
        group = torch.stack([terms[rank] for rank in ranks])
        total = group.sum(0) if reduce == "sum" else group.amax(0)
        for rank in ranks:
            totals[rank] = total
    return totals
