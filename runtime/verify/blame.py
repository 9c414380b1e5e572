"""Finds the first op of a wrong plan that departs from the reference, forward or backward."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moec.codegen.emit import info_of
from moec.codegen.plan import Plan
from moec.passes.ir.ops import Call, Conversion
from moec.runtime.backends import plain_torch
from moec.runtime.host.reference import reference_program
from moec.runtime.verify.cluster.lockstep import Lockstep
from moec.runtime.verify.cluster.prepared_graphs import Graphs
from moec.runtime.verify.cluster.recorded import BackwardError, RecordedNode, StepError
from moec.runtime.verify.cluster.stage_values import StageValues
from moec.runtime.verify.cluster.uses import NodeKey, ReferenceValue, Uses
from moec.runtime.verify.cluster.virtual import VirtualCluster
from moec.runtime.verify.distances import relative_error
from moec.runtime.verify.inputs import GlobalBatch
from moec.runtime.verify.judge import Judge
from moec.runtime.verify.reference_loss import sharded_loss
from moec.runtime.verify.reference_rows import WeightedRows, mixtures_of
from moec.runtime.verify.unsharded import Unsharded, states_of
from moec.runtime.verify.verify_report import BOUND, Difference


def first_difference(plan: Plan, model: Unsharded, batch: GlobalBatch) -> Difference | None:
    """Runs plan and reference step by step and compares every value that both have; then their gradients, backwards.

    `batch` is one micro-batch, because values are compared with those of a single forward pass.
    Costs as much memory as every intermediate value of every rank.
    """
    batch = batch.to(torch.float64)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    reference, reference_loss, leaves = _run_reference(plan, model, parameters, batch)
    cluster = VirtualCluster(plan, parameters, states_of(model), training=model.training)
    cluster.lockstep.record()
    step = cluster.step(batch.rank_inputs, batch.rank_targets, loads=batch.loads, extra_inputs=batch.rank_extra_inputs)
    failure: StepError | BackwardError | None = None
    try:
        step.run()
    except (StepError, BackwardError) as error:
        failure = error
    expected = _Expected(plan, reference.lockstep)
    nodes = cluster.lockstep.nodes or []
    judge, references = Judge(plan, expected.values, expected.mixtures), _references(nodes)
    difference = _first_wrong_value(nodes, references, judge)
    if difference is None and isinstance(failure, StepError):
        difference = _difference(RecordedNode(failure.path, failure.node, []), nodes, math.inf, gradient=False)
    difference = difference or _first_wrong_loss(reference, step.stage_values, nodes)
    if difference is not None:
        return difference
    with plain_torch():
        reference_loss.backward()  # type: ignore[no-untyped-call]
    expected.differentiate()
    uses = Uses(reference.lockstep, cluster.lockstep, _references(reference.lockstep.nodes or ()))
    for node, reference_value, part in expected.sharded_loss.parts(nodes) if expected.sharded_loss is not None else ():
        uses.set_expected_part(node, reference_value, part)
    difference = _first_wrong_gradient(nodes, references, uses, judge)
    if difference is None and failure is not None:
        difference = _difference(_where_backward_stopped(nodes), nodes, math.inf, gradient=True)
    return difference or _parameter_difference(plan, leaves, step.gradients, nodes)


class _Expected:
    """The reference's value for each value of a plan: `values`, by their names in the lowered Program.

    They include values that only plans have: weighted rows, and the parts of a loss over a sharded vocabulary.
    """

    def __init__(self, plan: Plan, reference: Lockstep) -> None:
        computed = {(n.path, n.value.name): n.values[0] for n in reference.nodes or () if n.value is not None}
        self._weighted = WeightedRows(plan.program, mixtures_of(reference_program(plan.spec)), computed)
        self.mixtures = self._weighted.mixtures
        self.sharded_loss = sharded_loss(plan.program, computed)
        self.values = {**computed, **self._weighted.values}
        if self.sharded_loss is not None:
            self.values |= self.sharded_loss.values

    def differentiate(self) -> None:
        """Sets the gradients of the values that only plans have, once the others have theirs."""
        self._weighted.differentiate()
        if self.sharded_loss is not None:
            self.sharded_loss.differentiate()


def _run_reference(
    plan: Plan, model: Unsharded, parameters: Mapping[str, Tensor], batch: GlobalBatch
) -> tuple[StageValues, Tensor, dict[str, list[Tensor]]]:
    """The recorded run of the unsharded model over the global batch, its loss, and the leaves of its parameters."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    leaves = {name: [p.clone().requires_grad_(name in trained)] for name, p in parameters.items()}
    graphs = Graphs(reference_program(plan.spec), float64=True)
    lockstep = Lockstep(graphs, 1, {}, leaves.__getitem__, states=states_of(model), training=model.training)
    lockstep.record()
    loads = {layer: rows.sum(0, keepdim=True) for layer, rows in batch.loads.items()}
    with plain_torch():
        extra_inputs = batch.extra_inputs_of_one_rank
        stage_values = StageValues(lockstep, [batch.inputs], [batch.targets], loads=loads, extra_inputs=extra_inputs)
        (loss,) = stage_values.only_loss()
        stage_values.update_states(0)
    return stage_values, loss, leaves


def _first_wrong_value(
    nodes: Sequence[RecordedNode], references: Mapping[NodeKey, ReferenceValue], judge: Judge
) -> Difference | None:
    for node in nodes:
        error = judge.error(node, references.get((node.path, node.key)))
        if error > BOUND:
            return _difference(node, nodes, error, gradient=False)
    return None


