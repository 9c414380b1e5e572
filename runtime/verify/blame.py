"""Which op of a wrong plan is the first to depart from the reference, forward or backward."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moec.codegen.emit import facts_of
from moec.codegen.plan import Plan
from moec.passes.ir import REPLICATED, Layout, Partial, Shard, local_slices
from moec.passes.ir.mesh import EXPERT_AXES
from moec.passes.ir.mixture_values import MixtureValues
from moec.passes.ir.ops import AllGather, Call, Collective, CopyTo
from moec.runtime.backends import plain_torch
from moec.runtime.job.reference import reference_program
from moec.runtime.verify.inputs import Inputs
from moec.runtime.verify.lockstep import BackwardError, Lockstep, PerRank, Step, StepError
from moec.runtime.verify.reference_rows import differentiate, mixtures_of, weighted_rows
from moec.runtime.verify.routes import layouts_of_choices
from moec.runtime.verify.unsharded import Unsharded
from moec.runtime.verify.uses import Origin, Uses
from moec.runtime.verify.verification import BOUND, Difference, relative_error
from moec.runtime.verify.virtual import VirtualCluster

PARTIAL_GRADIENTS = (AllGather, CopyTo)
"""What gives ops that are sharded on an axis a value that is whole on it: each rank's gradient is a term there."""

Groups = Sequence[Sequence[int]]


def first_difference(plan: Plan, model: Unsharded, inputs: Inputs) -> Difference | None:
    """Runs plan and reference step by step and compares every value that both have; then their gradients, backwards.

    Costs as much memory as every intermediate value of every rank.
    """
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    inputs = inputs.to(torch.float64)
    program = reference_program(plan.spec)
    leaves = {name: [p.clone().requires_grad_()] for name, p in parameters.items()}
    whole = Lockstep(program, 1, {}, leaves, float64=True, training=model.training)
    with plain_torch():
        _, whole_loss = whole.run([inputs.given], [inputs.targets], record=True)
    cluster = VirtualCluster(plan, parameters, training=model.training)
    losses, failure = _run(cluster, inputs)
    computed = {(s.path, s.value.name): s.values[0] for s in whole.steps or () if s.value is not None}
    mixtures = mixtures_of(program)
    weighted = weighted_rows(mixtures, computed)
    expected = {**computed, **weighted}
    steps = cluster.lockstep.steps or []
    judge = _Judge(plan, expected, mixtures)
    origins = _origins(steps)
    for step in steps:
        error = judge.error(step, origins.get((step.path, step.key)))
        if error > BOUND:
            return _difference(step, steps, error, gradient=False)
    if failure is not None:
        return _difference(Step(failure.path, failure.node, []), steps, math.inf, gradient=False)
    for name, (expected_loss,) in whole.losses.items():
        found = cluster.lockstep.losses.get(name)
        if found is None:
            return Difference(layer=name, op="graph", value=name, span=None, error=math.inf, gradient=False)
        error = max(relative_error(loss, expected_loss, expected_loss, 0.0) for loss in found)
        if error > BOUND:  # every value is right, but the graph returns the wrong one
            last = next(step for step in reversed(steps) if step.path == f"{name}.")
            return _difference(last, steps, error, gradient=False)
    with plain_torch():
        whole_loss[0].backward()
    differentiate(mixtures, weighted, computed)
    stopped = False
    try:
        cluster.backward(losses)
    except BackwardError:
        stopped = True
    branches, uses = _branches(steps), Uses(whole, cluster.lockstep, _origins(whole.steps or ()))
    for step in reversed(steps):
        key = (step.path, step.key)
        origin, wanted = origins.get(key), None
        if key in branches and origin is not None:
            wanted = uses.expected(step, origin)
            if wanted is None:
                continue
        error = judge.gradient_error(step, origin, wanted)
        if error > BOUND:
            # The value's gradient is wrong, but those of its consumers' results are right: a consumer is at fault.
            assert origin is not None
            consumer = _at_fault(step, origin, uses, judge) or step
            return _difference(consumer, steps, error, gradient=True, value=step.value.name if step.value else None)
    if stopped:
        return _difference(_where_backward_stopped(steps), steps, math.inf, gradient=True)
    return _parameter_difference(plan, model, cluster, steps)


