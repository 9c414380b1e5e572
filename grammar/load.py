"""Loads a `.moe` file or text: to a `Spec`, or to all of its diagnostics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from moec.grammar.accepted import not_accepted
from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, DiagnosticError, Label, Severity
from moec.grammar.resolve.files import checked_source, read_source, source_of
from moec.grammar.resolve.top import resolve
from moec.grammar.resolve.uses import MAX_USE_DEPTH, Files
from moec.grammar.source import Source, Span
from moec.grammar.spec import Spec
from moec.grammar.syntax.parser import parse
from moec.grammar.syntax.tree import File

SHOWN_HOPS = 4
"""The most labels of a chain of `use` from the main file to an error: the innermost ones and the first."""

Lets = Mapping[str, str | int | float]


class Loaded(NamedTuple):
    """The result of loading a file. `spec` is None exactly if a diagnostic is an error."""

    spec: Spec | None
    diagnostics: tuple[Diagnostic, ...]
    tree: File | None
    overridden: tuple[tuple[Span, str], ...] = ()
    """Spans of values that depend on a `--let`, with the text of the `--let`."""

    def unwrap(self) -> Spec:
        """The Spec; raises `DiagnosticError` if there is none."""
        if self.spec is None:
            raise DiagnosticError(self.diagnostics)
        return self.spec


def load_file(path: str | Path, lets: Lets | None = None) -> Loaded:
    """Read, parse and resolve the file at `path`. `lets` override its constants. Never raises over a bad file."""
    path = Path(path)
    source, diagnostics = read_source(path, path.name)
    return _load(source, diagnostics, path.parent, lets or {}, identity=_identity(path))


def load_text(text: str, name: str = "<text>", lets: Lets | None = None, folder: str | Path | None = None) -> Loaded:
    """Like `load_file`, for a text. `use` looks in `folder`; without a folder only in the library."""
    source, diagnostics = checked_source(text, name)
    return _load(source, diagnostics, Path(folder) if folder is not None else None, lets or {}, identity=name)


def load_bytes(data: bytes, name: str, lets: Lets | None = None, folder: str | Path | None = None) -> Loaded:
    """Like `load_text`, for the bytes of a file that is elsewhere, such as stdin."""
    source, diagnostics = source_of(data, name)
    return _load(source, diagnostics, Path(folder) if folder is not None else None, lets or {}, identity=name)


def _load(
    source: Source | None, diagnostics: list[Diagnostic], folder: Path | None, lets: Lets, identity: str
) -> Loaded:
    tree = None
    spec = None
    overridden: list[tuple[Span, str]] = []
    if source is not None:
        tree, errors = parse(source)
        diagnostics = [*diagnostics, *errors]
    if source is not None and tree is not None:
        if not tree.body and not _failed(diagnostics):
            diagnostics.append(diagnose("MOE0007", Span(source, 0, 0), help="`model` is what a file needs"))
        elif tree.body:
            files = Files(folder)
            statements = files.read(tree.body, identity, folder)
            complete = files.complete and not _failed(diagnostics)
            spec, errors, overridden = resolve(statements, lets, Span(source, 0, 0), complete=complete)
            errors = list(_not_following(errors, diagnostics))
            diagnostics += [_with_uses(diagnostic, files.used_at) for diagnostic in (*files.diagnostics, *errors)]
    diagnostics = not_accepted(diagnostics)
    return Loaded(None if _failed(diagnostics) else spec, tuple(_ordered(diagnostics)), tree, tuple(overridden))


SHORT_SPAN = 32
"""The first characters of a foreign notation: an error of meaning that begins there follows from the notation."""


def _not_following(errors: Iterable[Diagnostic], notation_errors: Iterable[Diagnostic]) -> Iterator[Diagnostic]:
    """The `errors` without those that follow from an error of notation at the same place, and have no fix."""
    spans = [error.span for error in notation_errors if error.span and error.severity is Severity.ERROR]
    places = {(span.source.name, at) for span in spans for at in range(span.start, span.end)[:SHORT_SPAN]}
    for error in errors:
        if error.fix or error.span is None or (error.span.source.name, error.span.start) not in places:
            yield error


def _with_uses(diagnostic: Diagnostic, used_at: Mapping[str, Span]) -> Diagnostic:
    """`diagnostic` with labels for the chain of `use` statements that leads to its file."""
    labels: list[Label] = []
    span = diagnostic.span
    while span is not None and (span := used_at.get(span.source.name)) is not None and len(labels) < MAX_USE_DEPTH:
        labels.append(Label(span=span, message="the file is used here"))
    if len(labels) > SHOWN_HOPS:
        labels = [*labels[: SHOWN_HOPS - 1], labels[-1]]
    return diagnostic._replace(labels=(*diagnostic.labels, *labels)) if labels else diagnostic


def _failed(diagnostics: list[Diagnostic]) -> bool:
    return any(diagnostic.severity is Severity.ERROR for diagnostic in diagnostics)


def _ordered(diagnostics: list[Diagnostic]) -> list[Diagnostic]:
    """Sorts diagnostics by file, in the order of first appearance, and by position in each file."""
    files: dict[str, int] = {}
    for diagnostic in diagnostics:
        if diagnostic.span:
            files.setdefault(diagnostic.span.source.name, len(files))
    return sorted(diagnostics, key=lambda d: (files[d.span.source.name], d.span.start) if d.span else (-1, 0))


def _identity(path: Path) -> str:
    try:
        return str(path.resolve())
    except (OSError, RuntimeError, ValueError):
        return str(path)
