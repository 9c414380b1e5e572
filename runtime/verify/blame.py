"""Which op of a wrong plan is the first to depart from the reference, forward or backward."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moec.codegen.emit import info_of
from moec.codegen.plan import Plan
from moec.passes.ir.ops import Call, Conversion
from moec.runtime.backends import plain_torch
from moec.runtime.host.reference import reference_program
from moec.runtime.verify.cluster.lockstep import Lockstep
from moec.runtime.verify.cluster.passes import Passes
from moec.runtime.verify.cluster.prepared_graphs import Graphs
from moec.runtime.verify.cluster.recorded import BackwardError, RecordedNode, StepError
from moec.runtime.verify.cluster.uses import ReferenceValue, Uses
from moec.runtime.verify.cluster.virtual import VirtualCluster
from moec.runtime.verify.cluster.virtual_step import VirtualStep
from moec.runtime.verify.distances import relative_error
from moec.runtime.verify.inputs import Inputs
from moec.runtime.verify.judge import Judge
from moec.runtime.verify.reference_loss import loss_in_parts
from moec.runtime.verify.reference_rows import WeightedRows, mixtures_of
from moec.runtime.verify.unsharded import Unsharded, states_of
from moec.runtime.verify.verify_report import BOUND, Difference


def first_difference(plan: Plan, model: Unsharded, inputs: Inputs) -> Difference | None:
    """Runs plan and reference step by step and compares every value that both have; then their gradients, backwards.

    `inputs` are one micro-batch, because values are compared with those of a single forward pass.
    Costs as much memory as every intermediate value of every rank.
    """
    inputs = inputs.to(torch.float64)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    whole, whole_loss, leaves = _run_reference(plan, model, parameters, inputs)
    cluster = VirtualCluster(plan, parameters, states_of(model), training=model.training)
    cluster.lockstep.record()
    run = cluster.step(inputs.rank_given, inputs.rank_targets, loads=inputs.loads, beside=inputs.rank_beside)
    failure = _failure_of(run)
    expected = _Expected(plan, whole.lockstep)
    steps = cluster.lockstep.steps or []
    judge, references = Judge(plan, expected.values, expected.mixtures), _references(steps)
    found = _first_wrong_value(steps, references, judge)
    if found is None and isinstance(failure, StepError):
        found = _difference(RecordedNode(failure.path, failure.node, []), steps, math.inf, gradient=False)
    found = found or _first_wrong_loss(whole, run.passes, steps)
    if found is not None:
        return found
    with plain_torch():
        whole_loss.backward()  # type: ignore[no-untyped-call]
    expected.differentiate()
    uses = Uses(whole.lockstep, cluster.lockstep, _references(whole.lockstep.steps or ()))
    for step, reference_value, part in expected.in_parts.parts(steps) if expected.in_parts is not None else ():
        uses.set_expected_part(step, reference_value, part)
    found = _first_wrong_gradient(steps, references, uses, judge)
    if found is None and failure is not None:
        found = _difference(_where_backward_stopped(steps), steps, math.inf, gradient=True)
    return found or _parameter_difference(plan, leaves, run.gradients, steps)


class _Expected:
    """The reference's value for each value of a plan: `values`, by their names in the lowered Program.

    They include values that only plans have: weighted rows, and the parts of a loss over a sharded vocabulary.
    """

    def __init__(self, plan: Plan, whole: Lockstep) -> None:
        computed = {(s.path, s.value.name): s.values[0] for s in whole.steps or () if s.value is not None}
        self._weighted = WeightedRows(plan.program, mixtures_of(reference_program(plan.spec)), computed)
        self.mixtures = self._weighted.mixtures
        self.in_parts = loss_in_parts(plan.program, computed)
        of_parts = self.in_parts.values if self.in_parts is not None else {}
        self.values = {**computed, **self._weighted.values, **of_parts}

    def differentiate(self) -> None:
        """Sets the gradients of the values that only plans have, once the others have theirs."""
        self._weighted.differentiate()
        if self.in_parts is not None:
            self.in_parts.differentiate()


def _run_reference(
    plan: Plan, model: Unsharded, parameters: Mapping[str, Tensor], inputs: Inputs
) -> tuple[Passes, Tensor, dict[str, list[Tensor]]]:
    """The recorded run of the unsharded model over the global batch, its loss, and the leaves of its parameters."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    leaves = {name: [p.clone().requires_grad_(name in trained)] for name, p in parameters.items()}
    graphs = Graphs(reference_program(plan.spec), float64=True)
    whole = Lockstep(graphs, 1, {}, leaves.__getitem__, states=states_of(model), training=model.training)
    whole.record()
    loads = {layer: rows.sum(0, keepdim=True) for layer, rows in inputs.loads.items()}
    with plain_torch():
        passes = Passes(whole, [inputs.given], [inputs.targets], loads=loads, beside=inputs.beside_alone)
        (loss,) = passes.only_loss()
        passes.update_states(0)
    return passes, loss, leaves


def _first_wrong_value(
    steps: Sequence[RecordedNode], references: Mapping[tuple[str, str], ReferenceValue], judge: Judge
) -> Difference | None:
    for step in steps:
        error = judge.error(step, references.get((step.path, step.key)))
        if error > BOUND:
            return _difference(step, steps, error, gradient=False)
    return None


def _first_wrong_loss(whole: Passes, plan: Passes, steps: Sequence[RecordedNode]) -> Difference | None:
    """A wrong term of the loss, whose values are all right: its graph returns another one, or is missing."""
    for name, (expected,) in whole.losses.items():
        losses = plan.losses.get(name)
        if losses is None:
            return Difference(layer=name, op="graph", value=name, span=None, error=math.inf, gradient=False)
        error = max(relative_error(loss, expected, expected, 0.0) for loss in losses)
        if error > BOUND:
            last = next(step for step in reversed(steps) if step.path == f"{name}.")
            return _difference(last, steps, error, gradient=False)
    return None


