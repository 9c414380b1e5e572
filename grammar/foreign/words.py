"""A row as a sentence: the form and its settings, the forms of other settings, and how the nearest form differs."""

from __future__ import annotations

import re

from moec.grammar.foreign.row import Row

_SAMPLES = (
    (re.compile(r"(?<=swiglu\()\d[\d_]*|(?<=gelu\()\d[\d_]*|(?<=relu\()\d[\d_]*"), "WIDTH"),
    (re.compile(r"\b\d+ \* (?=swiglu|gelu|relu)"), "COUNT * "),
    (re.compile(r"(?<=\(heads = )\d+"), "HEADS"),
    (re.compile(r"(?<=kv_heads = )\d+"), "KV_HEADS"),
    (re.compile(r"(?<=topk\()(?!1\b)\d+"), "K"),
    (re.compile(r"(?<=microbatches = )\d+"), "NUMBER"),
)


def blank(form: str) -> str:
    """`form` with words for its sample numbers."""
    for sample, word in _SAMPLES:
        form = sample.sub(word, form)
    return form


def sentence(row: Row, value: str, place: str, plain: str) -> str:
    """Help on a row with the `value` of a file, or an example. `plain`: the word that is called so here, if it is one.

    With a value the other numbers of forms are blanks: they are the file's too.
    """

    def filled(text: str) -> str:
        return (blank(text) if value else text).replace("{}", value or row.example or "…")

    if not row.path:
        return filled(row.note)
    parts = [_first(row, filled(row.form), place, plain)]
    parts += [f"{when}: `{filled(form)}`" for when, form in row.cases]
    parts += [filled(row.note)] if row.note else []
    return "; ".join(parts)


def _first(row: Row, form: str, place: str, plain: str) -> str:
    """What is written, and for which settings."""
    when = f", {row.when}" if row.when else ""
    if row.differs:
        return f"there is no equal; nearest is `{form}`{place}{when}: {row.differs}"
    if plain:
        return f"here it is called `{plain}`{place}: `{form}`{when}"
    if "{}" not in row.form and any(letter.isdigit() for letter in form):
        return f"here it is written as, for example, `{form}`{place}{when}"
    return f"here it is `{form}`{place}{when}"
