"""Checks `pp`, `virtual`, `schedule` and `stages` against ranks, layers and each other. The rules of the other degrees
need a `pp` that divides the ranks, so they are applied where these rules find nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from moec.grammar.amounts import count
from moec.grammar.diagnostics import Diagnostic, Label, diagnose
from moec.grammar.layer_numbers import numbered
from moec.grammar.spec import LayerRange, Spec
from moec.grammar.stated import STAGES_OF_RANK, pipeline_of, stage_ranks
from moec.passes.degrees.fitting_degrees import dense_changes, ratio
from moec.passes.degrees.labels import labelled, not_whole
from moec.passes.degrees.stated_degrees import divisors, mixtures_of


def pipeline_problems(spec: Spec) -> list[Diagnostic]:
    """A diagnostic for every rule that these words break. Their helps can all be followed at once."""
    if spec.parallel.pp is None:
        return list(_without_pipeline(spec))
    problems = list(_virtual_problems(spec))
    if problems:
        spec = spec.replace(parallel=spec.parallel.replace(virtual=_fitting_virtual(spec)))
    return [*problems, *_size_problems(spec), *_stages_problems(spec)]


def _without_pipeline(spec: Spec) -> Iterator[Diagnostic]:
    for word in ("schedule", "virtual", "stages"):
        if getattr(spec.parallel, word) is not None:
            pp = _fitting_pp(spec, 2)
            help = f"set `pp = {pp}`, or leave `{word}` out" if pp > 1 else f"leave `{word}` out"
            yield diagnose("MOE0376", spec.parallel.span(word), f"`{word}` without `pp`", help=help)


def _fitting_virtual(spec: Spec) -> int:
    """The stages of each rank that the file states, or the number that its schedule takes."""
    _, virtual, schedule = pipeline_of(spec)
    return STAGES_OF_RANK[schedule].fitting(virtual)


def _virtual_problems(spec: Spec) -> Iterator[Diagnostic]:
    parallel, (_, virtual, schedule) = spec.parallel, pipeline_of(spec)
    if virtual != (fitting := _fitting_virtual(spec)):
        several = "" if fitting > 1 else f", or `schedule = interleaved` for {virtual}"
        yield diagnose(
            "MOE0377",
            parallel.span("virtual"),
            f"a rank has {fitting} with `{schedule}`" + ("" if parallel.schedule else ", the default"),
            labels=labelled(parallel.span("schedule"), "the schedule") if parallel.schedule else (),
            help=f"set `virtual = {fitting}`{several}",
        )


def _size_problems(spec: Spec) -> Iterator[Diagnostic]:
    """A `pp` that does not divide the ranks, and more stages than layers."""
    parallel, depth, (pp, virtual, schedule) = spec.parallel, spec.subject.depth, pipeline_of(spec)
    span, fitting = parallel.span("pp"), _fitting_pp(spec, pp)
    ways = [f"set `pp = {fitting}`" if fitting else "leave `pp`, `virtual` and `schedule` out"]
    if spec.cluster.ranks % pp:
        yield not_whole(spec.replace(parallel=parallel.replace(pp=None)), span, pp, ways[0])
    if pp * virtual > depth:
        if (
            virtual > 1
            and not STAGES_OF_RANK[schedule].only
            and pp <= depth
            and spec.cluster.ranks % pp == 0
            and parallel.stages is None
        ):
            ways.append(f"`virtual = {depth // pp}`")
        labels = labelled(parallel.span("virtual"), f"virtual = {virtual}") if parallel.virtual else ()
        yield diagnose(
            "MOE0378",
            span,
            f"{_product(spec)} stages",
            labels=_depth_label(spec, count(depth, "layer")) + labels,
            help=" or ".join(ways),
        )


def _stages_problems(spec: Spec) -> Iterator[Diagnostic]:
    """`stages` that are not all layers in order, or another number than the pipeline has."""
    stages, depth, (pp, virtual, _) = spec.parallel.stages, spec.subject.depth, pipeline_of(spec)
    if stages is None:
        return
    ways = ["leave `stages` out"]
    fitting = _fitting_pp(spec, pp)
    if 0 < fitting * virtual <= MOST_LISTED:
        ranges = _counted(stages, depth, fitting * virtual) or _even(depth, fitting * virtual)
        ways.insert(0, f"set `stages = [{', '.join(map(str, ranges))}]`")
    if fault := _first_fault(stages, depth):
        labels = _depth_label(spec, f"the layers are 0..{depth - 1}")
    elif len(stages) != fitting * virtual:
        fitted = f" for {count(fitting * virtual, 'stage')}, with the `pp = {fitting}` that fits"
        wanted = f" for {_product(spec)} stages" if fitting == pp else fitted if fitting else ", and no `pp` fits"
        fault = f"{count(len(stages), 'range')}{wanted}"
        labels = labelled(spec.parallel.span("pp"), f"pp = {pp}")
    else:
        return
    yield diagnose("MOE0379", spec.parallel.span("stages"), fault, labels=labels, help=", or ".join(ways))


MOST_LISTED = 16
"""The most ranges of layers in a help."""


def _first_fault(stages: Sequence[LayerRange], depth: int) -> str:
    """What the first wrong range does; empty if they are all layers in order."""
    expected = 0
    for stage in stages:
        if stage.last < stage.first:
            return f"`{stage}` has no layer"
        if stage.last >= depth:
            return f"`{stage}` ends after layer {depth - 1}, the last"
        if stage.first != expected:
            return f"`{stage}` stands where layer {expected} comes next"
        expected = stage.last + 1
    return f"{numbered(range(expected, depth))} in none of them" if expected < depth else ""


def _counted(stages: Sequence[LayerRange], depth: int, number: int) -> list[LayerRange]:
    """The ranges that a list of numbers of layers means, as in layouts of Megatron-Core; [] of another list."""
    counts = [stage.first for stage in stages if stage.first == stage.last > 0]
    if len(counts) != len(stages) or len(counts) != number or sum(counts) != depth:
        return []
    return [LayerRange(a, b - 1) for a, b in itertools.pairwise(itertools.accumulate(counts, initial=0))]


def _even(depth: int, stages: int) -> list[LayerRange]:
    """Ranges of all layers that differ in size by at most one."""
    ends = [depth * number // stages for number in range(stages + 1)]
    return [LayerRange(first, after - 1) for first, after in itertools.pairwise(ends)]


def _product(spec: Spec) -> str:
    pp, virtual, _ = pipeline_of(spec)
    return f"{pp} * {virtual}" if virtual > 1 else f"{pp}"


def _depth_label(spec: Spec, message: str) -> tuple[Label, ...]:
    return labelled(spec.model.span("depth"), message) if spec.has_model else ()


def _fitting_pp(spec: Spec, stated: int) -> int:
    """The `pp` that divides the ranks and leaves each stage a layer, nearest to a stated one: if possible one for which
    `stages` are as many, and the other degrees need no change. 0 for none."""
    (_, virtual, _), ranks, depth = pipeline_of(spec), spec.cluster.ranks, spec.subject.depth
    if ranks % stated == 0 and stated * virtual <= depth:
        return stated
    return min(
        (pp for pp in divisors(ranks) if pp * virtual <= depth),
        key=lambda pp: (*_changes(spec.replace(parallel=spec.parallel.replace(pp=pp))), ratio(pp, stated), pp),
        default=0,
    )


def _changes(spec: Spec) -> tuple[bool, bool]:
    """Whether `stages` must change, and degrees, the batch or its micro-batches."""
    pp, virtual, _ = pipeline_of(spec)
    products = (math.prod(stated.value for stated in (m.ep, m.etp) if stated is not None) for m in mixtures_of(spec))
    of_experts = any(stage_ranks(spec) % product for product in products)
    other_stages = spec.parallel.stages is not None and len(spec.parallel.stages) != pp * virtual
    return other_stages, bool(dense_changes(spec)) or of_experts
