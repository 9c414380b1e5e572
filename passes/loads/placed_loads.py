"""The loads of a trace under a placement of experts, and the file with what a plan keeps of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from moec.grammar.amounts import count
from moec.grammar.checking.supported import require_supported
from moec.grammar.diagnostics import Diagnostic, DiagnosticError, diagnose
from moec.grammar.spec import Spec, Trace
from moec.passes.degrees.degrees import choose_degrees
from moec.passes.degrees.stated_degrees import divisors
from moec.passes.loads.figures import Rows, measured
from moec.passes.loads.placements import greedy, replicated, rotated, rows_of_copies, rows_of_homes
from moec.passes.loads.trace_file import Trace as TraceCounts
from moec.passes.loads.trace_file import read_trace

AT_ONCE = 2**24
"""The most elements of an array while experts are placed."""

MOST_PLACED = 2**13
"""The most cases whose experts are placed, a layer in an iteration each: seconds for 256 experts."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where experts are: in order, or placed by the loads `age` samples ago. `extra`: copies of a layer's experts."""

    kind: Literal["contiguous", "greedy", "replicate"] = "contiguous"
    extra: int = 0
    age: int = 1

    def __str__(self) -> str:
        return f"replicate={self.extra}" if self.extra else self.kind


@dataclass(frozen=True)
class PlacedLoads:
    """The loads of a trace for a model, whose experts lie as `placement` says."""

    trace: TraceCounts
    placement: Placement
    experts: int
    layers: int

    @cached_property
    def _rows(self) -> dict[int, Rows]:
        return {}

    @cached_property
    def iterations(self) -> Any:
        """The numbers of the iterations that count, of those that are read."""
        iterations, layers, _ = self.trace.counts.shape
        first, every = 0, 1
        if self.placement.kind != "contiguous":
            first = self.placement.age
            every = -(-(iterations - first) * layers // MOST_PLACED)
        return np.arange(first, iterations, every)

    def rows(self, ranks: int) -> Rows:
        """The rows of each rank [iterations, layers, ranks] where so many share the experts of a layer."""
        if ranks not in self._rows:
            self._rows[ranks] = self._rows_on(ranks)
        return self._rows[ranks]

    def _rows_on(self, ranks: int) -> Rows:
        counts, now, age = self.trace.counts, self.iterations, self.placement.age
        _, layers, experts = counts.shape
        if self.placement.kind == "contiguous" or ranks in (1, experts):
            return counts[now].reshape(len(now), layers, ranks, experts // ranks).sum(-1)
        before, after = (counts[at].reshape(-1, experts) for at in (now - age, now))
        of_layer = np.tile(np.arange(layers), len(now))
        at_once = max(1, AT_ONCE // (experts * max(ranks, experts + self.placement.extra)))
        parts = [slice(first, first + at_once) for first in range(0, len(after), at_once)]
        rows = [self._placed(before[part], after[part], of_layer[part], ranks) for part in parts]
        return np.concatenate(rows).reshape(len(now), layers, ranks)

    def _placed(self, before: Any, after: Any, layers: Any, ranks: int) -> Rows:
        if self.placement.kind == "greedy":
            return rows_of_homes(after, rotated(greedy(before, ranks), layers, ranks), ranks)
        return rows_of_copies(after, replicated(before, ranks, self.placement.extra))


def placed_loads(spec: Spec, folder: Path, placement: Placement) -> tuple[Spec, PlacedLoads] | None:
    """The file with what a plan keeps of its trace, which is relative to `folder`; None for one without a trace.

    Raises `DiagnosticError`: MOE0510 and MOE0512 for a trace that cannot be read, MOE0511 for one of another model, and
    MOE0513 for a placement that has no price.
    """
    routing = spec.train.routing if spec.train is not None else None
    if problems := list(_unplaceable(spec, placement)):
        raise DiagnosticError(problems)
    if not isinstance(routing, Trace):
        return None
    span = routing.span("path")
    beside = folder / Path(span.source.name).parent if span is not None else folder
    require_supported(spec)
    trace = read_trace(beside / routing.path, span)
    if problems := list(_of_another_model(spec, routing, trace, placement)):
        raise DiagnosticError(problems)
    mixtures = [moe for moe in spec.subject.mixtures if moe is not None]
    loads = PlacedLoads(trace, placement, mixtures[0].num_experts, len(mixtures))
    sharing = [ranks for ranks in divisors(loads.experts) if ranks > 1]
    if placement.kind != "contiguous":
        sharing = [ranks for ranks in sharing if ranks in {*_stated(spec), loads.experts}]
    kept = measured(routing.path, {ranks: loads.rows(ranks) for ranks in sharing}, loads.layers)
    assert spec.train is not None
    return spec.replace(train=spec.train.replace(routing=kept)), loads


def _stated(spec: Spec) -> set[int]:
    """The numbers of ranks that share the experts of some layers."""
    return {experts.ep for experts in choose_degrees(spec).experts}


def _unplaceable(spec: Spec, placement: Placement) -> Iterator[Diagnostic]:
    if placement == Placement():
        return
    routing, what = spec.train.routing if spec.train is not None else None, f"`--placement {placement}`"
    if not isinstance(routing, Trace):
        help = 'give the loads of earlier steps: `train { routing = trace("loads.npz") }`'
        yield diagnose(
            "MOE0513", spec.train.span("routing") if spec.train else None, f"{what} needs a trace", help=help
        )


def _of_another_model(spec: Spec, routing: Trace, trace: TraceCounts, placement: Placement) -> Iterator[Diagnostic]:
    mixtures = [moe for moe in spec.subject.mixtures if moe is not None]
    _, layers, experts = trace.counts.shape
    span, numbers = routing.span("path"), {moe.num_experts for moe in mixtures}
    if numbers != {experts}:
        has = f"the model's layers have {' and '.join(map(str, sorted(numbers)))}" if numbers else "the model has none"
        several = "a trace has one number for all layers: `uniform` and `zipf` are for models with several"
        help = several if len(numbers) > 1 else "give a trace of this model"
        yield diagnose("MOE0511", span, f"the trace has {experts} experts; {has}", help=help)
    elif layers not in (1, len(mixtures)):
        message = f"the trace has {layers} layers; the model has {len(mixtures)} with experts"
        yield diagnose("MOE0511", span, message, help="give each of these a layer, or one for all")
    elif placement != Placement() and placement.age >= len(trace.counts):
        message = f"{len(trace.counts)} iterations are read, and none is {placement.age} samples after another"
        yield diagnose("MOE0513", span, message, help="give a smaller `--age`, or a longer trace")
    elif placement.kind == "replicate":
        few = min((ranks for ranks in _stated(spec) if ranks > 1), default=1)
        if placement.extra > (most := experts * (few - 1)):
            where = f"{count(few, 'rank')} {'have' if few > 1 else 'has'} room for {most} copies"
            message = f"{where} of {experts} experts, not {placement.extra}"
            yield diagnose("MOE0513", span, message, help="ask for fewer, or a larger `ep`")
