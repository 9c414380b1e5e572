"""Pages of Markdown in a terminal: all of the text, within the width."""

from __future__ import annotations

import re

import pytest
from running import Run
from support.tables import each_row

from moec.commands.console.markdown import rendered
from moec.commands.explain import explain
from moec.grammar.diagnostics import CODES
from moec.grammar.resolve.library import library_paths, library_text

ESCAPES = re.compile(r"\x1b\[[0-9;]*m|\x1b\]8;;[^\x1b]*\x1b\\")


@each_row("width", [40, 80])
@each_row("subject", ["topk", "moe", "MOE0311", "dgx_h100"])
def test_a_page_fits_the_width_and_loses_no_character(subject: str, width: int) -> None:
    markdown = explain(subject).markdown
    shown = rendered(markdown, width, colors=False)
    assert max(map(len, shown.splitlines())) <= width
    source = re.sub(r"```\w*|\]\([^)]*\)", "", markdown)
    assert all(shown.count(letter) == source.count(letter) for letter in set(re.findall(r"\w|…", source)))


def test_every_code_has_a_page_that_renders() -> None:
    for code in CODES:
        assert code in rendered(explain(code).markdown, 80, colors=False)


def test_colors_are_codes_around_the_same_text() -> None:
    markdown = explain("topk").markdown
    shown = rendered(markdown, 80, colors=True)
    plain = "\n".join(line.rstrip() for line in ESCAPES.sub("", shown).splitlines())
    assert plain == rendered(markdown, 80, colors=False) != shown


def test_explain_renders_where_colours_are_asked_for_and_is_markdown_in_a_pipe(
    moec: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(variable, raising=False)
    assert moec("explain", "topk").out == explain("topk").markdown
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    assert ESCAPES.search(moec("explain", "topk").out)
    monkeypatch.setenv("NO_COLOR", "1")  # the stated width is kept
    shown = moec("explain", "topk").out
    assert not ESCAPES.search(shown)
    assert shown.splitlines()[0].strip() == "topk"
    assert max(map(len, shown.splitlines())) <= 80


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
