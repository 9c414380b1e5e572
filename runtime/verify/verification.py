"""Truth: a plan on the virtual cluster against the unsharded model, forward, backward and after one step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from moec.codegen.plan import Plan
from moec.passes.ir import TRAINING, local_shape, local_slices
from moec.runtime.backends import plain_torch, select
from moec.runtime.backends.torch import torch_backend
from moec.runtime.backends.triton import triton_tiles
from moec.runtime.errors import JobError
from moec.runtime.job.reference import reference_program
from moec.runtime.verify.inputs import Inputs, global_batch
from moec.runtime.verify.lockstep import BackwardError, StepError
from moec.runtime.verify.rounding import Rounding, gradient_noise, measure_rounding
from moec.runtime.verify.toy import Width, at_toy_widths
from moec.runtime.verify.unsharded import Unsharded, outcome, result_name, unsharded
from moec.runtime.verify.virtual import VirtualCluster

BOUND = 1e-9
"""Largest error that float64 arithmetic in another order explains; a wrong plan is off by 1e-4 or more."""

BOUND_FLOAT32 = 1e-4
"""The same for the report in float32."""

NOISE = 1e-3
"""A tensor whose largest element is below this part of its kind's largest is measured against the kind: a gradient that
is pure noise has no scale of its own."""

FLOAT32_NOISE = 64 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
"""Part of what float32 changes in the unsharded model's gradient that float64 in another order may change: where the
true gradient is zero, what is left is rounding, and has no scale. A wrong plan's difference is 1e8 times as large."""

DRAWS = 3
"""A plan is refused for its rounding only if it loses too much on each of this many draws of parameters and batch."""

MAX_BYTES = 8 * 1024**3
LEARNING_RATE = 0.1

SMALL = 1 << 20
"""Elements of the largest parameter of a model whose ops are too small to share between threads."""

MANY_LAYERS = 1024
"""Layers times ranks from which activations are computed again rather than kept: 16,000 of them took 8 GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where a plan first departs from the reference."""

    layer: str
    op: str
    value: str
    span: str | None
    error: float
    gradient: bool
    unlike: bool = False
    """Whether it is no number that differs, but the graph from the one that moec compiles the plan's Spec to."""

    def __str__(self) -> str:
        if self.unlike:
            place = f" ({self.span})" if self.span else ""
            return f"{self.layer}: {self.op}{place}: {self.value} is not what moec compiles the Spec in the plan to"
        what = "the gradient of " if self.gradient else ""
        place = f" ({self.span})" if self.span else ""
        return f"{self.layer}: {self.op}{place}: {what}%{self.value} is off by {self.error:.1e}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `moec verify` found.

    Errors are max|Δ| over the largest element of the reference's tensor, the largest over all ranks: of logits, losses
    and experts' loads (`output`; of a layer y, `aux_loss` and loads), of gradients and of parameters after one SGD
    step (`gradient`; of a layer that of x too). `worst` names the tensor with the largest. `rounding` decides too: what
    the plan loses in its own dtype; None where float64 refuses the plan already. `float32` is for information, to a
    looser bound; near-ties may flip a route there. It is left out where fp32 is the plan's own dtype. A plan that was
    too large is `scaled`, its `widths` shrunk to toy ones; then its graphs must also be those that moec compiles, and
    float64 alone decides.
    """

    ok: bool
    world_size: int
    scaled: bool
    max_output_error: float
    max_gradient_error: float
    first_difference: Difference | None
    worst: str
    widths: tuple[Width, ...] = ()
    float32: Report | None = None
    rounding: Rounding | None = None
    subject: str = "model"
    """What the plan's file says: a `model` or a `layer`."""

    def to_json(self) -> dict[str, object]:
        """What `moec verify --json` prints."""
        names = ("ok", "world_size", "scaled", "max_output_error", "max_gradient_error")
        first = asdict(self.first_difference) if self.first_difference else None
        rounding = self.rounding.to_json() if self.rounding else None
        return {name: getattr(self, name) for name in names} | {"first_difference": first, "rounding": rounding}


