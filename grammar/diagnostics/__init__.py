"""Diagnostics: the one model, and the renderers that show it."""

from moec.grammar.diagnostics.model import Diagnostic, DiagnosticError, InternalError, Label, Severity

__all__ = ["Diagnostic", "DiagnosticError", "InternalError", "Label", "Severity"]