def _first_wrong_gradient(
    steps: Sequence[RecordedNode], references: Mapping[tuple[str, str], ReferenceValue], uses: Uses, judge: Judge
) -> Difference | None:
    """The op at fault for the first wrong gradient of a value, in the order of backward."""
    branches = _branches(steps)
    for step in reversed(steps):
        key = (step.path, step.key)
        reference_value, wanted = references.get(key), None
        if key in branches and reference_value is not None:
            wanted = uses.expected(step, reference_value)
            if wanted is None:
                continue
        error = judge.gradient_error(step, reference_value, wanted)
        if error > BOUND:
            # The value's gradient is wrong, but those of its consumers' results are right: a consumer is at fault.
            assert reference_value is not None
            consumer = _at_fault(step, reference_value, uses, judge) or step
            return _difference(consumer, steps, error, gradient=True, value=step.value.name if step.value else None)
    return None


def _at_fault(step: RecordedNode, reference_value: ReferenceValue, uses: Uses, judge: Judge) -> RecordedNode | None:
    """The consumer whose part of a wrong gradient has the largest error; if no known part is wrong, an unknown one."""
    consumers = uses.contributing(step, reference_value)
    errors: list[tuple[float, RecordedNode]] = []
    for consumer in consumers:
        wanted = uses.expected_of(consumer, step, reference_value)
        if wanted is not None:
            got = uses.part(consumer, step) or [torch.zeros_like(value) for value in step.values]
            errors.append((judge.gradient_error(step, reference_value, wanted, got), consumer))
    error, worst = max(errors, key=lambda pair: pair[0], default=(0.0, None))
    if error > BOUND:
        return worst
    known = [consumer for _, consumer in errors]
    return next((c for c in consumers if all(c is not other for other in known)), next(iter(consumers), None))


def _where_backward_stopped(steps: Sequence[RecordedNode]) -> RecordedNode:
    """The op at which backward failed: backward runs in reverse, so it is the first op that has a gradient."""
    return next((step for step in steps if any(map(_has_gradient, step.values))), steps[-1])


def _has_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and not value.is_leaf and value.grad is not None


def _failure_of(step: VirtualStep) -> StepError | BackwardError | None:
    try:
        step.run()
    except (StepError, BackwardError) as failure:
        return failure
    return None


def _difference(
    step: RecordedNode, steps: Sequence[RecordedNode], error: float, *, gradient: bool, value: str | None = None
) -> Difference:
    op, what = step.op, step.node.op
    given = step.op.results[0] if step.op is not None and step.value is None else step.value  # what it is on the way to
    if op is None and what == "placeholder":  # an input takes the line of the call
        op = next((s.op for s in steps if isinstance(s.op, Call) and f"layers.{s.op.layer}." == step.path), None)
    return Difference(
        layer=step.path.rstrip(".") or "forward",
        op=step.op.mnemonic if step.op is not None else what,
        value=value or (given.name if given is not None else step.key),
        span=str(op.span) if op is not None and op.span else None,
        error=error,
        gradient=gradient,
    )


def _references(steps: Sequence[RecordedNode]) -> Mapping[tuple[str, str], ReferenceValue]:
    """What each recorded node is in the lowered Program: a collective gives its operand, laid out otherwise.

    Parameters have no reference_value: their gradients are compared when they are summed (`_parameter_difference`).
    """
    references: dict[tuple[str, str], ReferenceValue] = {}
    for step in steps:
        if isinstance(step.op, Conversion):
            moved = references.get((step.path, step.used[0]))
            if moved:
                references[step.path, step.key] = moved
        elif step.value is not None and info_of(step.node).parameter is None:
            references[step.path, step.key] = (step.path, step.value.name)
    return references


def _branches(steps: Sequence[RecordedNode]) -> set[tuple[str, str]]:
    """The conversions beside which others use the same value: the reference has the gradient of all uses only."""
    users: Counter[tuple[str, str]] = Counter()
    for step in steps:
        named = step.op.named(step.op.operands) if step.op is not None else {}
        constants = {operand for name, operand in named.items() if step.op is not None and name in step.op.constants}
        users.update((step.path, key) for key in set(step.used) - constants)
    found: set[tuple[str, str]] = set()
    for step in steps:
        if isinstance(step.op, Conversion):
            source = (step.path, step.used[0])
            if users[source] > 1 or source in found:
                found.add((step.path, step.key))
    return found


def _parameter_difference(
    plan: Plan,
    leaves: Mapping[str, Sequence[Tensor]],
    summed: Mapping[str, Sequence[Tensor]],
    steps: Sequence[RecordedNode],
) -> Difference | None:
    """Every value and its gradient agree, so a parameter's own gradient is summed wrongly: the op that uses it."""
    gradients = {name: leaf.grad for name, (leaf,) in leaves.items()}
    for step in steps:
        parameter = info_of(step.node).parameter
        name = f"{step.path}{parameter}"
        if parameter is None or name not in summed:
            continue
        data, whole = plan.parameters[name], gradients[name]
        if whole is None:
            continue
        for rank, got in enumerate(summed[name]):
            index = data.cells(plan.meshes[data.mesh], rank)
            error = relative_error(got, whole[index], whole, 0.0)
            if error > BOUND:
                user = next(s for s in steps if s.path == step.path and step.key in s.used)
                found = _difference(user, steps, error, gradient=True)
                return replace(found, value=step.key)
    return None
