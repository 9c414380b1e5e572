"""Compares a plan on the virtual cluster with the unsharded model in one dtype: outputs, gradients and one SGD step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch
from torch import Tensor

from moec.codegen.plan import Plan
from moec.grammar.spec import Spec
from moec.passes.ir import TRAINING, Role, local_slices
from moec.passes.ir.interface import layer_calls
from moec.runtime.backends import plain_torch
from moec.runtime.host.reference import reference_program
from moec.runtime.verify.blame import first_difference
from moec.runtime.verify.cluster.lockstep import Watch
from moec.runtime.verify.cluster.recorded import BackwardError, PerRank, StepError
from moec.runtime.verify.cluster.stage_values import StageValues
from moec.runtime.verify.cluster.virtual import VirtualCluster
from moec.runtime.verify.distances import largest, relative_error
from moec.runtime.verify.guest_maps import Maps
from moec.runtime.verify.inputs import GlobalBatch, global_batch, microbatches_of
from moec.runtime.verify.memory import recomputes
from moec.runtime.verify.unsharded import Outcome, Unsharded, outcome, result_name, states_of, unsharded
from moec.runtime.verify.verify_report import BOUND, BOUND_FLOAT32, Difference, Kind, LargestDifference, Report

FLOAT32_NOISE = 64 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
"""A gradient that is zero consists of rounding only and has no scale. Its difference may be this part of the difference
between float32 and float64. A wrong plan's difference is 1e8 times as large."""

LEARNING_RATE = 0.1


@dataclass(slots=True)
class _Errors:
    """The largest error of each kind, and the tensor that has it."""

    scales: Mapping[str, float]
    noise: Callable[[], Mapping[str, float]] = dict
    """Returns the change that rounding alone may make in each parameter's gradient. Called only if a gradient's error
    is above the bound."""
    largest: dict[str, LargestDifference] = field(default_factory=dict)
    wrong: dict[str, float] = field(default_factory=dict)
    """The largest error of each parameter's gradient that is above the bound."""

    def add(
        self,
        kind: Kind,
        name: str,
        actual: object,
        expected: Tensor,
        reference: Tensor,
        *,
        rank: int | None,
        parameter: str = "",
    ) -> None:
        error = relative_error(actual, expected, reference, self.scales[kind])
        if parameter and error > BOUND and isinstance(actual, Tensor) and actual.shape == expected.shape:
            error = 0.0 if largest(actual - expected) <= self.noise().get(parameter, -1.0) else error
        if parameter and error > BOUND:
            self.wrong[parameter] = max(error, self.wrong.get(parameter, 0.0))
        if kind not in self.largest or not error <= self.largest[kind].error:
            self.largest[kind] = LargestDifference(kind=kind, value=name, rank=rank, error=error)

    def maximum(self, *kinds: Kind) -> float:
        return max((self.largest[kind].error for kind in kinds if kind in self.largest), default=0.0)

    @property
    def worst(self) -> LargestDifference:
        return max(self.largest.values(), key=lambda difference: difference.error)


def has_modes(plan: Plan) -> bool:
    """Whether training and evaluation differ, in the plan or in the model that it shards."""
    return TRAINING.name in {**plan.program.settings, **reference_program(plan.spec).settings}


def compare(
    plan: Plan, model: Unsharded, dtype: torch.dtype, seed: int, *, blame: bool = True, watch: Watch | None = None
) -> Report:
    """Compares in training, and in evaluation too where the two modes differ. Reports the larger errors.

    `blame` looks for the first wrong op of a wrong plan. `watch` is called for every layer.
    """
    report = _compare_with(plan, model, dtype, seed, blame, watch)
    if not has_modes(plan) or not report.ok:
        return report
    model.zero_grad()
    evaluation = _compare_with(plan, model.eval(), dtype, seed, blame, watch)
    return larger_errors(report, replace(evaluation, largest=replace(evaluation.largest, in_evaluation=True)))


