"""Predicted peaks of memory over published ones, and whether a run is predicted to be out of memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moec.grammar import load_text
from moec.passes.cost.memory import memory_of
from moec.passes.pipeline import compile_program
from planning.models import model_text
from planning.score import Run

CLUSTER = """device "mi355x" { kind = hip; memory = 288GB; bandwidth = 8TB/s; peak { bf16 = 2300TFLOPS } }
cluster "published" {
  device = mi355x; level "node" { size = 8; bandwidth = 448GB/s }; level "rail" { size = 4; bandwidth = 50GB/s }
}
"""
MICROBATCHES = 16


def peak_of(run: Run) -> float:
    """Bytes at the peak of the rank with most, but for those that torch's allocator does not count."""
    found = memory_of(run.program, run.spec).peak.bytes
    return found.total - found.of.get("device", 0.0)


@dataclass(frozen=True, slots=True)
class Pipelined:
    """A run of Qwen3-235B on 32 MI355X with its schedule: bytes published (None: out of memory) and predicted."""

    words: str
    published: float | None
    predicted: float


def pipelined(rows: Iterable[Mapping[str, Any]]) -> list[Pipelined]:
    """The rows with schedules that moec has. Their source states no sequence: it is the one for which the first row, of
    1F1B, takes the memory that is published."""
    stated = [row for row in rows if row["hardware"] == "mi355x" and row.get("schedule", "interleaved")[:2] != "v-"]
    stated.sort(key=lambda row: row["layout"].get("vpp", 1))
    words = [_schedule(row["layout"].get("vpp", 1)) for row in stated]
    peaks = [1e9 * row["peak_mem_gb"] if "peak_mem_gb" in row else None for row in stated]
    first = peaks[0]
    assert first is not None
    (short, low), (long, high) = ((length, _peak(words[0], length)) for length in (4096, 8192))
    sequence = round(short + (long - short) * (first - low) / (high - low))
    return [Pipelined(w, p, _peak(w, sequence)) for w, p in zip(words, peaks, strict=True)]


def _schedule(virtual: int) -> str:
    return f"virtual = {virtual}; schedule = interleaved" if virtual > 1 else "schedule = one_f_one_b"


def _peak(words: str, sequence: int) -> float:
    batch = f"train {{ batch = {8 * MICROBATCHES}; sequence = {sequence} }}"
    parallel = f"parallel {{ pp = 4; ep = 8; zero = 1; microbatches = {MICROBATCHES}; {words} }}"
    text = f"{CLUSTER}{model_text('qwen3-235b-a22b', sequence)}{batch}\n{parallel}\n"
    spec = load_text(text, name="published.moe").unwrap()
    return memory_of(compile_program(spec, stop_after="schedule").program, spec).peak.bytes.total


def errors(runs: Sequence[Run]) -> list[tuple[Run, float, float]]:
    """The runs with a published peak: it, and the error of the predicted one."""
    return [(run, peak, peak_of(run) / peak - 1) for run in runs if (peak := run.row.peak) is not None]
