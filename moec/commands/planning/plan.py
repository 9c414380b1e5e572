"""`moec plan`: the predicted time and memory of a step, as text or JSON. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moec.codegen.plan_in_words import degrees_lines
from moec.codegen.search_report import GIGABYTE, SearchReport, report_of
from moec.commands.console.output import emit
from moec.commands.console.progress import progress
from moec.commands.inspecting.summary import peak_line, recomputing_layers
from moec.commands.planning.against import against, against_lines, require_same_model
from moec.commands.planning.choices import in_words, runner_up_lines, searched, way_out_lines, why_not_lines
from moec.commands.planning.loads import (
    Placing,
    load_lines,
    planned_load,
    read_loads,
    require_no_other_words,
    routing_in_words,
)
from moec.commands.planning.placement import placement_lines, planned_placements
from moec.commands.planning.plan_document import (
    PlannedDegrees,
    PlannedExperts,
    PlannedLoad,
    StepPrediction,
    Tenant,
    way_out,
    why_not_document,
)
from moec.commands.planning.terms import term_lines
from moec.driver import read, valid_plan
from moec.grammar.amounts import amount_of_bytes, si
from moec.grammar.checking.rank_rules import states_cluster
from moec.grammar.checking.supported import require_supported
from moec.grammar.diagnostics import Diagnostic, DiagnosticError, diagnose, printable
from moec.grammar.layer_numbers import numbered
from moec.grammar.resolve.given_words import given_words
from moec.grammar.spec import Spec, Trace
from moec.grammar.stated import GivenWords, open_words
from moec.passes.cost.memory import ranks_in_words
from moec.passes.cost.prediction import Prediction
from moec.passes.cost.rates import NETWORK_SHARE, peak
from moec.passes.cost.seconds import EXPOSED
from moec.passes.degrees.degrees import Degrees, choose_degrees
from moec.passes.ir import Program
from moec.passes.search.candidate import Candidate, candidate_of
from moec.stale import stale
from moec.subject import is_plan, require_plan_folder

if TYPE_CHECKING:
    from moec.passes.loads.placed_loads import PlacedLoads
    from moec.passes.search.ways_out import WayOut
    from moec.passes.search.why_not import WhyNot


IN_ORDER = Placing()


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, its loads, and what a search says of other plans. `report` is None where no search chose a word."""

    plan: Candidate
    load: PlannedLoad
    report: SearchReport | None
    why_not: WhyNot | None
    other: Candidate | None
    ways_out: Sequence[WayOut]

    @property
    def fits(self) -> bool:
        """Whether the step fits its devices, with the copies of a placement."""
        copies = self.load.trace.copies_gb * GIGABYTE if self.load.trace is not None else 0.0
        return self.plan.prediction.memory.peak.bytes.total + copies <= self.plan.prediction.capacity


def run(
    source: Path,
    lets: Mapping[str, str],
    style: str,
    words: str | None = None,
    other: Path | None = None,
    placing: Placing = IN_ORDER,
) -> tuple[bool, tuple[Diagnostic, ...]]:
    """Prints the prediction of a file or a plan; returns whether the step fits its devices, and the file's warnings.

    `words`: of `parallel`, to say why the plan has not these. `other`: a plan or file, to say what the plan changes.
    `placing`: where the experts of a file with a trace are.
    Raises MOE0502 where there is no step, MOE0504 for an `other` of another model, and the diagnostics of a file that
    does not compile.
    """
    given = None if words is None else given_words("--why-not", words)
    spec, report, warnings = _spec_of(source, lets)
    require_step(spec)
    if given is not None:
        require_no_other_words(placing)
    spec, found, plan, loads = _planned(spec, source, placing)
    before = None
    if other is not None:
        if other.is_dir() or not (other.suffix == ".moe" or other.exists()):
            require_plan_folder(other, "moec plan --against")
        file, _, _ = _spec_of(other, {})
        require_step(file, f"`{other}` is ")
        _, _, before, _ = _planned(file, other, IN_ORDER)
        require_same_model(plan, before)
    why_not = None if given is None else _why_not(spec, plan, given)
    ways = () if plan.prediction.fits or not placing.is_default else _ways_out(spec)
    planned = Planned(plan, planned_load(plan, loads), report or found, why_not, before, ways)
    emit(style, lambda: _lines(planned), lambda: _document(planned))
    return planned.fits, warnings