def larger_errors(first: Report, second: Report) -> Report:
    """A report with the larger errors of two comparisons, of which the first found no difference."""
    if not second.ok:
        return second
    return replace(
        first,
        max_output_error=max(first.max_output_error, second.max_output_error),
        max_gradient_error=max(first.max_gradient_error, second.max_gradient_error),
        largest=max(first.largest, second.largest, key=lambda difference: difference.error),
    )


def compare_with_guests(plan: Plan, model: Unsharded, seed: int, *, slots: Maps, watch: Watch | None = None) -> Report:
    """Compares in training, in float64, with the guests of `slots`."""
    report = _compare_with(plan, model, torch.float64, seed, False, watch, slots)
    if report.ok:
        return report
    worst = report.largest
    layer = next((f"layers.{n}" for n in slots if worst.value.startswith(f"layers.{n}.")), "forward")
    is_gradient = worst.kind == "gradient"
    difference = Difference(layer=layer, op="assign_slots", value=worst.value, error=worst.error, gradient=is_gradient)
    return replace(report, first_difference=difference)


def _compare_with(
    plan: Plan,
    model: Unsharded,
    dtype: torch.dtype,
    seed: int,
    blame: bool,
    watch: Watch | None,
    slots: Maps | None = None,
) -> Report:
    parameters, states = dict(model.named_parameters()), states_of(model)
    recompute = recomputes(plan)
    cluster = VirtualCluster(
        plan, parameters, states, recompute=recompute, training=model.training, watch=watch, slots=slots
    )
    batch = global_batch(plan, seed, microbatches_of(plan)).to(dtype)
    try:
        errors = _measure(plan, model, cluster, batch)
    except StepError as failure:
        stopped = LargestDifference(kind="stopped", value=f"the forward pass: {failure}", rank=None, error=math.inf)
        errors = _Errors({}, largest={"output": stopped, "gradient": stopped})
    output_error = errors.maximum("output", "loss", "aux_loss", "counts", "routes", "states")
    gradient_error = errors.maximum("gradient", "parameter")
    ok = max(output_error, gradient_error) <= (BOUND if dtype == torch.float64 else BOUND_FLOAT32)
    worst = errors.worst
    first = None
    if blame and not ok and dtype == torch.float64:
        # If every value is right, the graph returns the wrong one.
        is_gradient = worst.kind == "gradient"
        output = Difference(layer="forward", op="output", value=worst.value, error=worst.error, gradient=is_gradient)
        first = first_difference(plan, model, global_batch(plan, seed))
        first = first or _wrong_recomputation(plan, model, seed, errors.wrong) or output
    return Report(
        ok=ok,
        world_size=plan.world_size,
        scaled=False,
        max_output_error=output_error,
        max_gradient_error=gradient_error,
        first_difference=first,
        largest=worst,
        subject="model" if plan.spec.has_model else "layer",
    )


def _wrong_recomputation(plan: Plan, model: Unsharded, seed: int, wrong: Mapping[str, float]) -> Difference | None:
    """The first layer, in the order of backward, with a `wrong` gradient that is right if the layer keeps its values.

    None if gradients are wrong without `recompute = layer` too.
    """
    calls = {call.layer: call for call in layer_calls(plan.program)}
    recomputed = {n: call for n, call in calls.items() if plan.program.block(call.block).recompute == "layer"}
    candidates = [(n, name) for n in recomputed for name in wrong if name.startswith(f"layers.{n}.")]
    if not candidates:
        return None
    blocks = (replace(b, recompute="none") if b.recompute == "layer" else b for b in plan.program.blocks)
    keeping = replace(plan, program=replace(plan.program, blocks=tuple(blocks)))
    cluster = VirtualCluster(keeping, dict(model.named_parameters()), states_of(model), training=model.training)
    model.zero_grad()
    batch = global_batch(plan, seed, microbatches_of(plan)).to(torch.float64)
    if _measure(keeping, model, cluster, batch).maximum("gradient") > BOUND:
        return None
    number = max(n for n, _ in candidates)
    name = max((name for n, name in candidates if n == number), key=lambda name: wrong[name])
    span = recomputed[number].span
    return Difference(
        layer=f"layers.{number}",
        op="recompute",
        value="@" + name.removeprefix(f"layers.{number}."),
        span=str(span) if span else None,
        error=wrong[name],
        gradient=True,
    )


