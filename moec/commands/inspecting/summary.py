"""The summary of `moec compile`: the model, its degrees, its cost, and the next command."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from moec.codegen.launch_command import start_command
from moec.codegen.plan import Plan
from moec.codegen.plan_in_words import degrees_lines, subject_line
from moec.commands.inspecting.pipeline_lines import pipeline_lines
from moec.grammar.amounts import amount_of_bytes, count, si
from moec.grammar.layer_numbers import numbered
from moec.grammar.spec import Spec
from moec.passes.cost.buffers import Bytes
from moec.passes.cost.largest_skew import largest_skew
from moec.passes.cost.memory import Memory, memory_of
from moec.passes.cost.totals import Tally, tally
from moec.passes.degrees.degrees import Degrees, choose_degrees
from moec.passes.degrees.expert_slices import whole_experts
from moec.passes.degrees.guest_slots import greedy_of
from moec.passes.degrees.stated_degrees import mixtures_of, zero_of
from moec.passes.guests.place_guests import guest_bytes, guests_of, homes_only
from moec.passes.ir import Program

LARGEST_PARTS = 4
"""The number of parts of the peak that the summary names."""
NEARLY_FULL = 0.95
"""The share of a device's memory above which the summary of a searched plan says so."""


def summary(plan: Plan, program: Program, path: Path, seconds: float, chosen: Sequence[str] = ()) -> str:
    """The summary as text. `chosen`: what a search says of its choice."""
    spec, counts = plan.spec, tally(program, plan.spec)
    degrees = choose_degrees(spec)
    unit = "image" if spec.has_model and spec.model.length is not None else "sequence"
    rank_sequences = counts.sequences // degrees.dp
    at_once = count(max(1, rank_sequences // program.microbatches), unit)
    recomputed = any(block.recompute != "none" for block in program.blocks)
    saved = _activations(counts, program.microbatches) + (", before `recompute`" if recomputed else "")
    lines = [
        f"compiled {plan.name} in {seconds:.2f} s to {path}",
        "",
        f"  {subject_line(spec)}: {si(counts.parameters)} parameters, {si(counts.active_parameters)} active per token",
        f"  ranks     {program.num_ranks} × {spec.cluster.device.name} ({spec.cluster.name})",
        "  degrees   " + "\n            ".join(degrees_lines(degrees)),
        *(["  chosen    " + "\n            ".join(chosen)] if chosen else []),
        *_whole(spec),
        *_frozen(plan),
        *_zero(spec),
        f"  per rank  {si(counts.local_parameters)} parameters; activations of {at_once}, kept for backward: {saved}",
        *_memory(plan, program),
        *_guests(plan, program, degrees),
        f"  a step    {count(counts.sequences, unit)}, {si(counts.tokens)} tokens, "
        f"{si(counts.flops_per_token, 'G')}FLOP per token{_microbatches(program, rank_sequences, unit)}",
        *(pipeline_lines(program, spec) or [f"  its order {program.orders[0]}"]),
        *_recomputed(program),
    ]
    for index, flow in enumerate(counts.traffic):
        head = "  sends     " if index == 0 else "            "
        group = f"{flow.group} ({count(flow.ranks, 'rank')})"
        lines.append(f"{head}{amount_of_bytes(flow.bytes)} per rank and step over {group}: {flow.purpose}")
    if counts.imbalance > 1:
        lines.append(f"  load      the busiest rank gets {counts.imbalance:.2f} × the mean, by `train.routing`")
    if warning := _whole_vocabulary(spec, degrees.tp):
        lines.append(f"  warning   {warning}")
    if not spec.has_model:
        lines += ["", f"next: `moec verify {quote(str(path))}`, then `moec.layer({str(path)!r})` in your own model"]
    else:
        start = start_command(plan, path)
        lines += ["", f"next: `moec verify {quote(str(path))}`, then `{start}` with `moec.load({str(path)!r})` in it"]
    return "\n".join(lines)


def _whole(spec: Spec) -> list[str]:
    """The layers whose experts `etp` does not cut, by kind."""
    return [
        f"  whole     {word} experts of {numbered(layers)}: etp does not cut them, and gives more data-parallel ranks"
        for word, layers in whole_experts(spec, mixtures_of(spec)).items()
    ]


def _frozen(plan: Plan) -> list[str]:
    """The number of parameters that train; nothing if all train."""
    parts = plan.spec.train.frozen if plan.spec.train else ()
    if not parts:
        return []
    trained = sum(math.prod(p.shape) for p in plan.parameters.values() if not p.frozen)
    return [f"  trains    {si(trained)} parameters; {', '.join(parts)} {'are' if len(parts) > 1 else 'is'} frozen"]


def _zero(spec: Spec) -> list[str]:
    """The tensors that ZeRO cuts, and that `offload`, which needs CPUs as devices, has no effect."""
    zero, offload = zero_of(spec), spec.parallel.offload
    dense = "dp" if spec.parallel.cp in (None, 1) else "dp and cp"
    lines = [f"  zero      {zero}: cut over {dense}, of experts over edp, are {_CUT[zero]}"] if zero else []
    return lines + ([f"  offload   {offload}: changes nothing, the devices are CPUs"] if offload != "none" else [])


_CUT = {
    1: "masters and optimizer states",
    2: "masters, optimizer states and gradients",
    3: "masters, optimizer states, gradients and weights",
}


def _activations(counts: Tally, microbatches: int) -> str:
    """`1.2 MB` of a micro-batch, and the busiest rank's if it has more."""
    bytes_of_step = counts.activation_bytes, counts.most_activation_bytes
    mean, largest = (amount_of_bytes(size / microbatches) for size in bytes_of_step)
    return mean if mean == largest else f"{mean}, {largest} on the busiest rank"


def _memory(plan: Plan, program: Program) -> list[str]:
    """The peak of a training step on the busiest rank, its parts, and the largest load of experts that fits."""
    memory = memory_of(program, plan.spec)
    capacity = plan.spec.cluster.device.memory
    line = peak_line(memory, capacity)
    details = (_parts_of(memory.peak.bytes), *skew_lines(largest_skew(program, plan.spec)))
    if plan.report is not None and memory.peak.bytes.total > NEARLY_FULL * capacity:
        details += (f"more than {NEARLY_FULL:.0%} is filled: less `memory` in the device makes the search leave room",)
    return [f"  memory    {line}", *(f"            {line}" for line in details)]


def _guests(plan: Plan, program: Program, degrees: Degrees) -> list[str]:
    """The slots for guests, and what they take and send where all are filled."""
    homes = ["  homes     experts may move, with masters and optimizer states"] if greedy_of(plan.spec) else []
    slots = [f"{e.guests} in {numbered(e.layers)}" for e in degrees.experts if e.guests]
    if not slots:
        return homes
    peaks = [memory_of(each, plan.spec).peak.bytes.total for each in (program, homes_only(program))]
    bodies = [program.body(layer) for layer in program.layers]
    sent = sum(guests_of(body) * sum(guest_bytes(body)) for body in bodies)
    filled = f"all filled they take {amount_of_bytes(peaks[0] - peaks[1])} of the peak"
    line = f"{filled}, and send {amount_of_bytes(sent)} per rank and step"
    return [*homes, f"  guests    slots of a rank: {', '.join(slots)}; {line}"]


def _parts_of(peak: Bytes) -> str:
    """`gradients 28.1 GB, parameters 5.84 GB, activations 2.98 GB, others 873 MB`: the activations and the largest."""
    sizes = sorted(((name, size) for name, size in peak.of.items() if size), key=lambda part: -part[1])
    named = [part for part in sizes if part in sizes[:LARGEST_PARTS] or part[0] == "activations"]
    other_bytes = peak.total - sum(size for _, size in named)
    listed = [*named, ("others", other_bytes)] if len(named) < len(sizes) else named
    return ", ".join(f"{name} {amount_of_bytes(size)}" for name, size in listed)


def peak_line(memory: Memory, capacity: float) -> str:
    """`61.3 GB of 80 GB at the peak of a step, in the backward of layer 31`."""
    peak = memory.peak
    sizes = f"{amount_of_bytes(peak.bytes.total)} of {amount_of_bytes(capacity)}"
    return f"{sizes} at the peak of a step, in the {peak.event}"


def skew_lines(skew: float | None) -> list[str]:
    """The largest load that fits (`largest_skew`), as at most one line."""
    return [f"it fits while no rank's experts get more than {skew:.2f} × the mean number of rows"] if skew else []


def _microbatches(program: Program, sequences: int, unit: str) -> str:
    """`, in 4 micro-batches of 2 sequences per rank`, or nothing if there is one."""
    parts = program.microbatches
    return f", in {parts} micro-batches of {count(max(1, sequences // parts), unit)} per rank" * (parts > 1)


def _recomputed(program: Program) -> list[str]:
    """`recompute experts in layers 1, 3`, and a line for each further part; nothing if no layer recomputes."""
    return [
        f"  {'recompute' if index == 0 else '         '} {part} in {numbered(numbers)}"
        for index, (part, numbers) in enumerate(recomputing_layers(program).items())
    ]


def recomputing_layers(program: Program) -> dict[str, list[int]]:
    """The numbers of the layers whose backward recomputes a part, by part."""
    layers: dict[str, list[int]] = {}
    for layer in program.layers:
        layers.setdefault(program.body(layer).recompute, []).append(layer.number)
    layers.pop("none", None)
    return layers


def _whole_vocabulary(spec: Spec, tp: int) -> str:
    vocab = spec.model.vocab if spec.has_model else None
    if vocab is None or vocab % tp == 0:
        return ""
    fits = -(-vocab // tp) * tp
    return f"tp = {tp} does not divide the vocabulary: every rank has all of it; `vocab = {fits}` would be divided"
