"""The committed tables match the grammar, and moec's parser agrees with lark."""

from __future__ import annotations

from pathlib import Path

from lark import Token
from lark.exceptions import UnexpectedInput
from support.tables import each_row

from moec.grammar.source import Source
from moec.grammar.syntax import generate
from moec.grammar.syntax.brackets import arrange
from moec.grammar.syntax.parser import parse

CASES = sorted(Path(__file__).parents[2].glob("cases/*.moe"))
LARK = generate.build()


def test_tables_are_those_of_the_grammar() -> None:
    committed = generate.TABLES.read_text(encoding="utf-8")
    assert committed == generate.tables(), "run `python -m moec.grammar.syntax.generate`"


def lark_accepts(text: str) -> bool:
    parser = LARK.parse_interactive("", start="file")
    try:
        for token in arrange(Source("", text)).tokens:
            parser.feed_token(Token(token.kind, token.text))
    except UnexpectedInput:
        return False
    return True


@each_row("path", CASES)
def test_lark_accepts_what_the_parser_accepts(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert lark_accepts(text)
    lines = text.splitlines()
    for dropped in range(len(lines)):
        mutated = "\n".join(lines[:dropped] + lines[dropped + 1 :])
        codes = {d.code for d in parse(Source("", mutated))[1]}
        assert lark_accepts(mutated) == (not codes & {"MOE0101", "MOE0109"})
