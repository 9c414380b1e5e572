"""Predicted layers and steps against those that `gpu.py` measured on one H200 (`results/h200.jsonl`). Needs no GPU."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

from gpu_part_d import MODELS, TEXT

from moec.grammar import load_text
from moec.grammar.spec import Spec
from moec.passes.cost.prediction import predict
from moec.passes.cost.step_time import stages_of
from moec.passes.cost.totals import costs_of
from moec.passes.ir import Program
from moec.passes.ir.work.workload import Workload
from moec.passes.pipeline import compile_program

RESULTS = Path(__file__).parent / "results" / "h200.jsonl"
LAYER = """
use "devices/h200"
layer "l" {{ dim = {dim}; dtype = bf16; moe {{ experts = {experts} * swiglu({hidden}); gate = topk({k}) }} }}
cluster "one" {{ device = h200; level "gpu" {{ size = 1 }} }}
train {{ batch = 1; sequence = {tokens} }}
"""
SHAPE = re.compile(r"T(?P<tokens>\d+)-D(?P<dim>\d+)-F(?P<hidden>\d+)-E(?P<experts>\d+)-k(?P<k>\d+)")


def main() -> None:
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    layers = [row for row in rows if row["part"] == "c" and row.get("impl") == "moec"]
    errors = [layer_error(row) for row in layers]
    print(f"layers: mean error {statistics.fmean(map(abs, errors)):.1%} (limit 8 %)")
    for row in rows:
        if row["part"] == "d" and "passes_ms" in row:
            step_errors(row)


def layer_error(row: dict[str, Any]) -> float:
    """The error of forward and backward together, which it prints."""
    match = SHAPE.fullmatch(row["shape"])
    assert match is not None
    spec, program = compiled(LAYER.format(**match.groupdict()))
    (stage,) = stages_of(costs_of(program, Workload.of_microbatch(spec, program)), program, spec)
    passes = [1e3 * seconds.total for seconds in (stage.forward, stage.backward)]
    measured = [row["forward_ms"], row["backward_ms"]]
    error = sum(passes) / sum(measured) - 1
    parts = ", ".join(f"{p:.2f} of {m:.2f} ms" for p, m in zip(passes, measured, strict=True))
    print(f"  {row['shape']:28} forward, backward: {parts}; {error:+.1%}")
    return error


def step_errors(row: dict[str, Any]) -> None:
    """Prints the errors of a step's passes, its update and its peak memory, without what torch does not count."""
    sizes = {"parallel": "", **MODELS["cuda"][row["name"]], "device": "h200"}
    spec, program = compiled(f'use "devices/h200"\n{TEXT.format(name="model", **sizes)}')
    prediction = predict(program, spec)
    update = prediction.step.of["optimizer"]
    peak = prediction.memory.peak.bytes
    found = {
        "passes": (1e3 * (prediction.step.total - update), row["passes_ms"], "ms"),
        "update": (1e3 * update, row["update_ms"], "ms"),
        "peak": ((peak.total - peak.of["device"]) / 1e6, row["peak_mb"], "MB"),
    }
    parts = (f"{what} {p:,.0f} of {m:,.0f} {unit}, {p / m - 1:+.1%}" for what, (p, m, unit) in found.items())
    print(f"{row['name']}: {'; '.join(parts)} (limits 15, 5 and 5 %)")


def compiled(text: str) -> tuple[Spec, Program]:
    """The Spec and its Program before the budget."""
    spec = load_text(text, name="predicted.moe").unwrap()
    return spec, compile_program(spec, "schedule").program


if __name__ == "__main__":
    main()
