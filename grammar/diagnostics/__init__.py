"""Diagnostics: the one model, the registry of codes, and the renderers that show them."""

from moec.grammar.diagnostics.codes import CODES, diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, DiagnosticError, Edit, InternalError, Label, Severity
from moec.grammar.diagnostics.render import STYLES, render
from moec.grammar.diagnostics.visible import printable

__all__ = [
    "CODES",
    "STYLES",
    "Diagnostic",
    "DiagnosticError",
    "Edit",
    "InternalError",
    "Label",
    "Severity",
    "diagnose",
    "printable",
    "render",
]
