"""Colours of code in a terminal: `.moe` by the table that editors use, and diagnostics."""

from __future__ import annotations

import re
from functools import cache
from textwrap import wrap

from moec.grammar.editor.token_table import table

COLORS = {
    "Comment": "2",
    "String": "32",
    "Keyword": "35",
    "Number": "33",
    "Name.Attribute": "",
    "Name.Function": "36",
    "Name.Constant": "34",
}
"""ANSI's SGR code by the Pygments token, or the part of it before a dot. Other tokens are left as they are."""

DIAGNOSTIC = (("error[", "1;31"), ("warning[", "1;33"), ("help:", "1;32"), ("note:", "1;36"))


def colored_code(text: str, language: str) -> list[str]:
    """The lines of a block of code."""
    if language == "moe":
        return _moe(text).split("\n")
    return [_diagnostic(line) for line in text.split("\n")]


def folded(line: str, width: int) -> list[str]:
    """A line of `.moe` code that is longer than `width`, cut after commas; what follows is indented."""
    lines, indent = [""], " " * (len(line) - len(line.lstrip()) + 4)
    for part in re.split(r"(?<=, )", line):
        if lines[-1].strip() and len(lines[-1] + part.rstrip()) > width:
            lines.append(indent)
        lines[-1] += part
    return lines


def folded_text(line: str, width: int) -> list[str]:
    """A line of output that is longer than `width`, folded. What follows stands under the text, behind its bar."""
    if len(line) <= width:
        return [line]
    found = re.match(r"[ \d]*(?:\|)?[ ^-]*(?:help: )?", line)
    start = found[0] if found and found.end() <= width // 2 else ""
    rest = re.sub(r"[^ |]", " ", start)
    return wrap(line[len(start) :], width, initial_indent=start, subsequent_indent=rest, break_on_hyphens=False)


def _moe(text: str) -> str:
    pattern, styles = _pattern()

    def colored(found: re.Match[str]) -> str:
        style = styles[found.lastgroup or ""]
        return f"\x1b[{style}m{found[0]}\x1b[0m" if style and found[0].strip() else found[0]

    return pattern.sub(colored, text)


@cache
def _pattern() -> tuple[re.Pattern[str], dict[str, str]]:
    tokens = {f"t{number}": token for number, token in enumerate(table())}
    pattern = "|".join(f"(?P<{name}>{token.pattern})" for name, token in tokens.items())
    styles = {name: COLORS.get(t.pygments, COLORS.get(t.pygments.split(".")[0], "")) for name, t in tokens.items()}
    return re.compile(pattern), styles


def _diagnostic(line: str) -> str:
    for start, style in DIAGNOSTIC:
        if line.startswith(start):
            head, colon, rest = line.partition(":")
            return f"\x1b[{style}m{head}{colon}\x1b[0m{rest}"
    return line