def require_step(spec: Spec, which: str = "") -> None:
    """Raises MOE0502 for a file without a step, and MOE0202 for what is not supported."""
    if spec.train is None or not spec.has_model:
        what = "the file of one `layer`" if not spec.has_model else "a file without `train`"
        help = (
            "give the batch of a step: `train { batch = 256; sequence = 4096 }`"
            if spec.has_model
            else "give a `model` whose layers are like it"
        )
        raise DiagnosticError([diagnose("MOE0502", None, which + what, help=help)])
    require_supported(spec)


def _planned(
    spec: Spec, source: Path, placing: Placing
) -> tuple[Spec, SearchReport | None, Candidate, PlacedLoads | None]:
    """The file with what a plan keeps of its trace, the report of a search, the plan, and the loads of the trace.

    Open words are chosen for experts in order, and the chosen plan is predicted with the placement.
    """
    is_chosen = bool(open_words(spec)) and spec.train is not None and isinstance(spec.train.routing, Trace)
    file, loads = read_loads(spec, source, IN_ORDER if is_chosen else placing)
    choice = searched(file)
    if choice is None:
        return file, None, candidate_of(file), loads
    plan = choice.chosen
    if not placing.is_default:
        placed, loads = read_loads(spec.replace(parallel=plan.spec.parallel), source, placing)
        plan = candidate_of(placed, plan.words)
    return file, report_of(file, choice), plan, loads


def _why_not(spec: Spec, plan: Candidate, given: GivenWords) -> WhyNot:
    from moec.passes.search.why_not import why_not

    with progress("comparing plans") as bar:
        return why_not(
            spec, plan, given, lambda words: bar.at(f"with {in_words({w: given.values[w] for w in words})}", 0, 0)
        )


def _ways_out(spec: Spec) -> Sequence[WayOut]:
    from moec.passes.search.ways_out import ways_out

    with progress("searching plans that fit"):
        return tuple(ways_out(spec))


def _spec_of(source: Path, lets: Mapping[str, str]) -> tuple[Spec, SearchReport | None, tuple[Diagnostic, ...]]:
    """The Spec of a file or a plan, the report that the plan has, and the warnings of the file or plan."""
    if is_plan(source):
        plan = valid_plan(source)
        warning = stale(source, plan)
        return plan.spec, plan.report, () if warning is None else (warning,)
    loaded = read(source, **lets)
    return loaded.unwrap(), None, loaded.diagnostics


def _lines(planned: Planned) -> Iterator[str]:
    plan, load = planned.plan, planned.load
    program, spec, prediction = plan.program, plan.spec, plan.prediction
    train, cluster, step = spec.train, spec.cluster, prediction.step
    assert train is not None
    unit = "GPU" if cluster.device.kind != "cpu" else "rank"
    yield (
        f"{spec.subject.name} on {cluster.ranks} × {cluster.device.name} ({cluster.name}); a step is "
        f"{train.batch:,} sequences of {spec.sequence:,} tokens; {routing_in_words(spec)}"
    )
    yield from _guesses(spec)
    yield ""
    head, *more = degrees_lines(choose_degrees(spec))
    yield f"  plan     {head}"
    yield from (f"           {line}" for line in more)
    yield f"           {_schedule(program, choose_degrees(spec))}"
    yield (
        f"  step     {step.total:.3g} s   {prediction.tokens_per_second:,.0f} tokens/s/{unit}   "
        f"{prediction.flops_per_second / 1e12:.3g} TFLOP/s/{unit}   MFU {prediction.mfu:.3f}"
    )
    yield from term_lines(step, program, spec)
    memory = prediction.memory
    where = f" of {ranks_in_words(program, memory.stages)}" if len(program.stages) > 1 else ""
    yield f"  memory   {peak_line(memory, prediction.capacity)}{where}{_not_fitting(planned)}"
    tenants = ", ".join(f"{tenant.kind} {amount_of_bytes(tenant.gb * GIGABYTE)}" for tenant in _tenants(prediction))
    yield f"           {tenants}"
    yield from way_out_lines(planned.ways_out, plan)
    yield from load_lines(load, spec, step.total)
    yield from placement_lines(planned_placements(plan))
    if planned.report is not None:
        if load.trace is not None and load.trace.age is not None:
            seconds = f"{planned.report.chosen.step_time_s:.3g} s"
            yield f"  chosen   with experts in order: {seconds}, with which the next plans are compared"
        yield from map(printable, runner_up_lines(planned.report))  # a plan's report may be edited
    if planned.why_not is not None:
        yield ""
        yield from why_not_lines(planned.why_not, plan)
    if planned.other is not None:
        yield ""
        yield from against_lines(plan, planned.other)


