"""One model, many renderings: `full` for people, `concise` for logs, `json` for tools, `github` for annotations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from moec.grammar.diagnostics.diagnostic import Diagnostic, place_of
from moec.grammar.diagnostics.full import full
from moec.grammar.diagnostics.visible import printable
from moec.grammar.source import Span


def render(
    diagnostics: Iterable[Diagnostic], style: str = "full", color: bool = False, width: int | None = None
) -> str:
    """All of `diagnostics` as text; only `full` has colours, and fits a terminal's `width` (40 to 200 columns).

    Raises `ValueError` for an unknown style.
    """
    if style == "full":
        return "\n".join(full(diagnostic, color, width) for diagnostic in diagnostics)
    if style not in _STYLES:
        raise ValueError(f"no style {style!r}: there are {', '.join(STYLES)}")
    return _STYLES[style](list(diagnostics))


def concise(diagnostics: Sequence[Diagnostic]) -> str:
    """`mixtral.moe:31:8: error[MOE0311]: title: message`, a line each."""
    return "".join(f"{_place(d.span)}{d.severity}[{d.code}]: {_one_line(d)}\n" for d in diagnostics)


def as_json(diagnostics: Sequence[Diagnostic]) -> str:
    """An array of objects; lines and columns count from 1, and ends are exclusive."""
    documents = [
        {
            "code": d.code,
            "severity": str(d.severity),
            "title": d.title,
            "message": d.message,
            "help": d.help,
            "page": f"moec explain {d.code}",
            "span": _position(d.span),
            "fix": [{"text": edit.text, "span": _position(edit.span)} for edit in d.fix],
            "labels": [{"message": label.message, "span": _position(label.span)} for label in d.labels],
        }
        for d in diagnostics
    ]
    import json  # the other styles do without

    return json.dumps(documents, indent=2, ensure_ascii=False) + "\n"


def github(diagnostics: Sequence[Diagnostic]) -> str:
    """Workflow commands, which GitHub shows beside the line in a pull request."""
    lines = []
    for d in diagnostics:
        properties = {"title": d.code}
        if d.span:
            lines_of = {"line": str(d.span.line), "col": str(d.span.column)} if d.span.source.text else {}
            properties = {"file": printable(d.span.source.name), **lines_of, **properties}
        listed = ",".join(f"{key}={_escaped(value, ':,')}" for key, value in properties.items())
        text = _one_line(d) + (f"\nhelp: {printable(d.help)}" if d.help else "")
        lines.append(f"::{d.severity} {listed}::{_escaped(text)}\n")
    return "".join(lines)


_STYLES: dict[str, Callable[[Sequence[Diagnostic]], str]] = {"concise": concise, "json": as_json, "github": github}
STYLES = ("full", *_STYLES)


def _one_line(diagnostic: Diagnostic) -> str:
    return f"{diagnostic.title}: {printable(diagnostic.message)}" if diagnostic.message else diagnostic.title


def _place(span: Span | None) -> str:
    return f"{place_of(span)}: " if span else ""


def _position(span: Span | None) -> dict[str, object] | None:
    if span is None:
        return None
    end_line, end_column = span.source.position(span.end)
    return {
        "file": span.source.name,
        "line": span.line,
        "column": span.column,
        "end_line": end_line,
        "end_column": end_column,
    }


def _escaped(text: str, more: str = "") -> str:
    for character in "%\r\n" + more:
        text = text.replace(character, f"%{ord(character):02X}")
    return text
