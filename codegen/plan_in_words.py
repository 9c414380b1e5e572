"""A plan in a few lines, for `repr(plan)`, for notebooks and for the summary of `moec compile`."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from moec.grammar.amounts import amount_of_bytes, si
from moec.grammar.layer_numbers import numbered
from moec.grammar.spec import Spec
from moec.passes.cost.memory import memory_of
from moec.passes.cost.totals import tally
from moec.passes.degrees.degrees import Degrees, choose_degrees

if TYPE_CHECKING:
    from moec.codegen.plan import Plan


def plan_lines(plan: Plan) -> list[tuple[str, str]]:
    """Names and texts of five facts: the subject, its parameters, the ranks, their degrees, a rank's memory."""
    spec, counts = plan.spec, tally(plan.program, plan.spec)
    degrees, device = choose_degrees(spec), spec.cluster.device
    peak = amount_of_bytes(memory_of(plan.program, spec).peak.bytes.total)
    subject, widths = subject_line(spec).split(maxsplit=1)
    return [
        (subject, f"{plan.name}: {widths}"),
        ("parameters", f"{si(counts.parameters)}, {si(counts.active_parameters)} active per token"),
        ("ranks", f"{plan.world_size} × {device.name} ({spec.cluster.name})"),
        ("degrees", "; ".join(degrees_lines(degrees))),
        (
            "per rank",
            f"{si(counts.local_parameters)} parameters, {peak} of {amount_of_bytes(device.memory)} at the peak",
        ),
    ]


def as_text(plan: Plan) -> str:
    """Five lines, for `repr`."""
    return "\n".join(f"{name:<11} {text}" for name, text in plan_lines(plan))


def as_table(plan: Plan) -> str:
    """An HTML table for notebooks. Names come from files, and are escaped."""
    rows = (f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in plan_lines(plan))
    return f"<table>{''.join(rows)}</table>"


def subject_line(spec: Spec) -> str:
    """`model     32 layers (32 MoE), dim 4096, bf16`, or `layer     8 experts, dim 64, fp32`."""
    subject = spec.subject
    mixtures = [moe for moe in subject.mixtures if moe is not None]
    widths = f"dim {subject.dim}, {subject.dtype}"
    if spec.has_model:
        return f"model     {subject.depth} layers ({len(mixtures)} MoE), {widths}"
    return f"layer     {mixtures[0].num_experts} experts, {widths}"


def degrees_lines(degrees: Degrees) -> list[str]:
    """`dp 8 (default), edp 2, ep 4`; where layers differ, a line for each of their meshes; of a pipeline a line before.

    `cp`, `tp` and `etp` of 1 are left out.
    """
    stages = f", {degrees.virtual} stages per rank" if degrees.virtual > 1 else ""
    pipeline = [f"pp {degrees.pp}{stages}, {degrees.schedule}; of each stage:"] if degrees.pp > 1 else []
    dense = f"dp {degrees.dp}{_default('dp' in degrees.stated)}{_above_1('cp', degrees.cp)}{_above_1('tp', degrees.tp)}"
    spread = [f"edp {e.edp}, ep {e.ep}{_default(e.stated)}{_above_1('etp', e.etp)}" for e in degrees.experts]
    if len(spread) > 1:
        layer_lines = [f"{numbered(e.layers)}: {text}" for e, text in zip(degrees.experts, spread, strict=True)]
        return [*pipeline, dense, *layer_lines]
    return [*pipeline, ", ".join([dense, *spread])]


def _above_1(word: str, degree: int) -> str:
    return f", {word} {degree}" if degree > 1 else ""


def _default(stated: bool) -> str:
    return "" if stated else " (default)"
