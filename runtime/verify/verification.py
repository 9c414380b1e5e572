"""Compares a plan on the virtual cluster with the unsharded model: forward, backward and one step."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch

from moec.codegen.plan import Plan
from moec.passes.degrees.guest_slots import greedy_of
from moec.passes.pipeline import compile_program
from moec.runtime.backends import plain_torch, select
from moec.runtime.backends.torch import torch_backend
from moec.runtime.verify.beyond_limits import beyond_limits, limits_of
from moec.runtime.verify.comparison import compare, compare_with_guests, larger_errors
from moec.runtime.verify.guest_maps import guest_maps
from moec.runtime.verify.inputs import global_batch, microbatches_of
from moec.runtime.verify.memory import MAX_BYTES, recomputes, require_memory, weight_bytes
from moec.runtime.verify.program_differences import first_attribute_difference, first_program_difference
from moec.runtime.verify.repeats import without_repeats
from moec.runtime.verify.rounding import measure_rounding
from moec.runtime.verify.toy import at_toy_widths
from moec.runtime.verify.unsharded import Unsharded, states_of, unsharded
from moec.runtime.verify.verify_progress import Progress, Steps
from moec.runtime.verify.verify_report import Difference, Report, Rounding
from moec.runtime.weights.shards import require_executable, require_order

DRAWS = 3
"""A plan is refused for its rounding only if it loses too much on each of this many draws of parameters and batch."""

SMALL = 1 << 20
"""Elements of the largest parameter of a model whose ops are too small to share between threads."""


def verify(
    plan: Plan,
    *,
    seed: int = 0,
    scale: bool | None = None,
    float32: bool = True,
    progress: Progress = lambda text, steps, total: None,
) -> Report:
    """Compares `plan` with the reference of its own Spec in float64, and in the plan's dtype against float64. Ops that
    the compiled Spec has too must have its attributes: short inputs do not show each of them.

    `float32` adds a report in float32, which decides nothing, where that is not the plan's dtype. `progress` is called
    for every layer that has run.

    `scale` shrinks the plan's widths to toy ones, by default where the plan is too large for this machine. Raises
    `JobError` for a plan that is too large even so, or as it is where `scale` is False, and where `MOEC_BACKEND` asks
    for a backend that cannot run here.
    """
    require_executable(plan.parameters)
    require_order(plan.program)
    select("cpu")  # otherwise every operator would fail, and the plan would be blamed
    compiled = compile_program(plan.spec, "schedule").program
    short = without_repeats(plan, compiled)
    if scale is None:
        scale = weight_bytes(short.plan) > MAX_BYTES
    if scale:
        report = _verify_scaled(short.plan, first_program_difference(plan, compiled), seed, progress)
    else:
        require_memory(short.plan, "leave out `scale`: widths are then shrunk, and layers, degrees and groups stay")
        difference = first_attribute_difference(plan.program, compiled)
        report = _verify_at_full_widths(short.plan, difference, seed, float32, progress)
    renumbered: Report = short.with_original_numbers(report)
    return replace(renumbered, repeats=short.depth - len(short.layers))


def _verify_at_full_widths(
    plan: Plan, difference: Difference | None, seed: int, float32: bool, progress: Progress
) -> Report:
    reports_float32 = float32 and plan.spec.subject.dtype != "fp32"
    steps = Steps(plan, progress)
    steps.expect(reports_float32, 1)
    with _one_thread_without_collection(plan):
        model = _model(plan, torch.float64, seed)
        report = _compare_in_float64(plan, model, seed, steps, "float64")
        if not report.ok:
            return report
        if difference is not None:
            return replace(report, ok=False, first_difference=difference)
        gc.collect(0)
        rounding = _rounding(plan, model, seed, steps)
        float32_report = None
        if reports_float32:
            steps.begin("float32")
            float32_report = compare(plan, _model(plan, torch.float32, seed), torch.float32, seed, watch=steps)
    return replace(report, ok=rounding.ok, rounding=rounding, float32=float32_report)


def _verify_scaled(plan: Plan, difference: Difference | None, seed: int, progress: Progress) -> Report:
    toy = at_toy_widths(plan)
    if weight_bytes(toy.plan) > MAX_BYTES:
        toy = at_toy_widths(plan, fewer_experts=True)
    require_memory(toy.plan, "its widths are toy ones already; verify a copy of the file with fewer layers or ranks")
    steps = Steps(toy.plan, progress)
    with _one_thread_without_collection(toy.plan):
        model = _model(toy.plan, torch.float64, seed)
        blame = difference is None
        report = _compare_in_float64(toy.plan, model, seed, steps, "float64, at toy widths", blame=blame)
    if difference is not None:
        report = replace(report, ok=False, first_difference=difference)
    return replace(report, scaled=True, widths=toy.widths)


def _compare_in_float64(
    plan: Plan, model: Unsharded, seed: int, steps: Steps, run: str, *, blame: bool = True
) -> Report:
    """Compares in float64, with all maps where layers have slots, and again beyond the limits of
    clips and clamps where the model has any."""
    limits, maps = limits_of(plan.spec), guest_maps(plan.program, seed, moves=greedy_of(plan.spec) is not None)
    steps.expect((2 if limits else 1) + len(maps), 0)
    steps.begin(run)
    report = compare(plan, model, torch.float64, seed, blame=blame, watch=steps)
    for number, slots in enumerate(maps, 1):
        if not report.ok:
            return report
        gc.collect(0)
        model.train().zero_grad()
        steps.begin(f"{run}, placement {number} of {len(maps)}")
        report = larger_errors(report, compare_with_guests(plan, model, seed, slots=slots, watch=steps))
        report = replace(report, placements=number)
    if not limits or not report.ok:
        return report
    gc.collect(0)
    steps.begin(f"{run}, beyond the limits")
    model.train().zero_grad()
    with beyond_limits(model, limits):
        return larger_errors(report, compare(plan, model, torch.float64, seed, blame=blame, watch=steps))


@contextmanager
def _one_thread_without_collection(plan: Plan) -> Iterator[None]:
    """One thread while a small model runs: several threads mostly wait for each other (60 s against 3 s).

    No garbage collection: autograd's graphs are millions of objects, and looking through them took a quarter of the
    time (61 layers, 256 ranks). `gc.collect(0)` runs after the comparison in
    float64 and after each refused draw.
    """
    threads, collects = torch.get_num_threads(), gc.isenabled()
    largest_parameter = max((math.prod(p.shape) for p in plan.parameters.values()), default=0)
    torch.set_num_threads(1 if largest_parameter < SMALL else threads)
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if collects:
            gc.enable()


def _rounding(plan: Plan, model: Unsharded, seed: int, steps: Steps) -> Rounding:
    """The report of the first draw that is within the bounds; of the first draw if none is.

    One small gradient of a right plan may by chance have a large error, but not on three draws. `model` is that of
    `seed`.
    """
    first: Rounding | None = None
    with _narrow_operators(plan):
        for draw_seed in range(seed, seed + DRAWS):
            draw = f", draw {draw_seed - seed + 1} of {DRAWS}" if draw_seed > seed else ""
            steps.expect(0, int(draw_seed > seed))
            steps.begin(f"rounding in {plan.spec.subject.dtype}{draw}", rounding=True)
            batch = global_batch(plan, draw_seed)
            rounding = measure_rounding(plan, model, batch, recompute=recomputes(plan), watch=steps)
            if rounding.ok:
                return rounding
            first = first or rounding
            gc.collect(0)
            model = _model(plan, torch.float64, draw_seed + 1)
    assert first is not None
    return first


def _narrow_operators(plan: Plan) -> AbstractContextManager[None]:
    """Plain torch for bf16 where the kernels run in Triton's interpreter: its products of bf16 are wrong."""
    return plain_torch() if select("cpu") is not torch_backend and plan.spec.subject.dtype == "bf16" else nullcontext()


def _model(plan: Plan, dtype: torch.dtype, seed: int) -> Unsharded:
    model = unsharded(plan.spec, seed=seed, dtype=dtype, microbatches=microbatches_of(plan))
    _spread_vectors(model, seed)
    return model


def _spread_vectors(model: Unsharded, seed: int) -> None:
    """Norm weights start as ones, biases, states and `lora`'s second matrix as zeros, which would hide an op that
    forgets them, and all gradients before it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith(".bias") or not parameter.any():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))
        for state in states_of(model).values():
            # Larger biases than the differences between scores would send all tokens to the same experts.
            state.add_(0.1 / state.numel() * torch.randn(state.shape, generator=generator).to(state))
