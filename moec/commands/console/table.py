"""Tables of text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from moec.grammar.amounts import amount_of_bytes


def table(rows: Sequence[Sequence[str]], numbers: Collection[int] = (), *, indent: int = 2) -> Iterator[str]:
    """The lines of a table. `numbers`: the columns that are aligned on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            text.rjust(width) if column in numbers else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield (" " * indent + "  ".join(cells)).rstrip()


def without_empty_columns(rows: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """The rows, headings first, without the columns whose cells are all empty, `-` or 0."""
    columns = [column for column in zip(*rows, strict=True) if any(cell not in ("", "-", "0") for cell in column[1:])]
    return list(zip(*columns, strict=True))


def amount_or_dash(size: float) -> str:
    """`12.9 GB`; `-` for nothing."""
    return amount_of_bytes(size) if size else "-"
