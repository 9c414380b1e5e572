"""`moec check --fix`: applies the fixes of diagnostics to the files that they are about."""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from moec.commands.console.replace_file import replace_file
from moec.grammar.diagnostics import Diagnostic, Edit, Severity
from moec.grammar.diagnostics.visible import cut, printable
from moec.grammar.syntax.tokens import lex

SYNTAX, GIVEN_TWICE = "MOE01", "MOE0204"
"""Codes of errors that no fix may add: texts that do not parse, and a name that is given twice."""

_FOREIGN = re.compile(r'//|/\*|"""')
"""The beginnings of other languages' comments. Fixes turn them into comments of this language before other edits."""

Check = Callable[[str], Sequence[Diagnostic]]
"""The diagnostics of a file with another text."""


def apply_fixes(file: Path, diagnostics: Iterable[Diagnostic], check: Check | None = None) -> list[tuple[Edit, ...]]:
    """Applies fixes of `diagnostics` to `file` and to the files that it uses; returns those that it applied.

    Of two overlapping fixes it applies only the first, and it applies none that would remove a comment. The library and
    the command line are not edited. With `check`, it omits fixes that would add errors of syntax to `file`.
    Raises `DiagnosticError` MOE0014 for a file that cannot be replaced.
    """
    initial = list(diagnostics)
    chosen: dict[str, list[tuple[Edit, ...]]] = {}
    edited_ranges: dict[str, list[tuple[int, int]]] = {}
    for fix in (diagnostic.fix for diagnostic in initial if _is_applicable(diagnostic.fix)):
        name = fix[0].span.source.name
        places = edited_ranges.setdefault(name, [])
        if not any(_overlaps(edit, places) for edit in fix):
            chosen.setdefault(name, []).append(fix)
            for edit in fix:
                insort(places, (edit.span.start, edit.span.end))
    applied = []
    for name, fixes in chosen.items():
        target = file.parent / name
        source = fixes[0][0].span.source
        if check is not None and name == file.name:
            fixes = _without_harm(source.text, fixes, initial, check)
        if fixes:
            replace_file(target, source.text, edited(source.text, fixes))
            applied += fixes
    return applied


def in_words(fix: Sequence[Edit]) -> str:
    """A line that says what a fix changed and where: "a.moe:3: `hidden_size` → `dim`"."""
    start = fix[0].span
    changes = ", ".join(dict.fromkeys(_change(edit) for edit in fix))
    return f"{printable(start.source.name)}:{start.source.position(start.start)[0]}: {cut(changes)}"


def _change(edit: Edit) -> str:
    old, new = (printable(" ".join(text.split())) for text in (_replaced(edit), edit.text))
    if not old:
        return f"`{new}` added"
    return f"`{old}` → `{new}`" if new else f"`{old}` removed"


def edited(text: str, fixes: Iterable[Iterable[Edit]]) -> str:
    """`text` after fixes that do not overlap."""
    pieces, at = [], 0
    for edit in sorted((edit for fix in fixes for edit in fix), key=lambda edit: (edit.span.start, edit.span.end)):
        pieces += [text[at : edit.span.start], edit.text]
        at = edit.span.end
    return "".join([*pieces, text[at:]])


def _is_applicable(fix: Sequence[Edit]) -> bool:
    """Whether the fix edits a file of the user, and keeps the comments in the text that it replaces."""
    if not fix or any(edit.span.source.name.startswith(("library:", "--let")) for edit in fix):
        return False
    new_text = "".join(edit.text for edit in fix)
    return all(comment in new_text for edit in fix for comment in _comments(edit))


def _comments(edit: Edit) -> list[str]:
    replaced = _replaced(edit)
    if foreign := _FOREIGN.search(replaced):  # an edit of the comment itself keeps it
        return [] if replaced == "//" or not foreign.start() else [replaced]
    if "#" not in replaced:
        return []
    return [token.text for token in lex(replaced, comments=True) if token.kind == "COMMENT"]


def _replaced(edit: Edit) -> str:
    return edit.span.source.text[edit.span.start : edit.span.end]


MAX_TRIED_ALONE = 64
"""The most fixes that are tried one by one if all together add errors."""


def _without_harm(
    text: str, fixes: list[tuple[Edit, ...]], initial: Sequence[Diagnostic], check: Check
) -> list[tuple[Edit, ...]]:
    """The fixes that add no error of syntax: all of them together, or else each that adds none to those before it."""
    if not _harms(initial, check(edited(text, fixes))):
        return fixes
    harmless: list[tuple[Edit, ...]] = []
    for fix in fixes[:MAX_TRIED_ALONE]:
        if not _harms(initial, check(edited(text, [*harmless, fix]))):
            harmless.append(fix)
    return harmless


def _harms(before: Iterable[Diagnostic], after: Iterable[Diagnostic]) -> bool:
    """Whether there are more errors than before of a code that no fix may add."""
    return bool(_guarded_errors(after) - _guarded_errors(before))


def _guarded_errors(diagnostics: Iterable[Diagnostic]) -> Counter[str]:
    errors = (diagnostic.code for diagnostic in diagnostics if diagnostic.severity is Severity.ERROR)
    return Counter(code for code in errors if code.startswith(SYNTAX) or code == GIVEN_TWICE)


def _overlaps(edit: Edit, places: Sequence[tuple[int, int]]) -> bool:
    """Whether the edit overlaps one of `places`, or begins where one begins; `places` are sorted and do not overlap."""
    start, end = edit.span.start, edit.span.end
    index = bisect_left(places, (start, start))
    if index < len(places) and (places[index][0] == start or places[index][0] < end):
        return True
    return index > 0 and places[index - 1][1] > start
