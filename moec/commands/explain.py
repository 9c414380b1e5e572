"""`moec explain`: the page of a code, or the reference of a word of the language."""

from __future__ import annotations

from importlib.resources import files

from moec.grammar.diagnostics import CODES, DiagnosticError, diagnose
from moec.grammar.schema_in_words import choices, describe, places, row, vocabulary
from moec.grammar.suggest import advice


def explain(subject: str) -> str:
    """Markdown on a code such as MOE0311, or a word such as `topk`. Raises `DiagnosticError` for anything else."""
    code = subject.upper()
    if code in CODES:
        return (files("moec.pages") / f"{code}.md").read_text(encoding="utf-8")
    known = vocabulary()
    sections = [f"# `{cls.word}`\n\n{describe(cls)}\n" for cls in known.get(subject, ())]
    sections += [
        f"# `{subject}` in `{cls.word}`\n\n{'; '.join(cell for cell in row(field)[1:3] if cell)}: {row(field)[3]}.\n"
        for cls, field in places(subject)
        if not field.block
    ]
    if not sections:
        sections = [
            f"# `{field.word} = {subject}` in `{cls.word}`\n\n{row(field)[3]}.\n" for cls, field in choices(subject)
        ]
    if not sections:
        help = advice(subject, [*known, *CODES]) if subject else ""
        raise DiagnosticError([diagnose("MOE0015", None, f"`{subject}`", help=help)])
    return "\n".join(sections)
