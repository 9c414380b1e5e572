"""`moec inspect PLAN --memory`: a rank's memory over a training step, as text, JSON or a plot. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from moec.codegen.plan import Plan
from moec.commands.console.output import emit
from moec.commands.console.replace_file import not_written
from moec.commands.console.table import amount_or_dash, table
from moec.commands.inspecting.inspect_documents import LayersMemory, MemoryDevice, MemoryDocument, MemoryMoment
from moec.commands.inspecting.memory_plot import svg
from moec.commands.inspecting.pipeline_lines import pipeline_lines
from moec.commands.inspecting.summary import peak_line, skew_lines
from moec.driver import load
from moec.grammar.amounts import amount_of_bytes, count
from moec.grammar.layer_numbers import numbered
from moec.passes.cost.buffers import MEMORY_KINDS
from moec.passes.cost.largest_skew import largest_skew
from moec.passes.cost.memory import ALWAYS, DEVICE_BYTES, Memory, memory_of, ranks_in_words
from moec.passes.cost.stage_memory import Moment

BAR = 40
"""Characters of the longest bar."""


def run(path: Path, style: str) -> None:
    """Prints the parts of the peak, the distinct layers, and the step's events as bars; or all of it as JSON."""
    plan = load(path)
    memory = memory_of(plan.program, plan.spec)
    emit(style, lambda: _text(plan, memory), lambda: _document(plan, memory))


def _document(plan: Plan, memory: Memory) -> MemoryDocument:
    device = plan.spec.cluster.device
    layers = [
        LayersMemory(
            layers=list(layer.numbers),
            parameters=layer.weights.masters,
            copies=layer.weights.compute_copies,
            gradients=layer.weights.pass_gradients,
            optimizer=layer.weights.optimizer_states,
            kept_for_backward={str(name): size for name, size in layer.kept.of.items()},
        )
        for layer in memory.layers.values()
    ]
    return MemoryDocument(
        plan=plan.name,
        device=MemoryDevice(name=device.name, memory=device.memory),
        peak=_moment(memory.peak),
        largest_skew=largest_skew(plan.program, plan.spec),
        moments=[_moment(moment) for moment in memory.moments],
        layers=layers,
    )


def write_plot(path: Path, file: Path) -> None:
    """Writes the plot to `file`. Raises `DiagnosticError` where it cannot be written."""
    plan = load(path)
    picture = svg(plan.name, memory_of(plan.program, plan.spec), plan.spec.cluster.device.memory)
    try:
        file.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise not_written(file, error.strerror) from None


def _moment(moment: Moment) -> MemoryMoment:
    return MemoryMoment(
        event=moment.event, total=moment.bytes.total, bytes={str(name): size for name, size in moment.bytes.of.items()}
    )


def _text(plan: Plan, memory: Memory) -> Iterator[str]:
    device, peak = plan.spec.cluster.device, memory.peak
    yield f"{plan.name}: {peak_line(memory, device.memory)}"
    skew = largest_skew(plan.program, plan.spec)
    yield from (f"  {line}" for line in (["every load of the experts fits"] if skew is None else skew_lines(skew)))
    if device.kind in DEVICE_BYTES:
        yield f"  {amount_of_bytes(DEVICE_BYTES[device.kind])} of it for the device's context and communicators"
    yield from pipeline_lines(plan.program, plan.spec)
    yield ""
    if plan.pipeline > 1:
        yield f"  Below: {ranks_in_words(plan.program, memory.stages)}, whose peak is the largest."
    shown = [kind for kind in MEMORY_KINDS if any(m.bytes.of.get(kind) for m in memory.moments)]
    rows: list[tuple[str, ...]] = [("what", "at the peak", "at most", "when")]
    for kind in shown:
        largest = max(memory.moments, key=lambda moment: moment.bytes.of.get(kind, 0.0))
        sizes = [bytes.of.get(kind, 0.0) for bytes in (peak.bytes, largest.bytes)]
        rows.append((kind, *map(amount_or_dash, sizes), "always" if kind in ALWAYS else largest.event))
    yield from table(rows, range(1, len(rows[0])))
    yield ""
    rows = [("layers", "parameters", "copies", "gradients", "optimizer", "kept for backward")]
    for layer in memory.layers.values():
        weights = layer.weights
        sizes = [
            weights.masters,
            weights.compute_copies,
            weights.pass_gradients,
            weights.optimizer_states,
            layer.kept.total,
        ]
        rows.append((f"{numbered(layer.numbers)}", *map(amount_or_dash, sizes)))
    yield from table(rows, range(1, len(rows[0])))
    yield ""
    yield from _bars(memory)


def _bars(memory: Memory) -> Iterator[str]:
    """One bar per event; of consecutive equal layers only the first and the last."""
    peak_bytes, width = memory.peak.bytes.total, max(len(moment.event) for moment in memory.moments)
    hidden = 0
    for index, moment in enumerate(memory.moments):
        if _is_between(memory, index):
            hidden += 1
            continue
        if hidden:
            yield f"  {'…'.ljust(width)}  {count(hidden, 'layer')} more"
        hidden = 0
        bar = "█" * max(1, round(BAR * moment.bytes.total / peak_bytes))
        mark = "  peak" if moment is memory.peak else ""
        yield f"  {moment.event.ljust(width)}  {bar.ljust(BAR)}  {amount_of_bytes(moment.bytes.total)}{mark}"


def _is_between(memory: Memory, index: int) -> bool:
    """Whether the events before and after are of equal layers, and none is the peak."""
    around = memory.moments[max(0, index - 1) : index + 2]
    blocks = {_block(memory, moment) for moment in around}
    return len(around) == 3 and len(blocks) == 1 and None not in blocks and memory.moments[index] is not memory.peak


def _block(memory: Memory, moment: Moment) -> tuple[str, str] | None:
    """The direction and the block of a layer's event."""
    blocks = (name for name, layer in memory.layers.items() if moment.layer in layer.numbers)
    return None if moment.layer is None else (moment.event.partition(" of ")[0], next(blocks))
