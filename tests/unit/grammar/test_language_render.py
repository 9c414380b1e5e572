"""Renderings: the text of each, and that no file can inject control characters into a terminal or a log."""

from __future__ import annotations

import json
import unicodedata

import pytest
from support.tables import each_row

from moec.grammar import Diagnostic, Source, Span, load_text, render
from moec.grammar.diagnostics import STYLES, DiagnosticError, Label, Severity

SOURCE = Source("m.moe", "one = 1\n\ttwo = 2\nthree = 3\nfour = 4\nfünf = 漢字 + 5\n")


def at(text: str, source: Source = SOURCE) -> Span:
    start = source.text.index(text)
    return Span(source, start, start + len(text))


def diagnostic(span: Span | None, *labels: tuple[Span, str], message: str = "here", help: str = "") -> Diagnostic:
    return Diagnostic(
        code="MOE0999",
        title="a title",
        span=span,
        message=message,
        labels=tuple(Label(span=place, message=text) for place, text in labels),
        help=help,
    )


def test_full_shows_the_lines_in_order_with_a_gap_between() -> None:
    found = diagnostic(at("4"), (at("1"), "first"), (at("four"), "also"), help="do it")
    assert render([found]) == (
        "error[MOE0999]: a title\n"
        " --> m.moe:4:8\n"
        "  |\n"
        "1 | one = 1\n"
        "  |       - first\n"
        " ⋮\n"
        "4 | four = 4\n"
        "  |        ^ here\n"
        "  | ---- also\n"
        "  |\n"
        "help: do it\n"
    )


def test_full_shows_each_file() -> None:
    other = Source("library:x.moe", "a = b")
    text = render([diagnostic(at("4"), (at("b", other), "there"))])
    assert "::: library:x.moe:1:5\n  |\n1 | a = b\n  |     - there" in text


def test_tabs_and_wide_characters_keep_the_marks_in_place() -> None:
    text = render([diagnostic(at("two"), (at("漢字"), "wide"), (at("5"), "five"))])
    assert "2 |     two = 2\n  |     ^^^ here" in text
    assert "5 | fünf = 漢字 + 5\n  |               - five\n  |        ---- wide" in text


def test_control_characters_never_reach_a_terminal() -> None:
    source = Source("m.moe", "x = \x1b[31m\u202e\x07")
    text = render([diagnostic(Span(source, 4, 5))])
    assert not any(ord(character) < 32 for character in text.replace("\n", ""))
    assert "\u202e" not in text


def test_a_long_line_is_cut_around_the_mark() -> None:
    source = Source("m.moe", "x = [" + "1, " * 5000 + "oops" + ", 2" * 5000 + "]")
    lines = render([diagnostic(at("oops", source))]).splitlines()
    assert max(map(len, lines)) < 180
    code, mark = lines[3], lines[4]
    assert mark[code.index("oops") :].startswith("^^^^ here")


@each_row("width", [40, 60, 100, 200])
@each_row(
    "line",
    [
        "name = " + "long_" * 60 + " oops " + "tail " * 40,
        "漢字 = " + "漢字 " * 60 + " oops " + "語 " * 60,
        "\t" * 9 + "oops\t" + "x" * 250,
        "é = " + "e\u0301 " * 80 + "oops 🙂 " + "🙂" * 80,
    ],
)
def test_every_line_fits_the_terminal_and_the_mark_stands_under_its_word(width: int, line: str) -> None:
    source = Source("m.moe", line)
    found = diagnostic(
        at("oops", source), message="why this word is wrong, in a long sentence " * 4, help="do it " * 60
    )
    lines = render([found], width=width).splitlines()
    assert max(map(columns, lines)) <= width
    code, mark = lines[3], lines[4]
    assert columns(code[: code.index("oops")]) == columns(mark[: mark.index("^^^^")])
    assert sum(line.count("sentence") for line in lines) == 4


