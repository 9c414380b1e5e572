"""The loads of a plan in numbers and lines: of layers, of steps, and of the rows that a rank keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moec.codegen.search_report import GIGABYTE
from moec.commands.inspecting.summary import skew_lines
from moec.commands.planning.plan_document import PlannedLoad, PlannedTrace
from moec.grammar.amounts import amount_of_bytes, count
from moec.grammar.diagnostics import DiagnosticError, diagnose
from moec.grammar.spec import GateBound, Measured, Spec, Trace, Zipf
from moec.measured_loads import folder_of
from moec.passes.cost.largest_skew import largest_skew
from moec.passes.cost.prediction import step_of, workload_of_skew
from moec.passes.cost.totals import largest_load
from moec.passes.ir.work.workload import Workload
from moec.passes.search.candidate import Candidate

if TYPE_CHECKING:
    from moec.passes.loads.placed_loads import PlacedLoads
    from moec.passes.loads.step_figures import Copies

TWICE = 2.0
"""The load whose step is shown beside that of the file: rows of the busiest rank over the mean."""

NEAR = 0.01
"""How much the predicted step may differ from the 95th percentile of a trace's, before that is said."""


class Placing(NamedTuple):
    """How `--placement` and `--age` place experts."""

    kind: str = "contiguous"
    extra: int = 0
    age: int = 1

    @property
    def is_default(self) -> bool:
        """Whether experts lie in order."""
        return self.kind == "contiguous"


def read_loads(spec: Spec, source: Path, placing: Placing) -> tuple[Spec, PlacedLoads | None]:
    """The file with what a plan keeps of its trace, and the trace with its placement, if it has one."""
    routing = spec.train.routing if spec.train is not None else None
    if isinstance(routing, Measured) and not placing.is_default:
        message = f"the plan keeps numbers of `{routing.file}` for experts in order"
        raise DiagnosticError([diagnose("MOE0513", None, message, help="price the `.moe` file, which names the trace")])
    if not isinstance(routing, Trace) and placing.is_default:
        return spec, None
    from moec.passes.loads.placed_loads import Placement, placed_loads

    found = placed_loads(spec, folder_of(source), Placement(placing.kind, placing.extra, placing.age))  # type: ignore[arg-type]
    assert found is not None
    return found


def require_no_other_words(placing: Placing) -> None:
    """Raises MOE0513 where words are compared under a placement, which is made for the file's own."""
    if not placing.is_default:
        message = "`--why-not` is not supported yet beside a placement"
        help = "leave `--placement` out, or state the words in the file"
        raise DiagnosticError([diagnose("MOE0513", None, message, help=help)])


def planned_load(plan: Candidate, loads: PlacedLoads | None) -> PlannedLoad:
    """The loads of a plan; `loads` are those of the file's trace."""
    program, spec, prediction = plan.program, plan.spec, plan.prediction
    uneven, workload = workload_of_skew(program, spec, TWICE), Workload.of_microbatch(spec, program)
    kept, most = (float(largest_load(program, workload.planned_for(use))) for use in ("kept", "most"))
    time, step = float(prediction.skew), float(prediction.step.total)
    copies = _copies(plan, loads)
    load = PlannedLoad(
        busiest=time,
        layer_p50=time,
        layer_p95=time,
        step_time_p50_s=step,
        step_time_p95_s=step,
        kept=kept,
        one_layer=most,
        trace=None,
        largest_that_fits=largest_skew(program, spec, copies.bytes if copies else 0.0),
        step_time_at_2_s=float(step_of(program, spec, uneven).total) if uneven else None,
    )
    if loads is not None:
        return _with_trace(load, plan, loads, copies)
    return load if workload.measured is None else replace(load, layer_p50=None, layer_p95=None, step_time_p50_s=None)


def _copies(plan: Candidate, loads: PlacedLoads | None) -> Copies | None:
    """What the copies of a placement cost; None without copies."""
    if loads is None or not loads.placement.extra:
        return None
    from moec.passes.loads.step_figures import copies_of

    return copies_of(plan.program, plan.spec, loads)


