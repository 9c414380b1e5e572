"""`moec inspect --params`: the parameters of a file or a plan, as text or JSON. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moec.commands.table import table
from moec.driver import load, read, run_passes
from moec.grammar.amounts import count
from moec.grammar.diagnostics import Diagnostic
from moec.grammar.printer import selector
from moec.grammar.spec import Spec
from moec.passes.cost.parameter_counts import Elements, ParameterCounts, count_parameters
from moec.passes.place.degrees import choose_degrees

HEAD = ("part", "total", "active per token", "per rank")


def run(path: Path, lets: Mapping[str, str], as_json: bool) -> tuple[Diagnostic, ...]:
    """Prints the counts of a `.moe` file or a plan folder; returns the warnings. Raises `DiagnosticError`."""
    warnings: tuple[Diagnostic, ...] = ()
    if path.is_dir():
        plan = load(path)
        spec, program = plan.spec, plan.program
    else:
        loaded = read(path, **lets)
        spec, warnings = loaded.unwrap(), loaded.diagnostics
        program = run_passes(spec, "partition").program  # before `budget`: what does not fit is counted too
    counts = count_parameters(program, spec)
    print(json.dumps(to_json(spec, counts)) if as_json else "\n".join(to_lines(spec, counts)))
    return warnings


def to_lines(spec: Spec, counts: ParameterCounts) -> Iterator[str]:
    """The notation, then a table: what is outside of layers, each kind of layer with its parts, and all."""
    ranks = count(choose_degrees(spec).ranks, "rank")
    yield f"{spec.subject.name}: {counts.notation}, on {ranks} ({spec.cluster.name})"
    yield ""
    rows = [HEAD, *(_row(name, elements) for name, elements in counts.outside.items())]
    for layer in counts.layers:
        several = len(layer.layers) > 1
        name = f"layer{'s' * several} {selector(list(layer.layers))}"
        rows.append(_row(name + f", each of {len(layer.layers)}" * several, layer.each))
        rows += [_row(f"  {name}", elements) for name, elements in layer.parts.items()]
    rows.append(_row("all", counts.whole))
    yield from table(rows, numbers=(1, 2, 3))


def to_json(spec: Spec, counts: ParameterCounts) -> dict[str, Any]:
    """The same as numbers."""
    return {
        "name": spec.subject.name,
        "notation": counts.notation,
        "ranks": choose_degrees(spec).ranks,
        **_numbers(counts.whole),
        "outside": {name: _numbers(elements) for name, elements in counts.outside.items()},
        "layers": [
            {
                "layers": list(layer.layers),
                **_numbers(layer.each),
                "parts": {name: _numbers(elements) for name, elements in layer.parts.items()},
            }
            for layer in counts.layers
        ],
    }


def _row(name: str, elements: Elements) -> tuple[str, ...]:
    return name, f"{elements.total:,}", f"{elements.active:,}", f"{elements.per_rank:,}"


def _numbers(elements: Elements) -> dict[str, int]:
    return {"total": elements.total, "active": elements.active, "per_rank": elements.per_rank}