def verify(plan: Plan, *, seed: int = 0, scale: bool | None = None, float32: bool = True) -> Report:
    """Compares `plan` with the reference of its own Spec in float64, and in the plan's dtype against float64.

    `float32` adds a report for information where that is not the plan's dtype.

    `scale` shrinks its widths to toy ones, by default where the plan is too large for this machine. Raises `JobError`
    for a plan that is too large even so, or as it is where `scale` is False, and where `MOEC_BACKEND` asks for what
    cannot run here.
    """
    select("cpu")  # otherwise every operator would fail, and the plan would be blamed
    if scale is None:
        scale = _bytes_needed(plan) > MAX_BYTES
    if scale:
        return _verify_scaled(plan, seed)
    _require_memory(plan, "leave out `scale`: widths are then shrunk, and layers, degrees and groups stay")
    with _threads_for(plan), triton_tiles.use(plan.tiles):
        model = _model(plan, torch.float64, seed)
        double = _compare(plan, model, torch.float64, seed)
        if not double.ok:
            return double
        rounding = _rounding(plan, model, seed)
        informs = float32 and plan.spec.subject.dtype != "fp32"
        single = _compare(plan, _model(plan, torch.float32, seed), torch.float32, seed) if informs else None
    worst = double.worst if rounding.ok else rounding.worst
    return replace(double, ok=rounding.ok, worst=worst, rounding=rounding, float32=single)


def _verify_scaled(plan: Plan, seed: int) -> Report:
    toy = at_toy_widths(plan)
    if _bytes_needed(toy.plan) > MAX_BYTES:
        toy = at_toy_widths(plan, fewer_experts=True)
    _require_memory(toy.plan, "its widths are toy ones already; verify a copy of the file with fewer layers or ranks")
    with _threads_for(toy.plan):
        model = _model(toy.plan, torch.float64, seed)
        found = _compare(toy.plan, model, torch.float64, seed, blamed=toy.unlike is None)
    first = found.first_difference
    if toy.unlike is not None:
        at = toy.unlike
        first = Difference(
            layer=at.layer, op=at.op, value=at.value, span=at.span, error=math.inf, gradient=False, unlike=True
        )
    ok = found.ok and toy.unlike is None
    return replace(found, ok=ok, scaled=True, widths=toy.widths, first_difference=first)