def _with_trace(load: PlannedLoad, plan: Candidate, loads: PlacedLoads, copies: Copies | None) -> PlannedLoad:
    from moec.passes.loads.step_figures import step_figures

    train, found = plan.spec.train, step_figures(plan.program, plan.spec, loads)
    assert train is not None
    assert isinstance(train.routing, Measured)
    trace = PlannedTrace(
        file=train.routing.file,
        iterations=loads.trace.iterations,
        read=len(loads.iterations),
        ranks=loads.trace.ranks,
        placement=loads.placement.kind,
        extra=loads.placement.extra,
        age=loads.placement.age * loads.trace.every if loads.placement.kind != "contiguous" else None,
        layer_time_p50_s=found.layer_time.half,
        layer_time_p95_s=found.layer_time.planned,
        even_layer_time_s=found.even_layer_time,
        copies_gb=copies.bytes / GIGABYTE if copies else 0.0,
        copies_time_s=copies.seconds if copies else 0.0,
    )
    return replace(
        load,
        layer_p50=found.layer.half,
        layer_p95=found.layer.planned,
        step_time_p50_s=found.step.half,
        step_time_p95_s=found.step.planned,
        trace=trace,
    )


def load_lines(load: PlannedLoad, spec: Spec, step: float) -> Iterator[str]:
    """The figures of each line begin with what they are of. `step`: the predicted seconds."""
    layer = f"p50 {load.layer_p50:.2f}, p95 {load.layer_p95:.2f}" if load.layer_p50 else f"{load.busiest:.2f} for time"
    yield f"  load     busiest rank over mean: layer {layer}"
    kept = f"{load.kept:.2f} of the rows that a rank keeps over its layers"
    yield f"           memory {kept}, {load.one_layer:.2f} in one layer"
    if load.step_time_p50_s is not None:
        is_near = abs(step / load.step_time_p95_s - 1) < NEAR
        other = "" if is_near else f"; planned is {step:.3g} s, with all stages as uneven as the most uneven one"
        yield f"           step p50 {load.step_time_p50_s:.3g} s, p95 {load.step_time_p95_s:.3g} s{other}"
    if load.trace is not None:
        yield from (f"           {line}" for line in _trace_lines(load.trace))
    elif spec.train is not None and isinstance(spec.train.routing, Measured):
        name = spec.train.routing.file
        yield f"           kept of {name}: `moec plan` of the `.moe` file has percentiles and placements"
    if load.step_time_at_2_s is not None:
        yield f"           at {TWICE:g} the step takes {load.step_time_at_2_s:.3g} s"
    if load.largest_that_fits is None:
        yield "           every load fits the memory"
    else:
        same = ", the same rank's in every layer" if load.trace is not None else ""
        lines = [f"{line}{same}" for line in skew_lines(load.largest_that_fits)]
        yield from (f"           {line}" for line in lines or ["no load fits the memory"])


def _trace_lines(trace: PlannedTrace) -> Iterator[str]:
    even = trace.even_layer_time_s
    times = f"{trace.layer_time_p50_s / even:.2f} and {trace.layer_time_p95_s / even:.2f} times an even load's"
    half, planned = (f"{seconds * 1e3:.3g} ms" for seconds in (trace.layer_time_p50_s, trace.layer_time_p95_s))
    yield f"layer with experts p50 {half}, p95 {planned}: {times}"
    part = "" if trace.read == trace.iterations else f"{trace.read:,} of "
    name = "replicate" if trace.extra else trace.placement
    loads = "the step's own loads" if trace.age == 0 else f"loads {count(trace.age or 0, 'iteration')} old"
    how = "experts in order" if trace.age is None else f"placed by `{name}` from {loads}"
    yield f"of {part}{trace.iterations:,} iterations on {count(trace.ranks, 'rank')}; {how}"
    if trace.extra:
        yield (
            f"{trace.extra} copies in each layer, beside the above: {amount_of_bytes(trace.copies_gb * GIGABYTE)} on a "
            f"rank, {trace.copies_time_s:.3g} s a step to sum their gradients"
        )


def routing_in_words(spec: Spec) -> str:
    """The loads that a file states."""
    routing = spec.train.routing if spec.train is not None else None
    match routing:
        case Zipf():
            return f"loads by zipf({routing.s:g})"
        case GateBound():
            return "the most uneven loads that gates allow"
        case Measured():
            return f"loads of {routing.file}"
    return "every expert equally loaded"
