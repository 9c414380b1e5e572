"""The language: `.moe` text in, a validated `Spec` or a list of diagnostics out.

    loaded = load_file("mixtral.moe", lets={"experts": 16})
    print(render(loaded.diagnostics, "full"))
    spec = loaded.unwrap()
    print(to_text(spec))

Names are imported at first use, so a command that only renders a message does not build the schema.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moec.grammar.checking.rules import check
    from moec.grammar.diagnostics import Diagnostic, DiagnosticError, InternalError, render
    from moec.grammar.load import Loaded, load_file, load_text
    from moec.grammar.printer import to_text
    from moec.grammar.source import Source, Span
    from moec.grammar.spec import Spec

_HOMES = {
    "Diagnostic": "moec.grammar.diagnostics",
    "DiagnosticError": "moec.grammar.diagnostics",
    "InternalError": "moec.grammar.diagnostics",
    "Loaded": "moec.grammar.load",
    "Source": "moec.grammar.source",
    "Span": "moec.grammar.source",
    "Spec": "moec.grammar.spec",
    "check": "moec.grammar.checking.rules",
    "load_file": "moec.grammar.load",
    "load_text": "moec.grammar.load",
    "render": "moec.grammar.diagnostics",
    "to_text": "moec.grammar.printer",
}

__all__ = [
    "Diagnostic",
    "DiagnosticError",
    "InternalError",
    "Loaded",
    "Source",
    "Span",
    "Spec",
    "check",
    "load_file",
    "load_text",
    "render",
    "to_text",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
