"""What `moec verify` reports, and its bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moec.runtime.verify.toy_spec import Width

BOUND = 1e-9
"""Largest error that float64 arithmetic in another order explains; a wrong plan is off by 1e-4 or more."""

BOUND_FLOAT32 = 1e-4
"""The same for the report in float32."""

FACTORS = {"fp32": 16.0}
FACTOR = 4.0
"""How many times the unsharded model's error a plan's may be, by tensor; docs/verify.md says how both were found. A
value of fp32 that is rounded to bf16 is 65,536 times as far off: there is room for gradients that almost cancel."""

MEANS = {"fp32": 4.0}
MEAN = 1.3
"""The same for the geometric mean over all gradients. Sums of many ranks in bf16 make every gradient a little worse,
and none 4 times."""

STEP_BOUND = 0.1
"""The largest error of an optimizer's step, relative to the step."""


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
    """Whether the op differs from the compiled Spec, and no value was compared."""

    def __str__(self) -> str:
        if self.unlike:
            place = f" ({self.span})" if self.span else ""
            return f"{self.layer}: {self.op}{place}: {self.value} is not what moec compiles the Spec in the plan to"
        what = "the gradient of " if self.gradient else ""
        place = f" ({self.span})" if self.span else ""
        return f"{self.layer}: {self.op}{place}: {what}%{self.value} is off by {self.error:.1e}"


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

    def to_json(self) -> dict[str, object]:
        """What `moec verify --json` prints."""
        names = ("ok", "dtype", "output", "gradient", "mean", "step", "worst", "bound", "mean_bound")
        return {name: getattr(self, name) for name in names} | {"step_bound": STEP_BOUND}


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
