"""`moec inspect --params`: the parameters of a file or a plan, as text or JSON. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from moec.commands.console.given_plan import given_plan
from moec.commands.console.output import emit
from moec.commands.console.table import table
from moec.commands.inspecting.inspect_documents import CountedElements, CountedLayers, ParametersDocument
from moec.driver import read, run_passes
from moec.grammar.amounts import count
from moec.grammar.diagnostics import Diagnostic
from moec.grammar.printer import selector
from moec.grammar.spec import Spec
from moec.measured_loads import with_loads
from moec.open_words import stated
from moec.passes.cost.parameter_counts import Elements, ParameterCounts, count_parameters
from moec.passes.degrees.degrees import choose_degrees

HEAD = ("part", "total", "active per token", "per rank")


def run(path: Path, lets: Mapping[str, str], style: str) -> tuple[Diagnostic, ...]:
    """Prints the counts of a `.moe` file or a plan folder; returns the warnings. Raises `DiagnosticError`."""
    warnings: tuple[Diagnostic, ...] = ()
    if path.is_dir():
        plan = given_plan(path, style)
        spec, program = plan.spec, plan.program
    else:
        loaded = read(path, **lets)
        spec, warnings = stated(with_loads(loaded.unwrap(), path)), loaded.diagnostics
        program = run_passes(spec, "schedule").program  # before `budget`: what does not fit is counted too
    counts = count_parameters(program, spec)
    emit(style, lambda: to_lines(spec, counts), lambda: counted(spec, counts))
    return warnings


def to_lines(spec: Spec, counts: ParameterCounts) -> Iterator[str]:
    """The notation, then a table: the parts outside of layers, each kind of layer with its parts, and the total."""
    ranks = count(choose_degrees(spec).all_ranks, "rank")
    yield f"{spec.subject.name}: {counts.notation}, on {ranks} ({spec.cluster.name})"
    yield ""
    rows = [HEAD, *(_row(title, elements) for title, elements in counts.outside.items())]
    for layer in counts.layers:
        several = len(layer.layers) > 1
        title = f"layer{'s' * several} {selector(list(layer.layers))}"
        rows.append(_row(title + f", each of {len(layer.layers)}" * several, layer.one_layer))
        rows += [_row(f"  {title}", elements) for title, elements in layer.parts.items()]
    rows.append(_row("all", counts.whole))
    yield from table(rows, numbers=(1, 2, 3))


def counted(spec: Spec, counts: ParameterCounts) -> ParametersDocument:
    """The counts as a JSON document."""
    layers = [
        CountedLayers(
            layers=list(layer.layers),
            parts={name: _elements(elements) for name, elements in layer.parts.items()},
            **asdict(layer.one_layer),
        )
        for layer in counts.layers
    ]
    return ParametersDocument(
        name=spec.subject.name,
        notation=counts.notation,
        ranks=choose_degrees(spec).all_ranks,
        outside={name: _elements(elements) for name, elements in counts.outside.items()},
        layers=layers,
        **asdict(counts.whole),
    )


def _row(name: str, elements: Elements) -> tuple[str, ...]:
    return name, f"{elements.total:,}", f"{elements.active:,}", f"{elements.per_rank:,}"


def _elements(elements: Elements) -> CountedElements:
    return CountedElements(**asdict(elements))
