"""Users' names in diagnostics: characters that a terminal would obey are escaped, and very long words are cut."""

from __future__ import annotations

import re

LONGEST, SHOWN = 200, 60
"""A word of more than `LONGEST` characters, such as a name of a megabyte, is cut to `SHOWN`."""
LONGEST_PATH = 4096
"""A help has paths and commands to be copied: they are cut only where no system has such a path."""


def printable(text: str) -> str:
    """`text` with escapes such as `\\x1b` for characters that do not print. Newlines stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def cut(text: str, longest: int = LONGEST) -> str:
    """`text` in which words of more than `longest` characters are cut, with `…`. Quotes around them stay."""
    if len(text) <= longest:
        return text
    return re.sub(rf"[^\s`'\"]{{{longest + 1},}}", lambda word: f"{word[0][:SHOWN]}…", text)
