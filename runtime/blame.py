"""Which op of a wrong plan is the first to depart from the reference, forward or backward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moec.codegen.operators import CONVERSIONS, GETITEM
from moec.codegen.plan import Plan
from moec.passes.ir import Layout, Partial, Shard
from moec.runtime.lockstep import LOSS, Lockstep, PerRank, Step, StepError
from moec.runtime.module import PlanModule
from moec.runtime.reference import reference_stage
from moec.runtime.shards import local_slices
from moec.runtime.verify import BOUND, Difference, Inputs, relative_error
from moec.runtime.virtual import VirtualCluster

Origin = tuple[str, str]
"""A value of the lowered Program: the path of the module, and the value's name there."""


def first_difference(plan: Plan, model: PlanModule, inputs: Inputs) -> Difference | None:
    """Runs plan and reference step by step and compares every value that both have; then their gradients, backwards.

    Costs as much memory as every intermediate value of every rank.
    """
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    stage, _ = reference_stage(plan.spec)
    leaves = {name: [p.clone().requires_grad_()] for name, p in parameters.items()}
    whole = Lockstep(stage, 1, {}, leaves, float64=True)
    _, whole_loss = whole.run([inputs.tokens], [inputs.labels], record=True)
    cluster = VirtualCluster(plan, parameters)
    losses, failure = _run(cluster, inputs)
    expected = {(s.path, s.node.value or ""): s.values[0] for s in whole.steps or () if s.node.value}
    judge = _Judge(plan, expected)
    steps = cluster.lockstep.steps or []
    origins = _origins(steps)
    for step in steps:
        error = judge.error(step, origins.get((step.path, step.node.name)), gradient=False)
        if error > BOUND:
            return _difference(step, steps, error, gradient=False)
    if failure is not None:
        return _difference(Step(failure.path, failure.node, []), steps, math.inf, gradient=False)
    error = max(relative_error(loss, whole_loss[0], whole_loss[0], 0.0) for loss in losses)
    if error > BOUND:  # every value is right, and the wrong one was given
        return _difference(steps[-1], steps, error, gradient=False)
    whole_loss[0].backward()
    cluster.backward(losses)
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        error = judge.error(step, origins.get((step.path, step.node.name)), gradient=True)
        if error > BOUND:
            # The value's gradient is wrong, its consumers' results have right ones: the consumer is at fault.
            users = (s for s in steps[index + 1 :] if s.path == step.path and step.node.name in s.node.refs())
            return _difference(next(users, step), steps, error, gradient=True, value=step.node.value)
    return _parameter_difference(plan, model, cluster, steps)


def _run(cluster: VirtualCluster, inputs: Inputs) -> tuple[PerRank, StepError | None]:
    try:
        _, losses = cluster.lockstep.run(inputs.rank_tokens, inputs.rank_labels, record=True)
    except StepError as failure:
        return [], failure
    return losses, None


def _difference(
    step: Step, steps: Sequence[Step], error: float, *, gradient: bool, value: str | None = None
) -> Difference:
    op = step.node.target
    if op == GETITEM:  # one result of what?
        op = next(s.node.target for s in steps if s.path == step.path and s.node.name == step.node.refs()[0])
    return Difference(
        layer=step.path.rstrip(".") or "forward",
        op=op,
        value=value or step.node.value or step.node.name,
        span=step.node.span,
        error=error,
        gradient=gradient,
    )


def _origins(steps: Sequence[Step]) -> Mapping[tuple[str, str], Origin]:
    """What each recorded node is in the lowered Program: a collective gives its operand, lying otherwise."""
    origins: dict[tuple[str, str], Origin] = {}
    for step in steps:
        node = step.node
        if node.target in CONVERSIONS:
            moved = origins.get((step.path, node.refs()[0]))
            if moved:
                origins[step.path, node.name] = moved
        elif node.value:
            origins[step.path, node.name] = (step.path, node.value)
    return origins


