"""A plot of a step's memory: events from left to right, kinds stacked, a line at the device's memory. SVG 1.1."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from moec.grammar.amounts import amount_of_bytes
from moec.passes.cost.buffers import MEMORY_KINDS, MemoryKind
from moec.passes.cost.memory import Memory

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 900, 420, 80, 40, 170, 60

COLORS: dict[MemoryKind, str] = {
    "parameters": "#4477aa",
    "compute copies": "#66ccee",
    "gradients": "#228833",
    "optimizer": "#222255",
    "activations": "#ccbb44",
    "work": "#ee6677",
    "communication": "#aa3377",
    "logits and loss": "#ee8866",
    "device": "#bbbbbb",
}
"""Colours that readers with a colour-vision deficiency tell apart (Tol 2021, "bright" and "light")."""


def svg(name: str, memory: Memory, capacity: float) -> str:
    """The plot as the text of an SVG file."""
    return "\n".join(_lines(name, memory, capacity)) + "\n"


def _lines(name: str, memory: Memory, capacity: float) -> Iterator[str]:
    peak, moments = memory.peak, memory.moments
    top = max(peak.bytes.total, capacity if capacity < 2 * peak.bytes.total else 0)
    across, down = (WIDTH - LEFT - RIGHT) / len(moments), HEIGHT - TOP - BOTTOM
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {box}>'
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    title = f"{name}: {amount_of_bytes(peak.bytes.total)} at the peak, in the {peak.event}"
    yield _label(LEFT, 24, "start", title)
    shown = [kind for kind in MEMORY_KINDS if any(moment.bytes.of.get(kind) for moment in moments)]
    for index, moment in enumerate(moments):
        below = 0.0
        for kind in shown:
            size = moment.bytes.of.get(kind, 0.0)
            if not size:
                continue
            y = TOP + down * (1 - (below + size) / top)
            hint = escape(f"{moment.event}: {kind} {amount_of_bytes(size)}")
            yield (
                f'<rect x="{LEFT + index * across:.2f}" y="{y:.2f}" width="{across:.2f}" '
                f'height="{down * size / top:.2f}" fill="{COLORS[kind]}"><title>{hint}</title></rect>'
            )
            below += size
    for part in (0, 0.25, 0.5, 0.75, 1):
        y = TOP + down * (1 - part)
        yield f'<line x1="{LEFT - 4}" y1="{y:.1f}" x2="{LEFT}" y2="{y:.1f}" stroke="black"/>'
        yield _label(LEFT - 8, y + 4, "end", amount_of_bytes(part * top))
    if capacity <= top:
        y = TOP + down * (1 - capacity / top)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="black" stroke-dasharray="4"/>'
        yield _label(WIDTH - RIGHT, y - 4, "end", f"the device: {amount_of_bytes(capacity)}")
    for index, kind in enumerate(reversed(shown)):
        y = TOP + 18 * index
        yield f'<rect x="{WIDTH - RIGHT + 16}" y="{y}" width="12" height="12" fill="{COLORS[kind]}"/>'
        yield _label(WIDTH - RIGHT + 34, y + 10, "start", kind)
    places = {0: "start", len(moments) // 2: "middle", len(moments) - 1: "end"}
    for index, anchor in places.items():
        yield _label(LEFT + (index + 0.5) * across, HEIGHT - BOTTOM + 20, anchor, moments[index].event)
    yield "</svg>"


def _label(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
