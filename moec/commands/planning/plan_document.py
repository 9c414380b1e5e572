"""The JSON document of `moec plan`."""

from __future__ import annotations

from moec.commands.console.output import document


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
class PlannedLoad:
    """How uneven the load of experts is, as rows of the busiest rank over the mean."""

    busiest: float
    """Of the most uneven layer, by the file's `train.routing`."""
    largest_that_fits: float | None
    """Null where every load fits."""
    step_time_at_2_s: float | None
    """The step's seconds where the busiest rank has twice the mean; null where no load is so uneven."""


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
    largest_tenants: list[Tenant]
    exposed_communication_s: float
    """Collectives beside which nothing is computed."""
    loads: PlannedLoad
    calibrated: bool
    """Whether the cluster states what is achieved of its peaks and bandwidths."""
