"""Good files with one fault planted in each: a token dropped, doubled, swapped with its neighbour, or misspelt.

The same corpus on every run and machine: it is drawn with a fixed seed from files that are part of the project.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moec.commands.fixes import edited
from moec.commands.init import STARTER
from moec.grammar import load_text
from moec.grammar.checking.supported import unsupported
from moec.grammar.diagnostics import Diagnostic, DiagnosticError, Edit, Severity
from moec.grammar.syntax.tokens import Token, lex
from moec.passes.degrees.degrees import choose_degrees

ROOT = Path(__file__).parents[1]
KINDS = ("dropped", "doubled", "swapped", "misspelt")
PER_FILE = 25
"""Faults of each kind in each file."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`text` is `original` with one edit, on line `line`."""

    file: str
    kind: str
    what: str
    original: str
    text: str
    line: int


def corpus(seed: str = "", per_file: int = PER_FILE) -> list[Fault]:
    """`per_file` faults of each kind in every file; another `seed` draws others from the same files."""
    files = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests/cases").glob("*.moe"))}
    files |= {"tiny.moe": (ROOT / "examples/tiny.moe").read_text(encoding="utf-8"), "starter.moe": STARTER}
    return [fault for name, text in files.items() for fault in faults(name, text, seed, per_file)]


def faults(name: str, text: str, seed: str = "", per_file: int = PER_FILE) -> Iterator[Fault]:
    """`per_file` faults of each kind, spread over the file."""
    dice, spec = random.Random(name + seed), load_text(text).spec
    tokens = [token for token in lex(text) if token.kind != "SEPARATOR"]
    for kind in KINDS:
        found: dict[str, Fault] = {}
        for _ in range(100 * per_file):
            fault = _planted(dice, kind, name, text, tokens)
            # `rope()` to `(rope)` is no fault.
            if fault and load_text(fault.text).spec != spec:
                found.setdefault(fault.text, fault)
            if len(found) == per_file:
                break
        yield from found.values()


def _planted(dice: random.Random, kind: str, name: str, text: str, tokens: Sequence[Token]) -> Fault | None:
    at = dice.randrange(len(tokens) - 1)
    token, following = tokens[at], tokens[at + 1]
    start, end = token.start, token.end
    if kind == "dropped":
        new = ""
    elif kind == "doubled":
        new = f"{token.text} {token.text}"
    elif kind == "swapped":
        between = text[token.end : following.start]
        if token.text == following.text or "\n" in between:
            return None
        new, end = f"{following.text}{between or ' '}{token.text}", following.end
    else:
        if not token.text.isidentifier() or len(token.text) < 2:
            return None
        new = _misspelt(dice, token.text)
        if new == token.text or not new.isidentifier():
            return None
    changed = text[:start] + new + text[end:]
    return Fault(name, kind, f"`{text[start:end]}` to `{new}`", text, changed, text.count("\n", 0, start) + 1)


def _misspelt(dice: random.Random, word: str) -> str:
    """One typo: a letter missing, doubled, wrong, or swapped with the next."""
    at = dice.randrange(len(word))
    match dice.randrange(4):
        case 0:
            return word[:at] + word[at + 1 :]
        case 1:
            return word[:at] + word[at] + word[at:]
        case 2:
            return word[:at] + dice.choice(string.ascii_lowercase) + word[at + 1 :]
        case _:
            return word[:at] + word[at + 1 : at + 2] + word[at] + word[at + 2 :]


def diagnosed(text: str) -> list[Diagnostic]:
    """The diagnostics of `moec check`."""
    loaded = load_text(text, "fault.moe")
    found = list(loaded.diagnostics)
    if loaded.spec:
        found += unsupported(loaded.spec)
        try:
            choose_degrees(loaded.spec)
        except DiagnosticError as error:
            found += error.diagnostics
    return found


def first_points_at(fault: Fault, found: Sequence[Diagnostic]) -> bool:
    """Whether the primary span of some error lies on the line that was edited."""
    errors = [one for one in found if one.severity is Severity.ERROR]
    return any(one.span and one.span.line == fault.line for one in errors)


def points_at(fault: Fault, found: Sequence[Diagnostic]) -> bool:
    """Whether any span of an error, its labels' included, lies on the line that was edited."""
    spans = [span for one in found for span in (one.span, *(label.span for label in one.labels))]
    return any(span and span.line == fault.line for span in spans)


def mended(fault: Fault, found: Sequence[Diagnostic]) -> str:
    """The text after the fixes, which a tool may apply by itself."""
    return edited(fault.text, dict.fromkeys(one.fix for one in found))


def _proposed(diagnostic: Diagnostic) -> tuple[Edit, ...]:
    match = re.match(r"did you mean `([^`]+)`", diagnostic.help)
    return (Edit(diagnostic.span, match[1]),) if match and diagnostic.span is not None else ()


def restored(fault: Fault, found: Sequence[Diagnostic]) -> bool:
    """Whether applying the diagnostics' suggestions restores the original: their fixes, else the names they propose."""
    text = fault.text
    edits = {(edit.span.start, edit.span.end, edit.text) for one in found for edit in one.fix or _proposed(one)}
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text == fault.original
