"""The constructs: the tree of each, and the end of a statement."""

from __future__ import annotations

from support.tables import each_row

from moec.grammar.source import Source, Span
from moec.grammar.syntax.parser import parse
from moec.grammar.syntax.tree import (
    Argument,
    Assignment,
    Block,
    Call,
    File,
    Let,
    Name,
    Negative,
    Number,
    Operation,
    Range,
    Sequence,
    String,
    Use,
)

HERE = Span(Source("", ""), 0, 0)  # spans take no part in equality


def tree_of(text: str) -> File:
    tree, diagnostics = parse(Source("test.moe", text))
    assert not diagnostics
    assert tree
    return tree


def value_of(text: str) -> object:
    (statement,) = tree_of(f"x = {text}").body
    assert isinstance(statement, Assignment)
    return statement.value


def name(text: str) -> Name:
    return Name(text, HERE)


def number(text: str) -> Number:
    return Number(text, HERE)


def test_use_let_and_assignment() -> None:
    assert tree_of('use "a/b"\nlet n = 8\nx = n').body == (
        Use(String("a/b", HERE), HERE),
        Let(name("n"), number("8"), HERE),
        Assignment(name("x"), name("n"), HERE),
    )


@each_row("text", ["32_000", "1e-5", "0.02", "1e6", "450GB/s", "2us", "989.4TFLOPS", "32k", "4Mi", "3E+8", "7B"])
def test_a_number_is_one_token_with_its_unit(text: str) -> None:
    assert value_of(text) == number(text)


def test_dots_of_a_range_are_not_a_fraction() -> None:
    assert value_of("0..31") == Range(number("0"), number("31"), None, HERE)
    assert value_of("0 .. n step 2") == Range(number("0"), name("n"), number("2"), HERE)


def test_a_slash_before_a_longer_name_is_a_division() -> None:
    assert value_of("4GB/step_count") == Operation(number("4GB"), (("/", name("step_count")),), HERE)


def test_calls_take_positional_and_named_arguments_and_a_trailing_comma() -> None:
    assert value_of("topk(2, normalize = true,)") == Call(
        name("topk"),
        (Argument(None, number("2"), HERE), Argument(name("normalize"), name("true"), HERE)),
        HERE,
    )
    assert value_of("adamw()") == Call(name("adamw"), (), HERE)


def test_products_bind_tighter_than_sums_and_both_are_flat() -> None:
    product = Operation(number("2"), (("*", number("3")), ("/", number("4"))), HERE)
    assert value_of("1 + 2 * 3 / 4 - 5") == Operation(number("1"), (("+", product), ("-", number("5"))), HERE)
    total = Operation(number("1"), (("+", number("2")),), HERE)
    assert value_of("(1 + 2) * -x") == Operation(total, (("*", Negative(name("x"), HERE)),), HERE)


def test_lists_may_span_lines_and_hold_anything() -> None:
    expected = Sequence((number("1"), Range(number("2"), number("3"), None, HERE), String("x", HERE)), HERE)
    assert value_of('[\n  1,\n  2..3, "x",\n]') == expected
    assert value_of("[]") == Sequence((), HERE)


@each_row(
    ("selector", "expected"),
    [
        ("", None),
        ("5", number("5")),
        ("last", name("last")),
        ("(n - 1)", Operation(name("n"), (("-", number("1")),), HERE)),
        ("0..31", Range(number("0"), number("31"), None, HERE)),
        ("0..31 step 2", Range(number("0"), number("31"), number("2"), HERE)),
        ("[3, 7]", Sequence((number("3"), number("7")), HERE)),
    ],
)
def test_selectors(selector: str, expected: object) -> None:
    assert tree_of(f"layers {selector} {{ }}").body == (Block(name("layers"), None, expected, (), HERE),)  # type: ignore[arg-type]


def test_a_newline_a_semicolon_or_a_closing_brace_ends_a_statement() -> None:
    inner = (Assignment(name("x"), number("1"), HERE), Assignment(name("y"), number("2"), HERE))
    block = Block(name("b"), String("l", HERE), None, inner, HERE)
    for text in ('b "l" { x = 1; y = 2 }', 'b "l" {\n x = 1\n\n ;; y = 2 # c\n}\n', 'b "l" {x=1;y=2;}'):
        assert tree_of(text).body == (block,)
    assert tree_of('b "l" { x = 1; y = 2 } b "l" { x = 1; y = 2 }').body == (block, block)


def test_comments_and_blanks_mean_nothing() -> None:
    assert tree_of("# nothing\n\t \n").body == ()
    assert value_of("(1 # one\n + 2)") == value_of("1 + 2")


def test_carriage_returns_belong_to_the_line_end() -> None:
    assert tree_of("x = 1\r\ny = 2 # c\r\n") == tree_of("x = 1\ny = 2")


def test_spans_cover_what_was_written() -> None:
    text = 'block "l" 0..2 { x = f(1, b = 2) }'
    (block,) = tree_of(text).body
    assert isinstance(block, Block)
    (assignment,) = block.body
    assert isinstance(assignment, Assignment)
    assert isinstance(assignment.value, Call)
    cut = [text[span.start : span.end] for span in (block.span, block.head, assignment.span, assignment.value.span)]
    assert cut == [text, 'block "l" 0..2', "x = f(1, b = 2)", "f(1, b = 2)"]
    assert [text[a.span.start : a.span.end] for a in assignment.value.arguments] == ["1", "b = 2"]


def test_a_sum_of_ten_thousand_terms_is_not_deep() -> None:
    value = value_of(" + ".join(["1"] * 10_000))
    assert isinstance(value, Operation)
    assert len(value.rest) == 9_999
