"""Pages of Markdown in a terminal: all of the text, within the width, in colours."""

from __future__ import annotations

import re

import pytest
from running import Run
from support.tables import each_row

from moec.commands.explain import explain
from moec.commands.markdown import NARROW_COLUMN, _fitted, rendered
from moec.grammar.diagnostics import CODES
from moec.grammar.resolve.library import library_paths, library_text

ESCAPES = re.compile(r"\x1b\[[0-9;]*m|\x1b\]8;;[^\x1b]*\x1b\\")


def plain(text: str) -> str:
    return ESCAPES.sub("", text)


@each_row("width", [40, 80, 120])
@each_row("subject", ["topk", "moe", "gqa", "bias", "MOE0311", "dgx_h100"])
def test_a_page_fits_the_width_and_loses_no_word(subject: str, width: int) -> None:
    markdown = explain(subject).markdown
    shown = plain(rendered(markdown, width))
    # A list of rows has no use for the heading of its first column.
    said = set(re.findall(r"\w+", re.sub(r"```\w*|^\| (name|in) \|", "", markdown, flags=re.MULTILINE)))
    assert said <= set(re.findall(r"\w+", shown))
    code = "".join(re.findall(r"```\w+\n(.*?)```", markdown, re.DOTALL))
    for line in shown.splitlines():
        assert len(line) <= width or line.strip() in code, line


def test_columns_shrink_to_the_narrow_width_and_no_further() -> None:
    wide = [3 * NARROW_COLUMN, NARROW_COLUMN]
    assert _fitted(wide, 2 * NARROW_COLUMN) == [NARROW_COLUMN] * 2
    assert _fitted(wide, 2 * NARROW_COLUMN - 1) is None


def test_styles_end_where_they_began() -> None:
    page = rendered("# A `b` c\n\nSee [the guide](https://example.org/x) and **bold** `x = 1`, then more.\n", 60)
    assert page == (
        "\x1b[1;4mA\x1b[0m \x1b[1;4;36mb\x1b[0m \x1b[1;4mc\x1b[0m\n\n"
        "See \x1b]8;;https://example.org/x\x1b\\\x1b[4mthe guide\x1b[0m\x1b]8;;\x1b\\ and \x1b[1mbold\x1b[0m "
        "\x1b[36mx = 1\x1b[0m, then more.\n"
    )


def test_a_table_wraps_its_widest_column_and_becomes_a_list_where_it_cannot() -> None:
    table = "| name | meaning |\n| --- | --- |\n| `k` | experts that each token goes to |\n"
    assert plain(rendered(table, 32)) == ("  name  meaning\n  k     experts that each token\n        goes to\n")
    assert plain(rendered(table, 14)) == "  k\n    meaning:\n    experts\n    that each\n    token goes\n    to\n"


def test_items_of_a_list_hang_and_moe_code_is_coloured() -> None:
    page = rendered("- one two three four\n- five\n\n```moe\nep = 2  # two\n```\n", 14)
    assert page == "  • one two\n    three four\n  • five\n\n  ep = \x1b[33m2\x1b[0m  \x1b[2m# two\x1b[0m\n"


def test_every_code_has_a_page_that_renders() -> None:
    for code in CODES:
        assert code in plain(rendered(explain(code).markdown, 80))


def test_explain_renders_where_colours_are_asked_for_and_is_markdown_in_a_pipe(
    moec: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    assert moec("explain", "topk").out.startswith("# `topk`\n")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    assert moec("explain", "topk").out.startswith("\x1b[1;4;36mtopk\x1b[0m\n")
    monkeypatch.setenv("NO_COLOR", "1")  # the stated width is kept
    assert moec("explain", "topk").out.startswith("topk\n")
    for word in ("topk", "MOE0016", "MOE0501"):
        assert max(map(len, moec("explain", word).out.splitlines())) <= 80


@each_row(
    ("name", "use"),
    [
        ("h200", "`device = h200`"),
        ("dgx-h100", '`use "clusters/dgx_h100"`'),
        ("qwen3_30b_a3b", "`moec init --from qwen3_30b_a3b`"),
    ],
)
def test_a_file_of_the_library_is_explained_by_its_text(name: str, use: str) -> None:
    found = explain(name)
    assert found.kind == "file of the library"
    assert use in found.markdown
    assert library_text(next(path for path in library_paths() if path.endswith("/" + found.subject))) in found.markdown
