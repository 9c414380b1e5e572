"""Items to text: two blanks a level, aligned `=` and comments, brackets broken only where a line would be too long."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from moec.grammar.format.items import Group, Item, Piece
from moec.grammar.syntax.tokens import Token

WIDEST = 100
"""Columns of a line, without its comment."""

FURTHEST = 60
"""Lines that end beyond this column do not count when the comments of neighbours are aligned."""

_INDENT = "  "
_BINARY = frozenset({"PLUS", "MINUS", "STAR", "SLASH", "EQUAL"})


def lay_out(items: list[Item]) -> str:
    """The whole text, ending in a newline if there is anything."""
    lines = _body(items, 0)
    return "".join(f"{line}\n" for line in lines)


def _body(items: list[Item], level: int) -> list[str]:
    lines: list[str] = []
    for run in _runs(items):
        if run[0].blank and lines:
            lines.append("")
        shown = [(item, _item(item, level, width)) for item, width in zip(run, _name_widths(run), strict=True)]
        lines += _with_comments(shown)
    return lines


def _runs(items: list[Item]) -> Iterator[list[Item]]:
    """Items with no empty line between them."""
    run: list[Item] = []
    for item in items:
        if run and item.blank:
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _name_widths(run: list[Item]) -> list[int]:
    """The width of each name before `=`: that of the widest name among neighbouring assignments of one kind."""
    widths = [0] * len(run)
    start = 0
    while start < len(run):
        end = start + 1
        kind = _assigned(run[start])
        while kind and end < len(run) and _assigned(run[end])[:1] == kind[:1]:
            end += 1
        widest = max(len("".join(_assigned(item)[1:])) for item in run[start:end]) if kind else 0
        widths[start:end] = [widest] * (end - start)
        start = end
    return widths


def _assigned(item: Item) -> tuple[str, ...]:
    """`("let", name)` or `("", name)` of an assignment; empty for other items."""
    if item.body is not None or len(item.tokens) < 3:
        return ()
    first, second, third = item.tokens[:3]
    if isinstance(second, Token) and second.kind == "EQUAL" and isinstance(first, Token):
        return "", first.text
    if isinstance(third, Token) and third.kind == "EQUAL" and isinstance(second, Token):
        return "let", second.text
    return ()


def _item(item: Item, level: int, width: int) -> list[str]:
    """Its lines, without the comment behind it."""
    indent = _INDENT * level
    if item.body is not None:
        return _block(item, level)
    if not item.tokens:
        return [indent + item.comment]
    assigned = _assigned(item)
    if not assigned:
        return _value(indent, item.tokens)
    keyword, name = assigned
    head = f"{indent}{keyword + ' ' if keyword else ''}{name.ljust(width)} = "
    return _value(head, item.tokens[3 if keyword else 2 :])


def _block(item: Item, level: int) -> list[str]:
    assert item.body is not None
    indent = _INDENT * level
    head = _value(indent, item.tokens, selector=True)
    if not item.body and not item.opening:
        return [*head[:-1], f"{head[-1]} {{ }}"]
    if item.inline:
        inner = [_flat_item(part) for part in item.body]
        line = f"{head[-1]} {{ {'; '.join(inner)} }}"
        if len(head) == 1 and len(line) <= WIDEST:
            return [line]
    opening = f"{head[-1]} {{" + (f"  {item.opening}" if item.opening else "")
    return [*head[:-1], opening, *_body(item.body, level + 1), f"{indent}}}"]


def _flat_item(item: Item) -> str:
    if item.body is None:
        return _flat(item.tokens)
    inner = "; ".join(_flat_item(part) for part in item.body)
    return f"{_flat(item.tokens, selector=True)} {{ {inner}{' ' if inner else ''}}}"


def _with_comments(shown: list[tuple[Item, list[str]]]) -> list[str]:
    """All lines, with the comments of neighbouring lines below each other."""
    result: list[str] = []
    for single, together in groupby(shown, key=lambda one: len(one[1]) == 1 and one[0].body is None):
        neighbours = list(together)
        ends = [len(lines[-1]) for item, lines in neighbours if item.tokens and item.comment]
        column = max((end for end in ends if end <= FURTHEST and single), default=0)
        for item, lines in neighbours:
            last = lines[-1]
            if item.tokens and item.comment:
                last = f"{last.ljust(column)}  {item.comment}"
            result += [*lines[:-1], last]
    return result


# ---- expressions -------------------------------------------------------------------------------------


def _value(head: str, tokens: list[Token | Group], selector: bool = False) -> list[str]:
    """`head` and an expression behind it, on one line if that is short enough and no comment is in the way."""
    flat = _flat(tokens, selector)
    groups = [part for part in tokens if isinstance(part, Group)]
    commented = [group for group in groups if group.commented()]
    if not commented and (len(head) + len(flat) <= WIDEST or not any(group.pieces for group in groups)):
        return [head + flat]
    chosen = commented or [max(groups, key=lambda group: len(_flat([group])))]
    level = (len(head) - len(head.lstrip(" "))) // len(_INDENT)
    lines, rest = [head], list(tokens)
    done: list[Token | Group] = []
    for part in rest:
        if not any(part is group for group in chosen):
            lines[-1] += _spaced(done, part, selector) + (part.text if isinstance(part, Token) else _flat([part]))
        else:
            assert isinstance(part, Group)
            lines[-1] += _spaced(done, part, selector) + part.opening
            lines += _pieces(part, level + 1)
            lines.append(_INDENT * level + part.closing)
        done.append(part)
    return lines


def _pieces(group: Group, level: int) -> Iterator[str]:
    """One piece a line, each with its comments."""
    indent = _INDENT * level
    for number, piece in enumerate(group.pieces):
        yield from (indent + comment for comment in piece.before)
        *lines, last = _value(indent, piece.tokens)
        yield from lines
        comma = "," if group.comma or number < len(group.pieces) - 1 else ""
        yield last + comma + (f"  {piece.behind}" if piece.behind else "")
    yield from (indent + comment for comment in group.tail)


def _flat(tokens: list[Token | Group], selector: bool = False) -> str:
    text = ""
    done: list[Token | Group] = []
    for part in tokens:
        inner = part.text if isinstance(part, Token) else _flat_group(part)
        text += _spaced(done, part, selector) + inner
        done.append(part)
    return text


def _flat_group(group: Group) -> str:
    pieces: list[Piece] = group.pieces
    return group.opening + ", ".join(_flat(piece.tokens) for piece in pieces) + group.closing


def _spaced(before: list[Token | Group], part: Token | Group, selector: bool = False) -> str:
    """The blank between the last of `before` and `part`, or nothing. In front of a `selector` a name calls nothing."""
    if not before:
        return ""
    last = before[-1]
    if isinstance(part, Group):
        called = isinstance(last, Token) and last.kind == "NAME" and not (selector and len(before) == 1)
        if called and part.opening == "(":
            return ""
    elif part.text == "..":
        return ""
    if isinstance(last, Token) and (last.text == ".." or (last.kind == "MINUS" and _is_sign(before[:-1]))):
        return ""
    return " "


def _is_sign(before: list[Token | Group]) -> bool:
    """Whether a minus with `before` in front of it is a sign."""
    if not before:
        return True
    last = before[-1]
    return isinstance(last, Token) and (last.kind in _BINARY or last.text in ("..", "step"))
