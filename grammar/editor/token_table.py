"""The one table of how a `.moe` file is coloured; the Pygments lexer and the TextMate grammar are made from it.

Which words are blocks, calls or values comes from the schema, so a new word is coloured from the day it is declared.
"""

from __future__ import annotations

from dataclasses import dataclass

from moec.grammar.schema import ListKind, WordKind, fields
from moec.grammar.schema_in_words import vocabulary
from moec.grammar.units import UNITS


@dataclass(frozen=True, slots=True)
class Token:
    """A pattern with its Pygments token type and its TextMate scope."""

    name: str
    pattern: str
    pygments: str
    textmate: str


def table() -> tuple[Token, ...]:
    """Every token; the first match wins. Python and Oniguruma read the patterns the same way."""
    blocks, calls, values = _words()
    units = "|".join(sorted((unit.replace("/", r"\/") for unit in UNITS), key=lambda unit: (-len(unit), unit)))
    number = r"[0-9]+(?:_[0-9]+)*(?:\.[0-9]+(?:_[0-9]+)*)?(?:[eE][+-]?[0-9]+)?"
    return (
        Token("comment", r"#[^\n]*", "Comment.Single", "comment.line.number-sign"),
        Token("string", r'"[^"\r\n]*"', "String.Double", "string.quoted.double"),
        Token("keyword", r"\b(?:use|let|step)\b", "Keyword", "keyword.control"),
        Token("number", rf"\b{number}(?:(?:{units})(?![A-Za-z0-9_]))?", "Number", "constant.numeric"),
        Token("name", r"\b[A-Za-z][A-Za-z0-9_]*(?=[ \t]*=)", "Name.Attribute", "variable.other.property"),
        Token("block", rf"\b(?:{blocks})\b(?=[^=\n(]*\{{)", "Keyword.Declaration", "storage.type"),
        Token("call", rf"\b(?:{calls})\b", "Name.Function", "support.function"),
        Token("value", rf"\b(?:{values})\b", "Name.Constant", "constant.language"),
        Token("word", r"\b[A-Za-z][A-Za-z0-9_]*", "Name", "variable.other"),
        Token("operator", r"\.\.|[-+*/=]", "Operator", "keyword.operator"),
        Token("punctuation", r"[{}()\[\],;]", "Punctuation", "punctuation"),
        Token("blank", r"[ \t\r\n]+", "Text.Whitespace", ""),
    )


def _words() -> tuple[str, str, str]:
    """The words of blocks, of calls, and those that stand for themselves, each as alternatives of a pattern."""
    blocks: set[str] = set()
    calls: set[str] = set()
    values: set[str] = set()
    for word, every in vocabulary().items():
        for cls in every:
            (blocks if cls.form == "block" else calls).add(word)
            for known in fields(cls).values():
                items = [item for kind in known.kinds if isinstance(kind, ListKind) for item in kind.items]
                values |= {
                    word for kind in (*known.kinds, *items) if isinstance(kind, WordKind) for word in kind.values
                }
    return tuple("|".join(sorted(words)) for words in (blocks, calls, values))  # type: ignore[return-value]