def _first_wrong_loss(reference: StageValues, plan: StageValues, nodes: Sequence[RecordedNode]) -> Difference | None:
    """A wrong term of the loss, whose values are all right: its graph returns another value, or is missing."""
    for name, (expected,) in reference.losses.items():
        losses = plan.losses.get(name)
        if losses is None:
            return Difference(layer=name, op="graph", value=name, error=math.inf)
        error = max(relative_error(loss, expected, expected, 0.0) for loss in losses)
        if error > BOUND:
            last = next(node for node in reversed(nodes) if node.path == f"{name}.")
            return _difference(last, nodes, error, gradient=False)
    return None


def _first_wrong_gradient(
    nodes: Sequence[RecordedNode], references: Mapping[NodeKey, ReferenceValue], uses: Uses, judge: Judge
) -> Difference | None:
    """The op at fault for the first wrong gradient of a value, in the order of backward."""
    branches = _branches(nodes)
    for node in reversed(nodes):
        key = (node.path, node.key)
        reference_value, expected = references.get(key), None
        if key in branches and reference_value is not None:
            expected = uses.expected(node, reference_value)
            if expected is None:
                continue
        error = judge.error(node, reference_value, gradient=True, expected=expected)
        if error > BOUND:
            # The value's gradient is wrong, but those of its consumers' results are right: a consumer is at fault.
            assert reference_value is not None
            consumer = _consumer_at_fault(node, reference_value, uses, judge) or node
            return _difference(consumer, nodes, error, gradient=True, value=node.value.name if node.value else None)
    return None


def _consumer_at_fault(
    node: RecordedNode, reference_value: ReferenceValue, uses: Uses, judge: Judge
) -> RecordedNode | None:
    """The consumer whose part of a wrong gradient has the largest error; if no known part is wrong, an unknown one."""
    consumers = uses.contributing(node, reference_value)
    errors: list[tuple[float, RecordedNode]] = []
    for consumer in consumers:
        expected = uses.expected_of(consumer, node, reference_value)
        if expected is not None:
            actual = uses.part(consumer, node) or [torch.zeros_like(value) for value in node.values]
            error = judge.error(node, reference_value, gradient=True, expected=expected, actual=actual)
            errors.append((error, consumer))
    error, worst = max(errors, key=lambda pair: pair[0], default=(0.0, None))
    if error > BOUND:
        return worst
    compared = {id(consumer) for _, consumer in errors}
    return next((c for c in consumers if id(c) not in compared), next(iter(consumers), None))


def _where_backward_stopped(nodes: Sequence[RecordedNode]) -> RecordedNode:
    """The op at which backward failed: backward runs in reverse, so it is the first op that has a gradient."""
    return next((node for node in nodes if any(map(_has_gradient, node.values))), nodes[-1])


def _has_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and not value.is_leaf and value.grad is not None


def _difference(
    node: RecordedNode, nodes: Sequence[RecordedNode], error: float, *, gradient: bool, value: str | None = None
) -> Difference:
    op, fx_op = node.op, node.fx_node.op
    # A node without a value computes a part of its op's first result.
    result = op.results[0] if op is not None and node.value is None else node.value
    mnemonic = op.mnemonic if op is not None else fx_op
    if op is None and fx_op == "placeholder":  # an input takes the line of the call
        op = next((n.op for n in nodes if isinstance(n.op, Call) and f"layers.{n.op.layer}." == node.path), None)
    return Difference(
        layer=node.path.rstrip(".") or "forward",
        op=mnemonic,
        value=value or (result.name if result is not None else node.key),
        span=str(op.span) if op is not None and op.span else None,
        error=error,
        gradient=gradient,
    )


def _references(nodes: Sequence[RecordedNode]) -> Mapping[NodeKey, ReferenceValue]:
    """The lowered Program's value of each recorded node. A collective has that of its operand, in another layout.

    Parameters have no reference value: their gradients are compared when they are summed (`_parameter_difference`).
    """
    references: dict[NodeKey, ReferenceValue] = {}
    for node in nodes:
        if isinstance(node.op, Conversion):
            operand = references.get((node.path, node.used[0]))
            if operand:
                references[node.path, node.key] = operand
        elif node.value is not None and info_of(node.fx_node).parameter is None:
            references[node.path, node.key] = (node.path, node.value.name)
    return references


def _branches(nodes: Sequence[RecordedNode]) -> set[NodeKey]:
    """The conversions whose operand has other uses too: the reference only has the gradient of all uses together."""
    users: Counter[NodeKey] = Counter()
    for node in nodes:
        named = node.op.named(node.op.operands) if node.op is not None else {}
        constants = {operand for name, operand in named.items() if node.op is not None and name in node.op.constants}
        users.update((node.path, key) for key in set(node.used) - constants)
    branches: set[NodeKey] = set()
    for node in nodes:
        if isinstance(node.op, Conversion):
            source = (node.path, node.used[0])
            if users[source] > 1 or source in branches:
                branches.add((node.path, node.key))
    return branches


def _parameter_difference(
    plan: Plan,
    leaves: Mapping[str, Sequence[Tensor]],
    summed: Mapping[str, Sequence[Tensor]],
    nodes: Sequence[RecordedNode],
) -> Difference | None:
    """The op that uses the first parameter with a wrong gradient. All values and their gradients are right, so the
    parameter's own gradient is summed wrongly."""
    for node in nodes:
        parameter = info_of(node.fx_node).parameter
        name = f"{node.path}{parameter}"
        if parameter is None or name not in summed or (reference := leaves[name][0].grad) is None:
            continue
        data = plan.parameters[name]
        for rank, actual in enumerate(summed[name]):
            index = data.cells(plan.meshes[data.mesh], rank)
            error = relative_error(actual, reference[index], reference, 0.0)
            if error > BOUND:
                user = next(n for n in nodes if n.path == node.path and node.key in n.used)
                return _difference(user, nodes, error, gradient=True, value=node.key)
    return None