@contextmanager
def _threads_for(plan: Plan) -> Iterator[None]:
    """One thread while a small model runs: more threads mostly wait for each other (60 s against 3 s)."""
    before = torch.get_num_threads()
    largest_parameter = max((math.prod(p.shape) for p in plan.parameters.values()), default=0)
    torch.set_num_threads(1 if largest_parameter < SMALL else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _rounding(plan: Plan, model: Unsharded, seed: int) -> Rounding:
    """The report of the first draw that is within the bounds; of the first draw if none is.

    One small gradient of a right plan may by chance be far off, but not on three draws. `model` is that of `seed`.
    """
    first: Rounding | None = None
    with _narrow_operators(plan):
        for drawn in range(seed, seed + DRAWS):
            batch = global_batch(plan, drawn)
            found = measure_rounding(plan, model, batch, recompute=_recomputes(plan))
            if found.ok:
                return found
            first = first or found
            model = _model(plan, torch.float64, drawn + 1)
    assert first is not None
    return first


def _narrow_operators(plan: Plan) -> AbstractContextManager[None]:
    """Plain torch for bf16 where the kernels run in Triton's interpreter: its products of bf16 are wrong."""
    return plain_torch() if select("cpu") is not torch_backend and plan.spec.subject.dtype == "bf16" else nullcontext()


@dataclass(slots=True)
class _Errors:
    """The largest error of each kind, and the name of the tensor that has it."""

    scales: Mapping[str, float]
    noise: Callable[[], Mapping[str, float]] = dict
    """What rounding alone may change in each parameter's gradient; asked for only where a gradient differs by more
    than the bound."""
    largest: dict[str, tuple[float, str]] = field(default_factory=dict)

    def add(self, kind: str, name: str, got: object, expected: Tensor, whole: Tensor, parameter: str = "") -> None:
        error = relative_error(got, expected, whole, self.scales[kind])
        if parameter and error > BOUND and isinstance(got, Tensor) and got.shape == expected.shape:
            error = 0.0 if largest(got - expected) <= self.noise().get(parameter, -1.0) else error
        if not error <= self.largest.get(kind, (-1.0, ""))[0]:
            self.largest[kind] = (error, name)

    def of(self, *kinds: str) -> float:
        return max(self.largest.get(kind, (0.0, ""))[0] for kind in kinds)


def relative_error(got: object, expected: Tensor, whole: Tensor, kind_scale: float) -> float:
    """max|got − expected| / max(max|whole|, NOISE · kind_scale), 0/0 being 0; infinite where shapes differ or NaN."""
    if not isinstance(got, Tensor) or got.shape != expected.shape:
        return math.inf
    difference = largest(got - expected)
    if difference != difference:
        return math.inf
    scale = max(largest(whole), NOISE * kind_scale)
    return 0.0 if difference == 0 else difference / scale if scale else math.inf


def largest(tensor: Tensor) -> float:
    """The largest absolute element, 0 of none."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _compare(plan: Plan, model: Unsharded, dtype: torch.dtype, seed: int, *, blamed: bool = True) -> Report:
    """In training, and where that differs in evaluation as well; what is worse."""
    found = _compare_with(plan, model, dtype, seed, blamed)
    settings = {**plan.program.settings, **reference_program(plan.spec).settings}
    if TRAINING.name not in settings or not found.ok:
        return found
    model.zero_grad()
    other = _compare_with(plan, model.eval(), dtype, seed, blamed)
    if not other.ok:
        return replace(other, worst=f"{other.worst}, in evaluation")
    return replace(
        found,
        max_output_error=max(found.max_output_error, other.max_output_error),
        max_gradient_error=max(found.max_gradient_error, other.max_gradient_error),
    )


def _model(plan: Plan, dtype: torch.dtype, seed: int) -> Unsharded:
    model = unsharded(plan.spec, seed=seed, dtype=dtype)
    _spread_vectors(model, seed)
    return model


def _compare_with(plan: Plan, model: Unsharded, dtype: torch.dtype, seed: int, blamed: bool) -> Report:
    cluster = VirtualCluster(plan, dict(model.named_parameters()), recompute=_recomputes(plan), training=model.training)
    inputs = global_batch(plan, seed).to(dtype)
    try:
        errors = _measure(plan, model, cluster, inputs)
    except StepError as failure:
        errors = _Errors({}, largest=dict.fromkeys(("output", "gradient"), (math.inf, str(failure))))
    output, gradient = errors.of("output", "loss", "aux_loss", "counts"), errors.of("gradient", "parameter")
    ok = max(output, gradient) <= (BOUND if dtype == torch.float64 else BOUND_FLOAT32)
    worst = max(errors.largest.items(), key=lambda item: item[1][0])
    first = None
    if blamed and not ok and dtype == torch.float64:
        from moec.runtime.verify.blame import first_difference

        # If every value is right, the graph returns the wrong one.
        given = Difference(
            layer="forward", op="output", value=worst[1][1], span=None, error=worst[1][0], gradient=False
        )
        first = first_difference(plan, model, inputs) or given
    return Report(
        ok=ok,
        world_size=plan.world_size,
        scaled=False,
        max_output_error=output,
        max_gradient_error=gradient,
        first_difference=first,
        worst=f"{worst[0]} of {worst[1][1]}",
        subject="model" if plan.spec.has_model else "layer",
    )


def _recomputes(plan: Plan) -> bool:
    return plan.world_size * plan.spec.subject.depth >= MANY_LAYERS


def _measure(plan: Plan, model: Unsharded, cluster: VirtualCluster, inputs: Inputs) -> _Errors:
    with plain_torch():
        expected = outcome(model, inputs)
        expected.differentiated.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(cluster.parameters)
    results, losses = cluster.lockstep.run(inputs.rank_given, inputs.rank_targets)

    @cache
    def noise() -> Mapping[str, float]:
        return gradient_noise(plan.spec, model, inputs, FLOAT32_NOISE) if whole_dtype == torch.float64 else {}

    whole_dtype = expected.result.dtype
    errors = _Errors(
        {
            "output": largest(expected.result),
            **{name: largest(scalar) for name, scalar in expected.scalars.items()},
            "counts": 0.0,
            "gradient": max(largest(g) for g in gradients.values()),
            "parameter": max(largest(p) for p in model.parameters()),
        },
        noise,
    )
    whole_result, layout, dense = expected.result.detach(), plan.result_layout, plan.meshes["dense"]
    for rank in range(plan.world_size):
        part = whole_result[local_slices(whole_result.shape, layout, dense, rank)]
        errors.add("output", f"{result_name(plan.spec)} of rank {rank}", results[rank].detach(), part, whole_result)
    for name, scalar in expected.scalars.items():
        # A plan may have lost the graph that gives it.
        for rank, got in enumerate(cluster.lockstep.scalars.get(name, [None] * plan.world_size)):
            errors.add(name, f"rank {rank}", got, scalar.detach(), scalar)
    for layer, counts in expected.counts.items():
        total = _total(cluster.lockstep.counts.get(layer, []))
        errors.add("counts", f"the expert counts of layer {layer}", total, counts, counts)
    whole = dict(model.named_parameters())
    try:
        summed = cluster.backward(losses)
    except BackwardError as failure:
        errors.largest["gradient"] = (math.inf, str(failure))
        return errors
    if inputs.given.grad is not None:
        for rank, (x, rows) in enumerate(zip(inputs.rank_given, inputs.rank_rows, strict=True)):
            got = torch.zeros_like(x) if x.grad is None else x.grad
            whole_x = inputs.given.grad
            errors.add("gradient", f"x on rank {rank}", got, whole_x[rows], whole_x, parameter="x")
    for name, rank, got in _per_rank(summed):
        data = plan.parameters[name]
        index = local_slices(data.shape, data.layout, plan.meshes[data.mesh], rank)
        gradient, parameter = gradients[name], whole[name].detach()
        errors.add("gradient", f"{name} on rank {rank}", got, gradient[index], gradient, parameter=name)
        held = cluster.parameters[name][rank].detach()
        after = parameter - LEARNING_RATE * gradient
        errors.add("parameter", f"{name} on rank {rank}", held - LEARNING_RATE * got, after[index], after)
    return errors


def _total(counts: Sequence[object]) -> object:
    """Rows per expert over all ranks; None of what is no list of counts."""
    rows = [value for value in counts if isinstance(value, Tensor) and value.dim() == 2 and len(value) == 1]
    if not counts or len(rows) != len(counts) or len({row.shape for row in rows}) != 1:
        return None
    return torch.cat(rows).sum(0)


def _per_rank(gradients: Mapping[str, Sequence[Tensor]]) -> Iterator[tuple[str, int, Tensor]]:
    for name, parts in gradients.items():
        for rank, part in enumerate(parts):
            yield name, rank, part


def _spread_vectors(model: Unsharded, seed: int) -> None:
    """Norm weights start as ones and biases as zeros, which would hide an op that forgets them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith(".bias"):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))


def _bytes_needed(plan: Plan) -> int:
    """Whole parameters and their gradients once, and each rank's gradients of what it holds, in float64."""
    total = held = 0
    for parameter in plan.parameters.values():
        total += math.prod(parameter.shape)
        local = local_shape(parameter.shape, parameter.layout, plan.meshes[parameter.mesh])
        held += math.prod(local) * plan.world_size
    return 8 * (3 * total + 2 * held)


def _require_memory(plan: Plan, help: str) -> None:
    needed = _bytes_needed(plan)
    if needed > MAX_BYTES:
        raise JobError(
            "MOE0703",
            f"{plan.name}: about {needed / 1e9:.0f} GB in float64, the limit is {MAX_BYTES / 1e9:.0f} GB",
            help,
        )
