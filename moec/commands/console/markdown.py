"""Shows a page of Markdown in a terminal, by `rich.markdown`, whose import takes 0.16 s: only where one is shown."""

from __future__ import annotations

from io import StringIO
from typing import ClassVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown, MarkdownElement, TableElement
from rich.table import Table
from rich.theme import Theme

THEME = Theme({"markdown.code": "cyan"})
"""The terminal's own background behind words in code."""


def rendered(text: str, width: int, *, colors: bool) -> str:
    """The page `text` for a terminal of `width` columns, with ANSI codes if `colors`."""
    page, system = StringIO(), "standard" if colors else None
    console = Console(file=page, width=width, color_system=system, force_terminal=colors, no_color=False, theme=THEME)  # type: ignore[arg-type]
    console.print(_Page(text, code_theme="ansi_dark"))
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines())


class _Folded(TableElement):
    """A table whose narrow columns fold words that are longer; rich would cut them off."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in super().__rich_console__(console, options):
            for column in part.columns if isinstance(part, Table) else ():
                column.overflow = "fold"
            yield part


class _Page(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = Markdown.elements | {"table_open": _Folded}