def _at_fault(step: Step, origin: Origin, uses: Uses, judge: _Judge) -> Step | None:
    """The consumer whose part of a wrong gradient has the largest error; if no known part is wrong, an unknown one."""
    consumers = uses.contributing(step, origin)
    errors: list[tuple[float, Step]] = []
    for consumer in consumers:
        wanted = uses.expected_of(consumer, step, origin)
        if wanted is not None:
            got = uses.part(consumer, step) or [torch.zeros_like(value) for value in step.values]
            errors.append((judge.gradient_error(step, origin, wanted, got), consumer))
    error, worst = max(errors, key=lambda pair: pair[0], default=(0.0, None))
    if error > BOUND:
        return worst
    known = [consumer for _, consumer in errors]
    return next((c for c in consumers if all(c is not other for other in known)), next(iter(consumers), None))


def _where_backward_stopped(steps: Sequence[Step]) -> Step:
    """The op at which backward failed: backward runs in reverse, so it is the first op that has a gradient."""
    return next((step for step in steps if any(map(_has_gradient, step.values))), steps[-1])


def _has_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and not value.is_leaf and value.grad is not None


def _run(cluster: VirtualCluster, inputs: Inputs) -> tuple[PerRank, StepError | None]:
    try:
        _, losses = cluster.lockstep.run(inputs.rank_given, inputs.rank_targets, record=True)
    except StepError as failure:
        return [], failure
    return losses, None


def _difference(
    step: Step, steps: Sequence[Step], error: float, *, gradient: bool, value: str | None = None
) -> Difference:
    op, what = step.op, step.node.op
    given = step.op.results[0] if step.op is not None and step.value is None else step.value  # what it is on the way to
    if op is None and what == "placeholder":  # what it is given, the call of its module says
        op = next((s.op for s in steps if isinstance(s.op, Call) and f"layers.{s.op.layer}." == step.path), None)
    return Difference(
        layer=step.path.rstrip(".") or "forward",
        op=step.op.mnemonic if step.op is not None else what,
        value=value or (given.name if given is not None else step.key),
        span=str(op.span) if op is not None and op.span else None,
        error=error,
        gradient=gradient,
    )


def _origins(steps: Sequence[Step]) -> Mapping[tuple[str, str], Origin]:
    """What each recorded node is in the lowered Program: a collective gives its operand, laid out otherwise.

    Parameters have no origin: their gradients are compared when they are summed (`_parameter_difference`).
    """
    origins: dict[tuple[str, str], Origin] = {}
    for step in steps:
        if isinstance(step.op, Collective):
            moved = origins.get((step.path, step.used[0]))
            if moved:
                origins[step.path, step.key] = moved
        elif step.value is not None and facts_of(step.node).parameter is None:
            origins[step.path, step.key] = (step.path, step.value.name)
    return origins


def _branches(steps: Sequence[Step]) -> set[tuple[str, str]]:
    """The conversions beside which others use the same value: the reference has the gradient of all uses only."""
    users: Counter[tuple[str, str]] = Counter()
    for step in steps:
        named = step.op.named(step.op.operands) if step.op is not None else {}
        constants = {operand for name, operand in named.items() if step.op is not None and name in step.op.constants}
        users.update((step.path, key) for key in set(step.used) - constants)
    found: set[tuple[str, str]] = set()
    for step in steps:
        if isinstance(step.op, Collective):
            source = (step.path, step.used[0])
            if users[source] > 1 or source in found:
                found.add((step.path, step.key))
    return found


