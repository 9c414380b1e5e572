"""Tables of the rows that `gpu.py` measured, in Markdown, and the fastest tiles among them as moec's shipped ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_rows import Row, RowFile

OURS = "moec"


def main(report: Sequence[Path], tuned: Sequence[Path], folder: Path | None) -> None:
    """Prints tables of the rows in `report`, and stores the fastest ways in `tuned` in a folder of moec's own."""
    for path in (*report, *tuned):
        if not path.is_file():
            sys.exit(f"{path}: no such file")
    if report:
        print("\n".join(tables([row for path in report for row in RowFile(path).rows()])))
    if tuned:
        from gpu_tuned import FOLDER, write

        rows = [row for path in tuned for row in RowFile(path).rows()]
        if folder is None:
            rows = [row for row in rows if row["on"] != "cpu"]  # the interpreter's times mean nothing
        written = write(rows, folder or FOLDER)
        print("\n".join(f"wrote {path}" for path in written) or "no product was measured: nothing is written")


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """All tables that the rows fill, as lines of Markdown."""
    parts = {part: [row for row in rows if row.get("part") == part] for part in "abcd"}
    yield from _of_machine(parts["a"])
    yield from _of_correctness(parts["a"])
    yield from _of_kernels(parts["b"])
    yield from _of_layers(parts["c"])
    yield from _of_steps([row for row in parts["d"] if "slots" not in row])
    yield from _of_slots([row for row in parts["d"] if "slots" in row])
    failed = [row for row in rows if "failed" in row]
    if failed:
        yield from ("", f"Without a figure ({len(failed)}):", "")
        yield from (f"- {row['key']}: {row['failed']}" for row in failed)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    made = list(rows)
    if made:
        yield from ("", f"| {' | '.join(head)} |", "|---" * len(head) + "|")
        yield from (f"| {' | '.join(row)} |" for row in made)


def _of_machine(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row["key"] == "a machine" and "failed" not in row:
            versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
            yield f"{row['name']}, Python {row['python']}, {versions}."
    ceilings = [row for row in rows if row["key"].startswith("a ceiling") and "failed" not in row]
    said = (
        [row["of"], f"{row['tflops']:.0f} TFLOP/s" if "tflops" in row else f"{row['gbs']:.0f} GB/s"] for row in ceilings
    )
    yield from _table(("ceiling", "measured"), said)


def _of_correctness(rows: Sequence[Row]) -> Iterator[str]:
    errors = ("output", "input", "router", "up", "down")
    checked = [row for row in rows if row["key"].startswith("a correct") and "failed" not in row]
    lines = (
        [row["shape"], row["load"], *(f"{row[of]:.1e}" for of in errors), f"{row['allowed']:.0e}"] for row in checked
    )
    yield from _table(("layer against float64", "load", *errors, "allowed"), lines)
    others = [row for row in rows if row["key"].startswith(("a sanitize", "a tests")) and "failed" not in row]
    words = ("passed", "failed", "skipped", "error", "said")
    said = ([row["key"][2:], ", ".join(f"{word} {row[word]}" for word in words if row.get(word))] for row in others)
    yield from _table(("", "result"), said)


def _of_kernels(rows: Sequence[Row]) -> Iterator[str]:
    """For each shape and kernel: the default way and the fastest one."""
    measured = [row for row in rows if "ms" in row]
    lines = []
    for (shape, kernel), of in _by(measured, lambda row: (row["shape"], row["kernel"])):
        best = min(of, key=lambda row: row["ms"])
        usual = next((row for row in of if row["usual"]), None)
        ratio = ["", ""] if usual is None else [f"{usual['way']}: {usual['ms']:.3f}", f"{usual['ms'] / best['ms']:.2f}"]
        lines.append([shape, kernel, str(len(of)), *ratio, best["way"], f"{best['ms']:.3f}", f"{best['tflops']:.0f}"])
    head = ("layer", "kernel", "ways", "default, ms", "/ fastest", "fastest", "ms", "TFLOP/s")
    yield from _table(head, lines)


def _of_layers(rows: Sequence[Row]) -> Iterator[str]:
    """For each shape: all implementations, and how many times as long as the fastest of the others each one takes."""
    measured = [row for row in rows if "forward_ms" in row]
    lines = []
    for shape, of in _by(measured, lambda row: row["shape"]):
        for row in of:
            ratios = [_ratio(row, of, times) for times in (_held, _launched)]
            passes = (f"{row['forward_ms']:.3f} / {row['backward_ms']:.3f}", f"{_launched(row):.3f}")
            speed = f"{row['forward_tflops']:.0f} / {row['backward_tflops']:.0f}"
            lines.append(
                [shape, row["impl"], passes[0], speed, ratios[0], passes[1], ratios[1], f"{row['peak_mb']:.0f}"]
            )
    head = (
        "layer",
        "",
        "forward / backward, ms",
        "TFLOP/s",
        "/ best peer",
        "with launches, ms",
        "/ best peer",
        "peak, MB",
    )
    yield from _table(head, lines)


def _of_steps(rows: Sequence[Row]) -> Iterator[str]:
    """For each model: a training step on one device."""
    lines = (
        [
            row["name"],
            f"{row['parameters'] / 1e9:.2f} B",
            f"{row['build_s']:.1f}",
            f"{row['passes_ms']:.1f} + {row['update_ms']:.1f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['tflops']:.0f}",
            f"{row['peak_mb'] / 1e3:.1f} / {row['predicted_mb'] / 1e3:.1f}",
        ]
        for row in rows
        if "failed" not in row
    )
    head = ("model", "parameters", "built, s", "passes + update, ms", "tokens/s", "TFLOP/s", "peak / predicted, GB")
    yield from _table(head, lines)


def _of_slots(rows: Sequence[Row]) -> Iterator[str]:
    lines = ([row["slots"], f"{row['kernels_ms']:.2f}", f"{row['host_ms']:.2f}"] for row in rows if "failed" not in row)
    yield from _table(("choices of slots", "kernels, ms", "on the host, ms"), lines)


def _held(row: Row) -> float:
    return float(row["forward_ms"] + row["backward_ms"])


def _launched(row: Row) -> float:
    return float(row["launched_forward_ms"] + row["launched_backward_ms"])


def _ratio(row: Row, of: Sequence[Row], times: Callable[[Row], float]) -> str:
    peers = [times(other) for other in of if not other["impl"].startswith(OURS) and other["impl"] != "dense"]
    return f"{times(row) / min(peers):.2f}" if peers else ""


def _by(rows: Sequence[Row], key: Callable[[Row], Any]) -> Iterator[tuple[Any, list[Row]]]:
    """Rows by a key, in the order in which the keys first come."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    yield from found.items()
