"""The report of `moec verify`, and its bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from moec.runtime.verify.toy_spec import Width

BOUND = 1e-9
"""Largest error that float64 arithmetic in another order explains; a wrong plan is off by 1e-4 or more."""

BOUND_FLOAT32 = 1e-4
"""The same for the report in float32."""

FACTORS = {"fp32": 16.0}
FACTOR = 4.0
"""The largest ratio of a plan's error to the unsharded model's, by tensor; docs/verify.md derives both numbers. A
value of fp32 that is rounded to bf16 is 65,536 times as far off: there is room for gradients that almost cancel."""

MEANS = {"fp32": 4.0}
MEAN = 1.3
"""The same for the geometric mean over all gradients. Sums of many ranks in bf16 make every gradient a little worse,
and none 4 times."""

STEP_BOUND = 0.1
"""The largest error of an optimizer's step, relative to the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first op of a plan that departs from the reference."""

    layer: str
    op: str
    value: str
    span: str | None = None
    error: float
    gradient: bool = False
    unlike: bool = False
    """Whether the op differs from the compiled Spec's; no value was compared."""
    attribute: str = ""
    """Of an op that is `unlike`, how an attribute differs: `window = 48 instead of 32`."""

    def __str__(self) -> str:
        place = f"{self.layer}: {self.op}{f' ({self.span})' if self.span else ''}"
        if self.unlike:
            verb = f"has {self.attribute}, which" if self.attribute else "is not what"
            return f"{place}: {self.value} {verb} moec compiles the Spec in the plan to"
        gradient = "the gradient of " if self.gradient else ""
        return f"{place}: {gradient}%{self.value} is off by {self.error:.1e}"


Kind = Literal["output", "loss", "aux_loss", "counts", "routes", "states", "gradient", "parameter", "stopped"]

_FORMATS: Mapping[str, str] = {
    "states": "the new value of {}",
    "gradient": "the gradient of {}",
    "parameter": "{} after one step",
}
"""Messages name a value of these kinds so; values of other kinds are named by `value` alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestDifference:
    """The value with the largest error of all that were compared. `rank` is None for a sum over all ranks.

    If a pass stopped, `kind` is `stopped`, `value` says which pass and why, and the error is infinite.
    """

    kind: Kind
    value: str
    rank: int | None
    error: float
    in_evaluation: bool = False

    def __str__(self) -> str:
        place = "" if self.rank is None else f" on rank {self.rank}"
        evaluation = ", in evaluation" if self.in_evaluation else ""
        return f"{_FORMATS.get(self.kind, '{}').format(self.value)}{place}{evaluation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Errors against float64, over those of the unsharded model in the same dtype; the largest over all tensors.

    `output`: logits and loss, or y and `aux_loss`. `gradient`: gradients, and of a model that of the loss alone.
    `mean`: the geometric mean over the gradients of parameters and x. `step`: the error of one step of the
    file's optimizer relative to the step, where gradients are clear of rounding.
    """

    ok: bool
    dtype: str
    output: float
    gradient: float
    mean: float
    step: float
    worst: str
    bound: float = FACTOR
    mean_bound: float = MEAN
    gradients: Mapping[str, float] = field(default_factory=dict, repr=False)
    """`gradient` by the tensor's name."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report:
    """The result of `moec verify`.

    An error is max|Δ| over the largest element of the reference's tensor, the largest over all ranks.
    `max_output_error` is that of logits, losses and experts' loads; of a layer, y, `aux_loss` and loads.
    `max_gradient_error` is that of gradients, of a layer that of x too, and of parameters after one SGD step. `largest`
    is the value with the largest error. `first_difference` is the first wrong op.

    `rounding` decides too: it compares errors in the plan's own dtype; None where float64 refuses the plan already.
    `float32` decides nothing: there a near tie may send a token to another expert. It is None where fp32 is the plan's
    own dtype. Ops must have the attributes that moec compiles (`docs/verify.md`). A plan that was too large is
    `scaled`, its `widths` shrunk to toy ones; then its graphs must be those that moec compiles, and float64 alone
    decides.
    """

    ok: bool
    world_size: int
    scaled: bool
    max_output_error: float
    max_gradient_error: float
    first_difference: Difference | None
    largest: LargestDifference
    widths: tuple[Width, ...] = ()
    float32: Report | None = None
    rounding: Rounding | None = None
    subject: str = "model"
    """The subject of the plan's file: a `model` or a `layer`."""
    repeats: int = 0
    """The number of layers that were not run, because they repeat others."""
    placements: int = 0
    """The number of steps that were compared with guests, or with experts in other homes."""

    @property
    def worst(self) -> str:
        """The value with the largest difference, in words; the worst in its own dtype if only that refuses it."""
        return str(self.largest) if self.rounding is None or self.rounding.ok else self.rounding.worst

    def __repr__(self) -> str:
        ranks = f"{self.world_size} rank{'s' * (self.world_size != 1)}"
        verdict = "equals" if self.ok else "DOES NOT equal"
        widths = ", at toy widths" * self.scaled
        return (
            f"<Report: the plan of {ranks} {verdict} the unsharded {self.subject}{widths}; largest difference "
            f"{self.largest.error:.1e}: {self.largest}>"
        )