class _Judge:
    """Compares each rank's tensor with its part of the reference's value."""

    def __init__(self, plan: Plan, expected: Mapping[Origin, Tensor], mixtures: Mapping[str, MixtureValues]) -> None:
        self.plan = plan
        self.expected = expected
        self.mixtures = mixtures
        self.routed = layouts_of_choices(plan)

    def error(self, step: Step, origin: Origin | None) -> float:
        """The largest error of a value over ranks; 0 for one that the reference lacks or that cannot be compared."""
        if origin is None or origin not in self.expected:
            return 0.0
        whole = self.expected[origin]
        if not _are_tensors(whole, *step.values):
            return (
                math.inf if step.value is not None else 0.0
            )  # several results at once are taken apart by the nodes after
        return self._error(step, origin, whole, step.values, gradient=False)

    def gradient_error(
        self, step: Step, origin: Origin | None, wanted: Tensor | None = None, got: Sequence[Tensor] | None = None
    ) -> float:
        """The largest error of a value's gradient, or of the part of it that `wanted` and `got` give."""
        if origin is None or origin not in self.expected:
            return 0.0
        whole = self.expected[origin]
        if not _are_tensors(whole, *step.values):
            return math.inf if step.value is not None else 0.0
        if any(value.grad is None for value in (whole, *step.values)):
            return 0.0
        assert whole.grad is not None
        whole = whole.grad if wanted is None else wanted
        gradients = [value.grad for value in step.values] if got is None else got
        return self._error(step, origin, whole, gradients, gradient=True)

    def _error(self, step: Step, origin: Origin, whole: Tensor, got: Sequence[Tensor], *, gradient: bool) -> float:
        layout = _layout_of(step)
        if whole.dtype == torch.int64:
            return 0.0  # counts and positions are a rank's own; where they are wrong, what they lead to is
        if step.value is not None and step.value.ragged is not None:
            return self._ragged(origin, layout, got, whole)
        if not set(EXPERT_AXES).isdisjoint(layout.axes):
            return self._padded(origin, layout, got, whole, gradient=gradient)
        if any(isinstance(p, Shard) and p.dim >= whole.dim() for _, p in layout.placements):
            return math.inf  # a conversion of something else
        for groups, reduce in self._partial(step, layout, gradient=gradient):
            got = _reduced(got, groups, reduce)
        mesh = self.plan.meshes["dense"]
        parts = (whole[local_slices(whole.shape, layout, mesh, rank)] for rank in range(mesh.ranks))
        return max(relative_error(g.double(), p.double(), whole, 0.0) for g, p in zip(got, parts, strict=True))

    def _partial(self, step: Step, layout: Layout, *, gradient: bool) -> list[tuple[Groups, str]]:
        """The groups over which ranks hold terms of the value, and how these reduce.

        Of its gradient, where ops sharded on the axis consume it; every term of a partial sum has the sum's.
        """
        if not gradient:
            mesh = self.plan.meshes["dense"]
            partial = [(axis, p.reduce) for axis, p in layout.placements if isinstance(p, Partial)]
            return [(mesh.groups(axis), reduce) for axis, reduce in partial if axis in mesh.wide_axes()]
        if not isinstance(step.op, PARTIAL_GRADIENTS) or isinstance(layout.get(step.op.axis), Shard):
            # Over an axis on which the value lies in shards nothing of it is a term: such a plan is wrong there.
            return []
        groups = [arg for arg in step.node.args if isinstance(arg, str)]
        return [(self.plan.groups[group], "sum") for group in groups]

    def _ragged(self, origin: Origin, layout: Layout, got: Sequence[Tensor], whole: Tensor) -> float:
        """Rows sorted by expert, in the reference over all tokens, on a rank over its own or over its experts.

        Where each choice of a token went in the reference, `positions` says; a rank's rows are those of its tokens in
        the same order.
        """
        path = origin[0]
        experts, positions = self._choices(path)
        if whole.dim() not in (1, 2) or len(whole) != int((positions >= 0).sum()):
            return math.inf  # a conversion of something else
        own = [
            torch.stack([whole_ids[self._tokens_of(path, rank)].flatten() for whole_ids in (experts, positions)])
            for rank in range(self.plan.world_size)
        ]
        count = self.mixtures[path].num_experts
        worst = 0.0
        for rank, rows in enumerate(got):
            sources, held = self._held(origin, layout, rank, count)
            pieces = []
            for source in sources:
                chosen, where = own[source]
                mine = (chosen >= held.start) & (chosen < held.stop) & (where >= 0)
                pieces.append(where[mine][chosen[mine].argsort(stable=True)])
            worst = max(worst, relative_error(rows, whole[torch.cat(pieces)], whole, 0.0))
        return worst

    def _padded(self, origin: Origin, layout: Layout, got: Sequence[Tensor], whole: Tensor, *, gradient: bool) -> float:
        """Rows in the places of their experts: source by source, each in the order of its tokens, then empty places.

        What lies in these, zeros and what experts with biases make of them, is never combined: its gradient is zero.
        """
        path = origin[0]
        experts, positions = self._choices(path)
        if whole.dim() not in (2, 3):
            return math.inf  # a conversion of something else
        reference, worst = whole.flatten(0, 1), 0.0
        for rank, rows in enumerate(got):
            sources, held = self._held(origin, layout, rank, len(whole))
            if rows.dim() != whole.dim() or len(rows) != len(held) or rows.shape[1] % len(sources):
                return math.inf
            expected, each = torch.zeros_like(rows) if gradient else rows.clone(), rows.shape[1] // len(sources)
            for index, source in enumerate(sources):
                chosen, where = (ids[self._tokens_of(path, source)].flatten() for ids in (experts, positions))
                for expert in held:
                    mine = where[(chosen == expert) & (where >= 0)]
                    start = index * each
                    if len(mine) > each:
                        return math.inf
                    expected[expert - held.start, start : start + len(mine)] = reference[mine]
            worst = max(worst, relative_error(rows, expected, whole, 0.0))
        return worst

    def _choices(self, path: str) -> tuple[Tensor, Tensor]:
        """The experts that the reference's tokens chose, and the rows of these choices."""
        names = self.mixtures[path]
        return self.expected[path, names.choices], self.expected[path, names.positions]

    def _tokens_of(self, path: str, rank: int) -> tuple[slice, ...]:
        """Which of the global batch's tokens `rank` routes."""
        shape = self._choices(path)[0].shape[:2]
        return local_slices(shape, self.routed.get(path, REPLICATED), self.plan.meshes["dense"], rank)

    def _held(self, origin: Origin, layout: Layout, rank: int, count: int) -> tuple[Sequence[int], range]:
        """The ranks that `rank`'s rows come from, and the experts that they go to."""
        if layout.get("ep") != Shard(0):
            return [rank], range(count)
        mesh = self.plan.expert_meshes[_layer(origin)]
        group = next(ranks for ranks in mesh.groups("ep") if rank in ranks)
        each, position = count // len(group), mesh.coordinate(rank, "ep")
        return group, range(position * each, (position + 1) * each)


def _layout_of(step: Step) -> Layout:
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


def _layer(origin: Origin) -> int:
    """The number in `layers.3.`: only layers have ragged values."""
    return int(origin[0].split(".")[1])


def _parameter_difference(
    plan: Plan, model: Unsharded, cluster: VirtualCluster, steps: Sequence[Step]
) -> Difference | None:
    """Every value and its gradient agree, so a parameter's own gradient is summed wrongly: the op that uses it."""
    gradients = {name: p.grad for name, p in model.named_parameters()}
    summed = cluster.gradients()
    for step in steps:
        parameter = facts_of(step.node).parameter
        name = f"{step.path}{parameter}"
        if parameter is None or name not in summed:
            continue
        data, whole = plan.parameters[name], gradients[name]
        assert whole is not None
        for rank, got in enumerate(summed[name]):
            index = local_slices(data.shape, data.layout, plan.meshes[data.mesh], rank)
            error = relative_error(got, whole[index], whole, 0.0)
            if error > BOUND:
                user = next(s for s in steps if s.path == step.path and step.key in s.used)
                found = _difference(user, steps, error, gradient=True)
                return replace(found, value=step.key)
    return None
