"""The JSON document of `moec plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from moec.codegen.search_report import GIGABYTE, OtherPlan, PlannedCandidates, UnusedValue, other_plan
from moec.commands.console.output import document
from moec.passes.search.candidate import Candidate

if TYPE_CHECKING:
    from moec.passes.search.ways_out import WayOut
    from moec.passes.search.why_not import WhyNot


@document
class PlannedExperts:
    """The expert degrees of some layers."""

    layers: list[int]
    ep: int
    etp: int
    edp: int


@document
class PlannedDegrees:
    """The words of `parallel`."""

    dp: int
    cp: int
    tp: int
    pp: int
    virtual: int
    schedule: str | None
    """Null without a pipeline."""
    experts: list[PlannedExperts]
    zero: int
    recompute: dict[str, list[int]]
    """The layers that recompute a part in backward, by part."""
    microbatches: int


@document
class Tenant:
    """What takes memory at the peak."""

    kind: str
    gb: float


@document
class PlannedTrace:
    """The trace of `train.routing`, and where experts are."""

    file: str
    iterations: int
    read: int
    """The iterations that count, evenly spaced."""
    ranks: int
    placement: Literal["contiguous", "greedy", "replicate"]
    extra: int
    """Copies of experts in each layer."""
    age: int | None
    """How many iterations of the file ago the loads were by which experts are placed; null where they are in order."""
    layer_time_p50_s: float
    """Both passes of a layer with experts for a micro-batch, on average over the layers of a step."""
    layer_time_p95_s: float
    even_layer_time_s: float
    """With an even load."""
    copies_gb: float
    """What the copies take on a rank, beside `memory_gb`."""
    copies_time_s: float
    """The sums of their gradients in a step, beside `step_time_s`, if nothing hides them."""


@document
class PlannedLoad:
    """How uneven the load of experts is, as rows of the busiest rank over the mean."""

    busiest: float
    """For which time is planned: of the most uneven layer by `train.routing`, of a trace the 95th percentile of steps.
    """
    layer_p50: float | None
    """Over layers and iterations; null for a plan that keeps only numbers of its trace."""
    layer_p95: float | None
    step_time_p50_s: float | None
    """Over iterations; the prediction is for the 95th percentile."""
    step_time_p95_s: float
    kept: float
    """Of the rows that a rank keeps over all its layers, for which memory is planned."""
    one_layer: float
    """Of one layer while it runs."""
    trace: PlannedTrace | None
    """Null without the file of a trace."""
    largest_that_fits: float | None
    """With the copies of a placement, and the same rank the busiest in every layer; null where every load fits."""
    step_time_at_2_s: float | None
    """The step's seconds where the busiest rank has twice the mean; null where no load is so uneven."""


@document
class WhyNotDocument:
    """Plans with the words of `--why-not`."""

    best: OtherPlan
    alone: OtherPlan | None
    """With all else as in the plan; null where that breaks a rule."""
    broken_rule: str | None
    """The code and message of that rule."""
    with_one_word: dict[str, OtherPlan]
    """Of several words, the best plan with each and without the others; empty where the plan has all of them."""


@document
class WayOutOfMemory:
    """A plan that fits: with another value for a word of `parallel`, with all words open, or on more devices."""

    word: str
    """Empty for all words, and for more devices."""
    ranks: int
    words: dict[str, int | str]
    """The values that its search chose: of that word or of all, and of the words that the file leaves open."""
    step_time_s: float
    memory_gb: float


@document
class Change:
    """A word of `parallel` or `train`, `ranks` or `device`, with the values of the other plan and of this one; null
    where a plan has none."""

    kind: Literal["+", "~", "-"]
    word: str
    before: str | None
    after: str | None
    reshards: bool
    """Whether ranks have other parts of a checkpoint: each reads what it needs."""


@document
class Against:
    """The plan of `--against`, and what differs from it."""

    ranks: int
    step_time_s: float
    memory_gb: float
    changes: list[Change]


@document
class PlannedPlacement:
    """What placing experts elsewhere takes in some layers (`adapt`), in predicted seconds."""

    layers: list[int]
    row_s: float
    """Of a row more on the busiest rank and its wire, forward and backward."""
    guest_s: float | None
    """Of a guest that a rank sends or gets in a step; null without slots for guests."""
    move_s: float | None
    """Of an expert that a rank sends or gets once; null where homes do not move."""


@document
class StepPrediction:
    """The predicted step of a plan. Seconds are of a step, memory is that of the rank with the highest peak."""

    parallel: PlannedDegrees
    step_time_s: float
    terms: dict[str, float]
    """Seconds by what takes them; they add up to the step."""
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    """Of the model: forward and backward, without recomputation, with the causal half of attention."""
    mfu: float
    """These over the device's dense peak in the model's dtype, as a fraction."""
    memory_gb: float
    """At the peak."""
    peak_event: str
    """When that is."""
    peak_ranks: str
    """The ranks that have it."""
    capacity_gb: float
    fits: bool
    """With the copies of a placement."""
    largest_tenants: list[Tenant]
    exposed_communication_s: float
    """Collectives beside which nothing is computed."""
    loads: PlannedLoad
    placements: list[PlannedPlacement]
    """By kinds of layers; empty without `placement`."""
    calibrated: bool
    """Whether the cluster states what is achieved of its peaks and bandwidths."""
    candidates: PlannedCandidates | None
    """Null where no search chose a word."""
    runners_up: list[OtherPlan]
    """The next plans, the fastest first, with experts in order."""
    unused: list[UnusedValue]
    """The values of lists that no plan has."""
    why_not: WhyNotDocument | None
    """What speaks against the words of `--why-not`."""
    against: Against | None
    """What differs from the plan of `--against`."""
    ways_out: list[WayOutOfMemory]
    """Of a step that does not fit: what would make it fit."""


def why_not_document(found: WhyNot) -> WhyNotDocument:
    """The document of what speaks against words."""
    alone = found.alone
    return WhyNotDocument(
        best=other_plan(found.best),
        alone=other_plan(alone) if isinstance(alone, Candidate) else None,
        broken_rule=None if isinstance(alone, Candidate) else f"{alone.code}: {alone.message}",
        with_one_word={word: other_plan(near) for word, near in found.nearest.items()},
    )


def way_out(way: WayOut) -> WayOutOfMemory:
    """The document of a way out."""
    return WayOutOfMemory(
        word=way.word,
        ranks=way.plan.spec.cluster.ranks,
        words=dict(way.plan.words),
        step_time_s=float(way.plan.prediction.step.total),
        memory_gb=float(way.plan.prediction.memory.peak.bytes.total) / GIGABYTE,
    )