def _measure(plan: Plan, model: Unsharded, cluster: VirtualCluster, batch: GlobalBatch) -> _Errors:
    with plain_torch():
        expected = outcome(model, batch)
        expected.differentiated.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == sum(p.requires_grad for p in model.parameters())
    step = cluster.step(
        batch.rank_inputs,
        batch.rank_targets,
        loads=batch.loads,
        microbatches=batch.microbatches,
        extra_inputs=batch.rank_extra_inputs,
    )
    stopped: BackwardError | None = None
    try:
        step.run()
    except BackwardError as failure:
        stopped = failure
    scales = {
        "output": largest(expected.result),
        **{name: largest(scalar) for name, scalar in expected.scalars.items()},
        "counts": 0.0,
        "routes": 0.0,
        "states": 0.0,
        "gradient": max(largest(g) for g in gradients.values()),
        "parameter": max(largest(p) for p in model.parameters()),
    }
    is_float64 = expected.result.dtype == torch.float64
    noise = cache(partial(gradient_noise, plan.spec, model, batch, FLOAT32_NOISE)) if is_float64 else dict
    errors = _Errors(scales, noise)
    _add_results(errors, plan, step.stage_values, expected, batch.microbatches)
    _add_routes(errors, plan, step.stage_values.routes, expected.routes, batch.microbatches)
    if stopped is not None:
        errors.largest["gradient"] = LargestDifference(kind="stopped", value=str(stopped), rank=None, error=math.inf)
        return errors
    _add_gradient_of_x(errors, batch)
    _add_gradients(errors, cluster, model, gradients, step.gradients)
    return errors


COUNT_NAMES: Mapping[Role, str] = {
    "counts": "the rows per expert",
    "head_counts": "the choices of each group of heads",
    "made": "the choices before a capacity drops any",
}
"""The names of `COUNTS` in messages."""


def _add_results(errors: _Errors, plan: Plan, stage_values: StageValues, expected: Outcome, microbatches: int) -> None:
    """Compares logits or y, scalars, expert counts and new states. A plan may have lost the graph of one of them."""
    reference, layout, dense = expected.result.detach(), plan.result_layout, plan.meshes["dense"]
    pieces, results, counts = reference.chunk(microbatches), stage_values.result, stage_values.counts
    for rank in range(plan.stage_size):
        index = local_slices(pieces[0].shape, layout, dense, rank)
        part = torch.cat([piece[index] for piece in pieces])
        errors.add("output", result_name(plan.spec), results[rank].detach(), part, reference, rank=rank)
    for name, scalar in expected.scalars.items():
        for rank, actual in enumerate(stage_values.scalars.get(name, [None] * plan.stage_size)):
            kind: Kind = "loss" if name == "loss" else "aux_loss"
            errors.add(kind, f"the {name}", actual, scalar.detach(), scalar, rank=rank)
    for role, layers in expected.counts.items():
        for layer, total in layers.items():
            actual = _total(counts[role].get(layer, []))
            errors.add("counts", f"{COUNT_NAMES[role]} of layers.{layer}", actual, total, total, rank=None)
    for name, state in expected.states.items():
        for rank, actual in enumerate(stage_values.new_states.get(name, [None] * plan.stage_size)):
            errors.add("states", name, actual, state, state, rank=rank)