def columns(text: str) -> int:
    """The columns of `text` in a terminal."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.combining(character) > 0 for character in text)


def test_a_mark_far_right_has_its_message_under_it() -> None:
    source = Source("m.moe", "x = [" + "1, " * 11 + "oops]")
    lines = render(
        [diagnostic(at("oops", source), message="a sentence that is too long for the rest")], width=50
    ).splitlines()
    assert lines[4].endswith("^^^^")
    assert lines[5].split("|")[1].strip() == "a sentence that is too long for the rest"


def test_a_span_over_several_lines_is_marked_on_its_first() -> None:
    text = render([diagnostic(Span(SOURCE, 0, 20))])
    assert "1 | one = 1\n  | ^^^^^^^ here\n" in text


def test_spans_at_the_end_of_a_file_are_shown() -> None:
    text = render(load_text('model "m" {').diagnostics)
    assert "MOE0104" in text
    assert render([diagnostic(Span(SOURCE, len(SOURCE.text), len(SOURCE.text)))])
    assert render([diagnostic(Span(Source("empty.moe", ""), 0, 0))])


def test_a_diagnostic_without_a_place_has_its_message() -> None:
    assert render([diagnostic(None)]) == "error[MOE0999]: a title\n  here\n"


def test_colours_are_there_only_when_asked_for() -> None:
    found = [diagnostic(at("4"), help="h")]
    coloured = render(found, color=True)
    assert "\x1b[" in coloured
    assert "\x1b" not in render(found)
    import re

    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == render(found)


def test_concise_is_one_line_each() -> None:
    text = render([diagnostic(at("4")), diagnostic(None, message="")], "concise")
    assert text == "m.moe:4:8: error[MOE0999]: a title: here\nerror[MOE0999]: a title\n"


def test_json_has_it_all() -> None:
    (found,) = json.loads(render([diagnostic(at("four"), (at("1"), "first"), help="h")], "json"))
    assert found["span"] == {"file": "m.moe", "line": 4, "column": 1, "end_line": 4, "end_column": 5}
    assert (found["code"], found["severity"], found["help"]) == ("MOE0999", "error", "h")
    assert found["labels"][0]["message"] == "first"
    assert json.loads(render([diagnostic(None)], "json"))[0]["span"] is None


def test_github_escapes_what_would_end_a_command() -> None:
    source = Source("a,b:c.moe", "x")
    text = render([diagnostic(Span(source, 0, 1), message="50%\n::error::x", help="two")], "github")
    assert text == ("::error file=a%2Cb%3Ac.moe,line=1,col=1,title=MOE0999::a title: 50%25%0A::error::x%0Ahelp: two\n")


def test_a_warning_is_called_one() -> None:
    found = Diagnostic(code="MOE0005", title="t", span=None, severity=Severity.WARNING)
    assert render([found], "concise").startswith("warning[")


def test_every_style_renders_nothing_as_nothing_and_others_are_refused() -> None:
    assert [render([], style) for style in STYLES] == ["", "", "[]\n", ""]
    with pytest.raises(ValueError, match="full, concise, json, github"):
        render([], "html")


@each_row(("first", "second"), [("one", "two"), ("two", "one")])
def test_a_second_mark_beside_the_shown_part_stands_under_its_word(first: str, second: str) -> None:
    source = Source("m.moe", f"a = {'x' * 100} one {'y' * 200} two {'z' * 100}\n")
    lines = render([diagnostic(at(first, source), (at(second, source), "there"))], width=80).splitlines()
    assert max(map(len, lines)) <= 80
    for sign, word in (("^^^ here", first), ("--- there", second)):
        (row,) = (number for number, line in enumerate(lines) if line.rstrip().endswith(sign))
        assert lines[row - 1][lines[row].index(sign) :].startswith(word)


def test_texts_and_names_of_files_do_not_reach_a_terminal_raw() -> None:
    source = Source("\x1b[31mm.moe", "a = 1\n")
    found = diagnostic(at("1", source), message="\x1b]0;x\x07 `\u202e`", help="\x9b31m")
    for style in ("full", "concise", "github"):
        assert not set("\x1b\x07\u202e\x9b") & set(render([found], style)), style
    assert not set("\x1b\x07\u202e\x9b") & set(str(DiagnosticError([found])))