def _not_fitting(planned: Planned) -> str:
    if planned.fits:
        return ""
    return ": it does not fit" + " with its copies of experts" * planned.plan.prediction.fits


def _guesses(spec: Spec) -> Iterator[str]:
    """What the file does not say of the cluster, and what counts instead."""
    device, levels = spec.cluster.device, [level for level in spec.cluster.levels if level.size > 1]
    if not states_cluster(spec):
        yield "no `cluster` in the file: one CPU process counts, whatever this machine has"
    unmeasured = [f"device {device.name}"] if device.achieved is None else []
    unmeasured += [f"level {level.name}" for level in levels if level.achieved is None]
    if unmeasured:
        yield f"not measured here: {', '.join(unmeasured)} have no `achieved`, and the defaults of the language count"
    if unknown := ", ".join(level.name for level in levels if level.bandwidth is None):
        yield f"guessed: {unknown} has no `bandwidth`, and {NETWORK_SHARE:.0%} of the memory's counts: state it"
    if getattr(device.peak, spec.subject.dtype) is None:
        rate = peak(device, spec.subject.dtype)
        yield f"guessed: {device.name} has no `peak` in {spec.subject.dtype}, and {si(rate, 'G')}FLOP/s count: state it"


def _schedule(program: Program, degrees: Degrees) -> str:
    recompute = [f"recompute = {part} in {numbered(numbers)}" for part, numbers in recomputing_layers(program).items()]
    return ", ".join([f"zero = {degrees.zero}", *recompute, f"microbatches = {program.microbatches}"])


def _tenants(prediction: Prediction) -> list[Tenant]:
    """What takes memory at the peak, the largest first."""
    sizes = sorted(prediction.memory.peak.bytes.of.items(), key=lambda part: -part[1])
    return [Tenant(kind=str(kind), gb=float(size) / GIGABYTE) for kind, size in sizes if size]


def _document(planned: Planned) -> StepPrediction:
    program, spec, prediction = planned.plan.program, planned.plan.spec, planned.plan.prediction
    degrees, step, memory = choose_degrees(spec), prediction.step, prediction.memory
    return StepPrediction(
        parallel=PlannedDegrees(
            dp=degrees.dp,
            cp=degrees.cp,
            tp=degrees.tp,
            pp=degrees.pp,
            virtual=degrees.virtual,
            schedule=degrees.schedule,
            experts=[PlannedExperts(layers=list(e.layers), ep=e.ep, etp=e.etp, edp=e.edp) for e in degrees.experts],
            zero=degrees.zero,
            recompute=recomputing_layers(program),
            microbatches=program.microbatches,
        ),
        step_time_s=float(step.total),
        terms={str(term): float(seconds) for term, seconds in step.of.items()},
        tokens_per_s_per_gpu=float(prediction.tokens_per_second),
        tflops_per_gpu=float(prediction.flops_per_second) / 1e12,
        mfu=float(prediction.mfu),
        memory_gb=float(memory.peak.bytes.total) / GIGABYTE,
        peak_event=memory.peak.event,
        peak_ranks=ranks_in_words(program, memory.stages),
        capacity_gb=prediction.capacity / GIGABYTE,
        fits=planned.fits,
        largest_tenants=_tenants(prediction),
        exposed_communication_s=sum(float(seconds) for term, seconds in step.of.items() if term in EXPOSED),
        loads=planned.load,
        placements=planned_placements(planned.plan),
        calibrated=spec.cluster.is_calibrated,
        candidates=planned.report.candidates if planned.report else None,
        runners_up=planned.report.runners_up if planned.report else [],
        unused=planned.report.unused if planned.report else [],
        why_not=None if planned.why_not is None else why_not_document(planned.why_not),
        against=None if planned.other is None else against(planned.plan, planned.other),
        ways_out=[way_out(way) for way in planned.ways_out],
    )
