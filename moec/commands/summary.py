"""The summary of `moec compile`: the model, its degrees, its cost, and the next command."""

from __future__ import annotations

from pathlib import Path

from moec.codegen.plan import Plan
from moec.grammar.rules import numbered
from moec.grammar.spec import Spec
from moec.passes.cost.totals import Tally, tally
from moec.passes.ir import Program
from moec.passes.place.degrees import Degrees, choose_degrees


def summary(plan: Plan, program: Program, path: Path | None, seconds: float) -> str:
    """The summary as text, from the plan alone."""
    spec, counts = plan.spec, tally(program, plan.spec)
    degrees = choose_degrees(spec)
    states, memory = amount_of_bytes(counts.state_bytes), amount_of_bytes(spec.cluster.device.memory)
    at_once = count(max(1, counts.sequences // degrees.dp), "sequence")
    lines = [
        f"compiled {plan.name} in {seconds:.2f} s" + (f" to {path}" if path else ""),
        "",
        f"  {_subject(spec)}: {si(counts.parameters)} parameters, {si(counts.active_parameters)} active per token",
        f"  ranks     {degrees.ranks} × {spec.cluster.device.name} ({spec.cluster.name})",
        "  degrees   " + "\n            ".join(_degrees(degrees)),
        f"  per rank  {si(counts.local_parameters)} parameters; weights, gradients and optimizer {states} of {memory}",
        f"            activations of {at_once}, kept for backward: {_activations(counts)}",
        f"  a step    {counts.sequences} sequences, {si(counts.tokens)} tokens, "
        f"{si(counts.flops_per_token, 'G')}FLOP per token",
    ]
    for index, flow in enumerate(counts.traffic):
        head = "  sends     " if index == 0 else "            "
        lines.append(
            f"{head}{amount_of_bytes(flow.bytes)} per rank and step over {flow.group} ({flow.ranks}): {flow.purpose}"
        )
    if counts.imbalance > 1:
        lines.append(f"  load      the busiest rank gets {counts.imbalance:.2f} × the mean, by `train.routing`")
    for warning in (_does_not_fit(counts, spec.cluster.device.memory), _whole_vocabulary(spec, degrees.tp)):
        if warning:
            lines.append(f"  warning   {warning}")
    if path and not spec.has_model:
        lines += ["", f"next: `moec verify {path}`, then `moec.layer({str(path)!r})` in your own model"]
    elif path:
        launch = f"torchrun --nproc-per-node {degrees.ranks} train.py"
        lines += ["", f"next: `moec verify {path}`, then `{launch}` with `moec.load({str(path)!r})` in it"]
    return "\n".join(lines)


def _subject(spec: Spec) -> str:
    """`model     32 layers (32 MoE), dim 4096, bf16`, or `layer     8 experts, dim 64, fp32`."""
    subject = spec.subject
    mixtures = [moe for moe in subject.mixtures if moe is not None]
    widths = f"dim {subject.dim}, {subject.dtype}"
    if spec.has_model:
        return f"model     {subject.depth} layers ({len(mixtures)} MoE), {widths}"
    return f"layer     {mixtures[0].num_experts} experts, {widths}"


def _degrees(degrees: Degrees) -> list[str]:
    """`dp 8 (default), edp 2 (default), ep 4; every other 1`; where layers differ, a line for each of their meshes."""
    dense = f"dp {degrees.dp}{_default(degrees.dp_stated)}"
    if degrees.tp > 1:
        dense += f", tp {degrees.tp}"
    spread = [f"edp {e.edp}{_default(False)}, ep {e.ep}{_default(e.stated)}" for e in degrees.experts]
    if len(spread) > 1:
        of_layers = [f"{numbered(e.layers)}: {text}" for e, text in zip(degrees.experts, spread, strict=True)]
        return [f"{dense}; every other 1", *of_layers]
    return [", ".join([dense, *spread]) + "; every other 1"]


def _default(stated: bool) -> str:
    return "" if stated else " (default)"


def _activations(counts: Tally) -> str:
    """`1.2 MB`, and the busiest rank's if it has more."""
    mean, most = (amount_of_bytes(size) for size in (counts.activation_bytes, counts.most_activation_bytes))
    return mean if mean == most else f"{mean}, {most} on the busiest rank"


def _does_not_fit(counts: Tally, memory: float) -> str:
    if counts.state_bytes > memory:
        return "the states alone do not fit the device: use more ranks, or fewer experts per rank"
    if counts.state_bytes + counts.most_activation_bytes > memory:
        return "states and activations do not fit the device: use more ranks, or micro-batches"
    return ""


def _whole_vocabulary(spec: Spec, tp: int) -> str:
    if not spec.has_model or (vocab := spec.model.vocab) % tp == 0:
        return ""
    fits = -(-vocab // tp) * tp
    return f"tp = {tp} does not divide the vocabulary: every rank has all of it; `vocab = {fits}` would be divided"


def si(number: float, billion: str = "B") -> str:
    """Three digits and a power of ten: `1.57 M`; `billion` is "G" for units such as FLOP."""
    for scale, unit in ((1e12, " T"), (1e9, f" {billion}"), (1e6, " M"), (1e3, " k")):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.3g}"


def count(number: int, what: str) -> str:
    """`1 rank`, `4 ranks`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def amount_of_bytes(number: float) -> str:
    """Three digits and a power of ten: `1.57 MB`."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.3g} B"