def _add_routes(
    errors: _Errors, plan: Plan, routes: PerRank | None, expected: Tensor | None, microbatches: int
) -> None:
    """Compares the routes of a model that gives them."""
    if expected is None:
        return
    for rank in range(plan.stage_size):
        parts = [part.chunk(plan.data_size)[plan.data_rank(rank)] for part in expected.chunk(microbatches)]
        actual = None if routes is None else routes[rank]
        errors.add("routes", "the routes", actual, torch.cat(parts), expected, rank=rank)


def _add_gradient_of_x(errors: _Errors, batch: GlobalBatch) -> None:
    """Compares the gradient of a layer's x on each rank; does nothing for a model."""
    reference = batch.inputs.grad
    if reference is None:
        return
    for rank, (x, rows) in enumerate(zip(batch.rank_inputs, batch.rank_rows, strict=True)):
        actual = torch.zeros_like(x) if x.grad is None else x.grad
        errors.add("gradient", "x", actual, reference[rows], reference, rank=rank, parameter="x")


def _add_gradients(
    errors: _Errors,
    cluster: VirtualCluster,
    model: Unsharded,
    gradients: Mapping[str, Tensor],
    summed: Mapping[str, Sequence[Tensor]],
) -> None:
    """Compares each parameter's gradient, and the parameter after one step of SGD, on each rank."""
    plan, parameters = cluster.plan, dict(model.named_parameters())
    for name in sorted(gradients.keys() ^ summed.keys()):  # the plan freezes what the Spec does not, or the reverse
        errors.largest["gradient"] = LargestDifference(kind="gradient", value=name, rank=None, error=math.inf)
    for name, rank_gradients in summed.items():
        if name not in gradients:
            continue
        data, gradient = plan.parameters[name], gradients[name]
        stepped = parameters[name].detach() - LEARNING_RATE * gradient
        compared = set()
        for rank, actual in enumerate(rank_gradients):
            index = data.cells(plan.meshes[data.mesh], rank)
            master = cluster.weights.masters[name][rank]
            # Ranks that share a leaf and a gradient are compared once.
            if (id(master), id(actual)) in compared:
                continue
            compared.add((id(master), id(actual)))
            errors.add("gradient", name, actual, gradient[index], gradient, rank=rank, parameter=name)
            stepped_master = master.detach() - LEARNING_RATE * actual
            errors.add("parameter", name, stepped_master, stepped[index], stepped, rank=rank)


def _total(counts: Sequence[object]) -> object:
    """Rows per expert over all ranks; None if a rank's value is no list of counts."""
    rows = [value for value in counts if isinstance(value, Tensor) and value.dim() == 2 and len(value) == 1]
    if not counts or len(rows) != len(counts) or len({row.shape for row in rows}) != 1:
        return None
    return torch.cat(rows).sum(0)


def gradient_noise(spec: Spec, model: Unsharded, batch: GlobalBatch, factor: float) -> dict[str, float]:
    """`factor` times the largest difference that float32 makes in each gradient of `model`, which is in float64."""
    float32_model = unsharded(spec, dtype=torch.float32, microbatches=batch.microbatches).train(model.training)
    float32_batch = batch.to(torch.float32)
    with torch.no_grad():
        for name, p in float32_model.named_parameters():
            p.copy_(model.get_parameter(name))
        for name, state in states_of(float32_model).items():
            state.copy_(states_of(model)[name])
    with plain_torch():
        outcome(float32_model, float32_batch).differentiated.backward()  # type: ignore[no-untyped-call]
    trained = ((name, p) for name, p in float32_model.named_parameters() if p.requires_grad)
    pairs = {name: (p.grad, model.get_parameter(name).grad) for name, p in trained}
    if batch.inputs.requires_grad:
        pairs["x"] = float32_batch.inputs.grad, batch.inputs.grad
    noise = {}
    for name, (rounded, exact) in pairs.items():
        assert rounded is not None
        assert exact is not None
        noise[name] = factor * float((rounded.double() - exact).abs().max())
    return noise
