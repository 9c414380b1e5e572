"""Highlighting: the same table for Pygments and TextMate, and no error token in any valid file."""

from __future__ import annotations

import json
import re
from pathlib import Path

from pygments.lexers import get_lexer_by_name
from pygments.token import Error, Keyword, Name, Number, Token
from support.tables import each_row

from moec.commands.init import STARTER
from moec.grammar.editor import textmate
from moec.grammar.editor.lexer import MoeLexer
from moec.grammar.editor.token_table import table
from moec.grammar.syntax.tokens import lex

ROOT = Path(__file__).parents[3]
FILES = {
    path.name: path.read_text(encoding="utf-8")
    for folder in ("tests/cases", "examples", "grammar/library", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.moe"))
} | {"starter": STARTER}


@each_row("name", FILES)
def test_no_error_token_and_every_character_kept(name: str) -> None:
    found = list(MoeLexer(ensurenl=False, stripnl=False).get_tokens(FILES[name]))
    assert not [text for kind, text in found if kind in Error]
    assert "".join(text for _, text in found) == FILES[name]


@each_row("name", FILES)
def test_highlighting_cuts_where_the_compiler_does(name: str) -> None:
    tokens = [token.text for token in lex(FILES[name], comments=True) if token.kind != "SEPARATOR" or token.text == ";"]
    found = MoeLexer(ensurenl=False, stripnl=False).get_tokens(FILES[name])
    assert [text for kind, text in found if kind not in Token.Text.Whitespace] == tokens


def test_words_are_told_apart() -> None:
    kinds = {
        text: kind for kind, text in MoeLexer().get_tokens("model { gate = topk(2, score = sigmoid) } let x = 8GB/s")
    }
    assert kinds["model"] is Keyword.Declaration
    assert kinds["gate"] is Name.Attribute
    assert kinds["topk"] is Name.Function
    assert kinds["sigmoid"] is Name.Constant
    assert kinds["let"] is Keyword
    assert kinds["8GB/s"] is Number


def test_pygments_finds_the_lexer() -> None:
    assert isinstance(get_lexer_by_name("moe"), MoeLexer)


def test_the_textmate_grammar_is_current_and_says_the_same(update_golden: bool) -> None:
    if update_golden:
        textmate.FILE.write_text(textmate.textmate(), encoding="utf-8")
    text = textmate.FILE.read_text(encoding="utf-8")
    assert text == textmate.textmate(), "run `python -m moec.grammar.editor.textmate`"
    patterns = json.loads(text)["patterns"]
    assert [pattern["match"] for pattern in patterns] == [token.pattern for token in table() if token.textmate]
    assert all(re.compile(pattern["match"]) for pattern in patterns)
