"""The JSON document of `moec verify`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TypeVar

from moec.commands.console.output import document
from moec.runtime.verify.verify_report import BOUND, BOUND_FLOAT32, STEP_BOUND, Report

Copied = TypeVar("Copied")


@document
class WidthDocument:
    """A width that was shrunk to a toy one."""

    name: str
    before: int
    toy: int


@document
class LargestDocument:
    """The value with the largest error of all that were compared."""

    kind: str
    """output, loss, aux_loss, counts, routes, states, gradient, parameter (after one step), or stopped: no value, but
    a pass that did not run to its end."""
    value: str
    """The tensor's name; of a stopped pass, why it stopped."""
    rank: int | None
    """Null for sums over all ranks."""
    error: float | None
    """The largest difference over the largest element of the unsharded model's tensor; null if it is not finite."""
    in_evaluation: bool


@document
class FirstDocument:
    """The first op, in the order of the run, whose value or gradient is wrong."""

    layer: str
    op: str
    value: str
    span: str | None
    """The line of the `.moe` file."""
    error: float | None
    gradient: bool
    unlike: bool
    """Whether the op differs from the compiled file, and no value was compared."""
    attribute: str
    """Of such an op, how an attribute differs: `window = 48 instead of 32`. Empty for other differences."""


@document
class ErrorsDocument:
    """Errors in one dtype against the unsharded model in the same dtype; null if not finite."""

    ok: bool
    bound: float
    max_output_error: float | None
    max_gradient_error: float | None
    largest_difference: LargestDocument


@document
class RoundingDocument:
    """The plan's errors in its own dtype over those of the unsharded model in that dtype; null if not finite."""

    ok: bool
    dtype: str
    output: float | None
    gradient: float | None
    mean: float | None
    """The geometric mean over all gradients."""
    step: float | None
    """The error of one step of the optimizer, relative to the step."""
    worst: str
    """What comes nearest to its bound, or exceeds it most."""
    bound: float
    mean_bound: float
    step_bound: float


@document
class VerifyDocument:
    """Whether a plan equals the unsharded model or layer."""

    plan: str
    ok: bool
    subject: str
    """model or layer."""
    ranks: int
    scaled: bool
    """Whether toy widths were used."""
    widths: list[WidthDocument]
    """The widths that were shrunk."""
    repeats: int
    """Layers that were not run: of equal layers two were."""
    placements: int
    """Steps that were compared with guests, or with experts in other homes (`adapt`)."""
    first_difference: FirstDocument | None
    float64: ErrorsDocument
    rounding: RoundingDocument | None
    """Null where float64 alone decides: it refuses the plan, or widths are toy ones."""
    float32: ErrorsDocument | None
    """Decides nothing; null where it was not run."""


def verify_document(path: Path, report: Report) -> VerifyDocument:
    """The report on the plan in `path`."""
    difference = report.first_difference
    return VerifyDocument(
        plan=str(path),
        ok=report.ok,
        subject=report.subject,
        ranks=report.world_size,
        scaled=report.scaled,
        widths=[_copied(WidthDocument, width) for width in report.widths],
        repeats=report.repeats,
        placements=report.placements,
        first_difference=_copied(FirstDocument, difference) if difference else None,
        float64=_errors(report, BOUND),
        rounding=_copied(RoundingDocument, report.rounding, step_bound=STEP_BOUND) if report.rounding else None,
        float32=_errors(report.float32, BOUND_FLOAT32) if report.float32 else None,
    )


def _copied(cls: type[Copied], source: object, **extra: float) -> Copied:
    """The document `cls` with the values of the same fields of the dataclass `source`, and `extra` values."""
    return cls(**{field.name: getattr(source, field.name) for field in fields(cls) if field.name not in extra}, **extra)  # type: ignore[arg-type]


def _errors(report: Report, bound: float) -> ErrorsDocument:
    return ErrorsDocument(
        ok=report.max_output_error <= bound and report.max_gradient_error <= bound,
        bound=bound,
        max_output_error=report.max_output_error,
        max_gradient_error=report.max_gradient_error,
        largest_difference=_copied(LargestDocument, report.largest),
    )