class _Judge:
    """Compares what ranks hold with the part of the reference's value that they should."""

    def __init__(self, plan: Plan, expected: Mapping[Origin, Tensor]) -> None:
        self.plan = plan
        self.expected = expected

    def error(self, step: Step, origin: Origin | None, *, gradient: bool) -> float:
        """The largest error over ranks; 0 for what the reference does not have or cannot be compared."""
        if origin is None or origin not in self.expected:
            return 0.0
        whole = self.expected[origin]
        layout = Layout.parse(step.node.layout or "replicate")
        got = step.values
        if not all(isinstance(value, Tensor) for value in (whole, *got)):
            return math.inf if step.node.value else 0.0  # several results at once are taken apart by the nodes after
        if gradient:
            if whole.grad is None or whole.is_leaf or any(v.is_leaf or v.grad is None for v in got):
                return 0.0
            whole, got = whole.grad, [v.grad for v in got]
        if whole.dtype == torch.int64:
            return 0.0  # counts and positions are a rank's own; where they are wrong, what they lead to is
        if step.node.ragged is not None:
            return self._ragged(origin, layout, got, whole)
        if any(isinstance(p, Partial) for _, p in layout.placements):
            return self._partial(layout, got, whole, gradient=gradient)
        mesh = self.plan.meshes["dense"]
        parts = (whole[local_slices(whole.shape, layout, mesh, rank)] for rank in range(mesh.ranks))
        return max(relative_error(g.double(), p.double(), whole, 0.0) for g, p in zip(got, parts, strict=True))

    def _partial(self, layout: Layout, got: Sequence[Tensor], whole: Tensor, *, gradient: bool) -> float:
        if gradient:  # every rank's term has the gradient of the sum
            return max(relative_error(g, whole, whole, 0.0) for g in got)
        totals = list(got)
        for axis, placement in layout.placements:
            if isinstance(placement, Partial):
                for ranks in self.plan.meshes["dense"].groups(axis):
                    total = torch.stack([totals[r] for r in ranks]).sum(0)
                    for rank in ranks:
                        totals[rank] = total
        return max(relative_error(t, whole, whole, 0.0) for t in totals)

    def _ragged(self, origin: Origin, layout: Layout, got: Sequence[Tensor], whole: Tensor) -> float:
        """Rows sorted by expert, in the reference over all tokens, on a rank over its own or over its experts."""
        experts = self.expected[origin[0].removesuffix("moe.experts."), "e"]
        count = self._num_experts(origin)
        shares = experts.chunk(self.plan.data_size)
        per_share = torch.stack([torch.bincount(share.flatten(), minlength=count) for share in shares])
        starts = per_share.sum(0).cumsum(0) - per_share.sum(0) + per_share.cumsum(0) - per_share
        worst = 0.0
        for rank, rows in enumerate(got):
            sources, held = self._held(origin, layout, rank, count)
            pieces = [
                whole[starts[source, expert] : starts[source, expert] + per_share[source, expert]]
                for source in sources
                for expert in held
            ]
            worst = max(worst, relative_error(rows, torch.cat(pieces), whole, 0.0))
        return worst

    def _num_experts(self, origin: Origin) -> int:
        path = origin[0].removesuffix("moe.experts.")
        return self.expected[path, "p"].shape[-1]

    def _held(self, origin: Origin, layout: Layout, rank: int, count: int) -> tuple[Sequence[int], range]:
        """The data shares that `rank`'s rows come from, and the experts that they go to."""
        if layout.get("ep") != Shard(0):
            return [self.plan.data_rank(rank)], range(count)
        mesh = self.plan.expert_meshes[_layer(origin)]
        group = next(ranks for ranks in mesh.groups("ep") if rank in ranks)
        each, position = count // len(group), mesh.coordinate(rank, "ep")
        return [self.plan.data_rank(r) for r in group], range(position * each, (position + 1) * each)


def _layer(origin: Origin) -> int:
    """The number in `layers.3.moe.experts.`: only layers have ragged values."""
    return int(origin[0].split(".")[1])


def _parameter_difference(
    plan: Plan, model: PlanModule, cluster: VirtualCluster, steps: Sequence[Step]
) -> Difference | None:
    """Every value and its gradient agree, so a parameter's own gradient is summed wrongly: the op that uses it."""
    gradients = {name: p.grad for name, p in model.named_parameters()}
    summed = cluster.gradients()
    for step in steps:
        name = step.path.removeprefix(LOSS) + step.node.target
        if step.node.op != "get_attr" or name not in summed:
            continue
        data, whole = plan.parameters[name], gradients[name]
        assert whole is not None
        for rank, got in enumerate(summed[name]):
            index = local_slices(data.shape, Layout.parse(data.layout), plan.meshes[data.mesh], rank)
            error = relative_error(got, whole[index], whole, 0.0)
            if error > BOUND:
                user = next(s for s in steps if s.path == step.path and step.node.name in s.node.refs())
                found = _difference(user, steps, error, gradient=True)
                return replace(found, value=f"@{step.node.target}")
    return None
