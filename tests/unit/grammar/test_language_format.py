"""`moec fmt`: its rules for spacing, alignment, blank lines, long lines and comments."""

from __future__ import annotations

from support.tables import each_row

from moec.grammar.format import formatted
from moec.grammar.source import Source


def fmt(text: str) -> str:
    return formatted(Source("x.moe", text))


@each_row(
    ("before", "after"),
    [
        ("", ""),
        ("a=1", "a = 1\n"),
        ("\n\n# top\n\n\n\na = 1\n\n\n", "# top\n\na = 1\n"),
        ("a=1;bcd=2", "a   = 1\nbcd = 2\n"),
        ("a = 1\n\nbcd = 2", "a = 1\n\nbcd = 2\n"),
        ("let a=1\nb=2", "let a = 1\nb = 2\n"),
        ("a=-1+2*-( b/3 )", "a = -1 + 2 * -(b / 3)\n"),
        ("layers(1+2)..( 4 ) step 2{x=1}", "layers (1 + 2)..(4) step 2 { x = 1 }\n"),
        ("layers[1,2]{\nx=f( a=1 ,)\n}", "layers [1, 2] {\n  x = f(a = 1)\n}\n"),
        ('model  "m"{}', 'model "m" { }\n'),
        ("b {\n\n  x = 1\n\n}", "b {\n  x = 1\n}\n"),
        ("a = 1 # x\nbcd = 22   # y", "a   = 1   # x\nbcd = 22  # y\n"),
        ("a = [\n1, # one\n2\n]", "a = [\n  1,  # one\n  2,\n]\n"),
        ("a = 1\r\nb\t= 2", "a = 1\nb = 2\n"),
    ],
)
def test_layout(before: str, after: str) -> None:
    assert fmt(before) == after
    assert fmt(after) == after


def test_a_line_that_is_too_long_is_broken_at_its_longest_bracket() -> None:
    arguments = ", ".join(f"name_{number} = {number}" for number in range(12))
    lines = fmt(f"b {{ x = f({arguments}) }}").splitlines()
    assert lines[:3] == ["b {", "  x = f(", "    name_0 = 0,"]
    assert lines[-3:] == ["    name_11 = 11,", "  )", "}"]


def test_comments_stay_at_what_they_are_about() -> None:
    text = "b {  # opening\n  # above\n  x = 1  # behind\n  # last\n}  # closing\n"
    assert fmt(text) == text
