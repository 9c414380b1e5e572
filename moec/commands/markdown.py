"""Shows a page of Markdown in a terminal: headings, paragraphs, lists, tables, blocks of code, all within its width.

Only what moec's own pages contain. `rich.markdown` does more, but its import alone takes 0.16 s, of the 0.2 s that
`moec explain` may take.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from moec.commands.code_colors import colored_code, folded, folded_text
from moec.commands.inline_markdown import Piece, pieces, width_of, wrapped, written

NARROW_COLUMN = 12
"""A table whose columns would be narrower becomes a list of its rows."""

BOLD, UNDERLINED = "1", "4"


def rendered(text: str, width: int) -> str:
    """The page `text` for a terminal of `width` columns, with ANSI colours. Commands are not wrapped."""
    return "\n\n".join("\n".join(_block(block, width)) for block in _blocks(text)) + "\n"


def _blocks(text: str) -> Iterator[list[str]]:
    """The lines of each block: those between empty lines, and those of a fence."""
    lines: list[str] = []
    fenced = False
    for line in text.splitlines():
        fence = line.startswith("```")
        if not fenced and lines and (fence or not line.strip() or line.startswith("#")):
            yield lines
            lines = []
        if fence or fenced or line.strip():
            lines.append(line)
        if fence:
            fenced = not fenced
        if lines and not fenced and (fence or line.startswith("#")):
            yield lines
            lines = []
    if lines:
        yield lines


def _block(lines: Sequence[str], width: int) -> Iterator[str]:
    first = lines[0]
    if first.startswith("```"):
        code = lines[1:-1] if lines[-1].startswith("```") else lines[1:]
        language = first[3:].strip()
        if language == "moe":
            code = [part for line in code for part in folded(line, width - 2)]
        elif language == "text":
            code = [part for line in code for part in folded_text(line, width - 2)]
        yield from (f"  {line}".rstrip() for line in colored_code("\n".join(code), language))
    elif first.startswith("#"):
        level = len(first) - len(first.lstrip("#"))
        style = f"{BOLD};{UNDERLINED}" if level == 1 else BOLD
        yield from map(written, wrapped(pieces(first.lstrip("# "), style), width))
    elif first.startswith("|"):
        yield from _table([_cells(line) for line in lines], width)
    elif re.match(r"[-*] |\d+\. ", first):
        yield from _list(lines, width)
    else:
        yield from map(written, wrapped(pieces(" ".join(line.strip() for line in lines)), width))


def _list(lines: Sequence[str], width: int) -> Iterator[str]:
    items: list[str] = []
    for line in lines:
        if re.match(r"[-*] |\d+\. ", line):
            items.append(line)
        else:
            items[-1] += f" {line.strip()}"
    for item in items:
        mark, text = item.split(" ", 1)
        mark = "•" if mark in "-*" else mark
        for number, words in enumerate(wrapped(pieces(text), width - len(mark) - 3)):
            yield f"  {mark if number == 0 else ' ' * len(mark)} {written(words)}"


# ---- tables ----------------------------------------------------------------------------------------


def _cells(line: str) -> list[str]:
    """The cells of a row; `\\|` is a bar in a cell."""
    cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
    return [cell.strip().replace("\\|", "|") for cell in cells]


def _table(rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    head, body = rows[0], [row for row in rows[1:] if not all(re.fullmatch(r":?-+:?", cell) for cell in row)]
    head_pieces, body_pieces = ([pieces(cell, BOLD) for cell in head], [[pieces(c) for c in row] for row in body])
    natural = [max(map(width_of, column)) for column in zip(head_pieces, *body_pieces, strict=True)]
    widths = _fitted(natural, width - 2 - 2 * (len(natural) - 1))
    if widths is None:
        yield from _rows_as_list(head, body_pieces, width)
        return
    for row in (head_pieces, *body_pieces):
        cells = [wrapped(cell, size) for cell, size in zip(row, widths, strict=True)]
        for index in range(max(map(len, cells))):
            line = [cell[index] if index < len(cell) else [] for cell in cells]
            yield "  " + _padded(line, widths)


def _padded(line: Sequence[list[Piece]], widths: Sequence[int]) -> str:
    parts = [written(cell) + " " * (size - width_of(cell)) for cell, size in zip(line, widths, strict=True)]
    return "  ".join(parts).rstrip()


def _fitted(natural: Sequence[int], width: int) -> list[int] | None:
    """Widths of columns that fit in `width` together: the widest columns shrink. None if they would be too narrow."""
    widths = list(natural)
    while sum(widths) > width:
        widest = max(range(len(widths)), key=lambda column: widths[column])
        if widths[widest] <= NARROW_COLUMN:
            return None
        widths[widest] -= 1
    return widths


def _rows_as_list(head: Sequence[str], rows: Sequence[Sequence[list[Piece]]], width: int) -> Iterator[str]:
    """Each row as its first cell, and a line `heading: cell` for each other."""
    for first, *others in rows:
        yield from ("  " + written(line) for line in wrapped(first, width - 2))
        for name, cell in zip(head[1:], others, strict=True):
            if width_of(cell):
                yield from ("    " + written(line) for line in wrapped([*pieces(f"{name}:"), *cell], width - 4))
