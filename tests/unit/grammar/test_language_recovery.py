"""Syntax errors: one run reports each error of a file at its place, and no consequential errors."""

from __future__ import annotations

from support.tables import each_row

from moec.grammar.diagnostics import Diagnostic
from moec.grammar.source import Source
from moec.grammar.syntax.parser import parse
from moec.grammar.syntax.tree import Assignment, Bad, Block


def errors(text: str) -> list[Diagnostic]:
    return parse(Source("test.moe", text))[1]


def places(text: str) -> list[tuple[str, int, int]]:
    return [(d.code, d.span.line, d.span.column) for d in errors(text) if d.span]


def test_every_error_of_a_file_is_found_in_one_run() -> None:
    text = "x = \ny = 1 2\nb { z : 1; w = ) }\nname = 'q'\nv = 3"
    assert places(text) == [
        ("MOE0101", 1, 5),
        ("MOE0101", 2, 7),
        ("MOE0102", 3, 7),
        ("MOE0105", 3, 16),
        ("MOE0102", 4, 8),
    ]


def test_what_follows_an_error_is_parsed() -> None:
    tree, _ = parse(Source("", "x = = 1\ny = 2"))
    assert tree
    assert [type(statement) for statement in tree.body] == [Bad, Assignment]


def test_the_inside_of_a_block_with_a_bad_head_is_still_checked() -> None:
    tree, diagnostics = parse(Source("", "layers 0 step {\n  x = \n  y = 1\n}\nz = 1"))
    assert [d.span.line for d in diagnostics if d.span] == [1, 2]
    assert tree
    head, after = tree.body
    assert isinstance(head, Bad)
    assert len(head.body) == 2
    assert isinstance(after, Assignment)


@each_row("opening", ["f(1", "[1, 2", "f([1", "f(1, g(2)"])
def test_an_open_parenthesis_costs_one_statement(opening: str) -> None:
    tree, diagnostics = parse(Source("", f"b {{\n  x = {opening}\n  y = 1\n  z = 2\n}}\nw = 3"))
    assert {d.code for d in diagnostics} == {"MOE0104"}
    assert {d.span.line for d in diagnostics if d.span} == {2}
    assert tree
    block = tree.body[0]
    assert isinstance(block, Block)
    assert len(block.body) == 3
    assert len(tree.body) == 2


def test_an_open_brace_is_reported_where_it_was_opened() -> None:
    assert places("a {\n  b {\n    x = 1\n  }\n") == [("MOE0104", 1, 3)]


def test_a_bracket_of_the_wrong_kind_is_reported_once() -> None:
    assert places("x = f(1]\ny = 2") == [("MOE0105", 1, 8)]


def test_a_text_that_is_not_closed_does_not_swallow_the_brace_behind_it() -> None:
    assert places('model "small {\n  x = 1\n}\n') == [("MOE0103", 1, 7)]


def test_nesting_is_bounded() -> None:
    (diagnostic,) = errors("x = " + "(" * 20_000)
    assert diagnostic.code == "MOE0106"
    (diagnostic,) = errors("a {" * 20_000)
    assert diagnostic.code == "MOE0106"
    assert errors("x = " + "(" * 64 + "1" + ")" * 64) == []


@each_row(
    ("text", "message", "help"),
    [
        ("x = 80 GB", "a space before the unit", "`80GB`"),
        ("let = 3", "expected a name, found `=`", ""),
        ("let step = 3", "expected a name, found `step`", "a word of the language"),
        ("x", "found the end of the file", ""),
        ("x = f(1 2)", "a comma is missing before `2`", "commas between them"),
        ("x = f(1 b)", "a comma is missing before `b`", "commas between them"),
        ("1f1b = 3", "found `1f1b`", "names begin with a letter"),
        ("x = .5", "U+002E", "`0.5`"),
        ("x = “a”", "U+201C", '`"`'),
    ],
)
def test_the_message_says_what_was_expected(text: str, message: str, help: str) -> None:
    diagnostic = errors(text)[0]
    assert message in diagnostic.message
    assert help in diagnostic.help


UNCLOSED = """\
a {
  b {
    c {
      x = 1
  }
}
d {
  y = 2
}
"""


def test_indentation_says_which_brace_is_not_closed_and_where_it_would_be() -> None:
    (diagnostic,) = errors(UNCLOSED)
    assert places(UNCLOSED) == [("MOE0104", 3, 7)]
    assert diagnostic.labels[0].span.line == 5
    (edit,) = diagnostic.fix
    mended = UNCLOSED[: edit.span.start] + edit.text + UNCLOSED[edit.span.end :]
    assert errors(mended) == []
    tree, _ = parse(Source("", UNCLOSED))
    assert tree == parse(Source("", mended))[0]


def test_indentation_says_which_brace_is_one_too_many() -> None:
    assert places("a {\n  x = 1\n  }\n  y = 2\n}\nz = 3\n") == [("MOE0105", 3, 3)]
    assert places("a {\n  b { x = 1 } }\n  y = 2\n}\nz = 3\n") == [("MOE0105", 2, 15)]


def test_indentation_counts_for_nothing_where_braces_come_out_even() -> None:
    assert errors("a {\nb {\nx = 1\n      }\n   }") == []


@each_row(("text", "meant"), [("lett x = 3", "let"), ('se "a"\n', "use"), ("x = 1..9 stp 2", "step")])
def test_a_misspelt_keyword_is_mended(text: str, meant: str) -> None:
    (diagnostic,) = errors(text)
    (edit,) = diagnostic.fix
    assert edit.text == meant
    assert diagnostic.help == f"did you mean `{meant}`?"
