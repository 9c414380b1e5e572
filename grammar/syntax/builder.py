"""Makes tree nodes from recognised rules."""

from __future__ import annotations

from moec.grammar.source import Source, Span
from moec.grammar.syntax.tokens import Token
from moec.grammar.syntax.tree import (
    Argument,
    Assignment,
    Bad,
    Block,
    Call,
    Expression,
    File,
    Let,
    Name,
    Negative,
    Number,
    Operation,
    Range,
    Sequence,
    Statement,
    String,
    Use,
)


class Builder:
    """One method per rule of moe.lark that makes a node; they get all of the rule's symbols, in order."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def _span(self, first: object, last: object) -> Span:
        return Span(self.source, _start(first), _end(last))

    def file(self, body: _Body) -> File:
        return File(body.statements, Span(self.source, 0, len(self.source.text)))

    def body(self, *parts: object) -> _Body:
        return _Body(tuple(part for part in parts if isinstance(part, _STATEMENTS)))

    def use(self, keyword: Token, path: Token) -> Use:
        return Use(self._string(path), self._span(keyword, path))

    def let(self, keyword: Token, name: Token, _: Token, value: Expression | Token) -> Let:
        return Let(self._name(name), self._value(value), self._span(keyword, value))

    def assign(self, name: Token, _: Token, value: Expression | Token) -> Assignment:
        return Assignment(self._name(name), self._value(value), self._span(name, value))

    def block(self, kind: Token, *parts: object) -> Block:
        *head, _, body, close = parts
        assert isinstance(body, _Body)
        label = next((part for part in head if isinstance(part, String)), None)
        selector = next((self._value(part) for part in head if not isinstance(part, String)), None)
        return Block(self._name(kind), label, selector, body.statements, self._span(kind, close))

    def bad(self, error: Token, *block: object) -> Bad:
        body = block[1] if block else None
        return Bad(
            body.statements if isinstance(body, _Body) else (),
            self._span(error, block[-1] if block else error),
        )

    def label(self, text: Token) -> String:
        return self._string(text)

    def range(self, first: object, _: Token, last: object, *step: object) -> Range:
        by = self._value(step[1]) if step else None
        return Range(self._value(first), self._value(last), by, self._span(first, step[1] if step else last))

    def group(self, _open: Token, value: object, _close: Token) -> Expression:
        return self._value(value)

    def negative(self, sign: Token, operand: object) -> Negative:
        return Negative(self._value(operand), self._span(sign, operand))

    def sum(self, first: object, *rest: object) -> Operation:
        operators, operands = rest[::2], [self._value(value) for value in rest[1::2]]
        texts = [operator.text for operator in operators if isinstance(operator, Token)]
        return Operation(self._value(first), tuple(zip(texts, operands, strict=True)), self._span(first, rest[-1]))

    product = sum

    def call(self, name: Token, _: Token, *parts: object) -> Call:
        return Call(self._name(name), self._arguments(parts), self._span(name, parts[-1]))

    def named(self, name: Token, _: Token, value: object) -> Argument:
        return Argument(self._name(name), self._value(value), self._span(name, value))

    def list(self, opening: Token, *parts: object) -> Sequence:
        items = tuple(self._value(part) for part in parts if not _is_punctuation(part))
        return Sequence(items, self._span(opening, parts[-1]))

    def _arguments(self, parts: tuple[object, ...]) -> tuple[Argument, ...]:
        words = [part for part in parts if not _is_punctuation(part)]
        return tuple(
            part if isinstance(part, Argument) else Argument(None, self._value(part), self._span(part, part))
            for part in words
        )

    def _name(self, token: Token) -> Name:
        return Name(token.text, self._span(token, token))

    def _string(self, token: Token) -> String:
        return String(token.text[1:-1], self._span(token, token))

    def _value(self, value: object) -> Expression:
        if not isinstance(value, Token):
            assert isinstance(value, Expression)
            return value
        if value.kind == "NUMBER":
            return Number(value.text, self._span(value, value))
        return self._string(value) if value.kind == "STRING" else self._name(value)


class _Body:
    """Statements on their way into a block or file."""

    __slots__ = ("statements",)

    def __init__(self, statements: tuple[Statement, ...]) -> None:
        self.statements = statements


_STATEMENTS = (Use, Let, Assignment, Block, Bad)


def _is_punctuation(part: object) -> bool:
    return isinstance(part, Token) and part.kind in ("COMMA", "RPAR", "RSQB")


def _start(part: object) -> int:
    return part.start if isinstance(part, Token) else part.span.start  # type: ignore[attr-defined]


def _end(part: object) -> int:
    return part.end if isinstance(part, Token) else part.span.end  # type: ignore[attr-defined]
