"""A tree back to text: plain, one statement a line, and parsing to an equal tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from moec.grammar.syntax.tree import (
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


def write(tree: File) -> str:
    """The text of a tree without `Bad` statements."""
    return "".join(f"{line}\n" for line in _statements(tree.body, ""))


def _statements(body: Iterable[Statement], indent: str) -> Iterator[str]:
    for statement in body:
        match statement:
            case Use(path=path):
                yield f'{indent}use "{path.value}"'
            case Let(name=name, value=value):
                yield f"{indent}let {name.text} = {expression(value)}"
            case Assignment(name=name, value=value):
                yield f"{indent}{name.text} = {expression(value)}"
            case Block():
                yield f"{indent}{_head(statement)} {{"
                yield from _statements(statement.body, indent + "  ")
                yield f"{indent}}}"
            case Bad():
                raise AssertionError("what did not parse has no text")


def _head(block: Block) -> str:
    label = f' "{block.label.value}"' if block.label else ""
    return f"{block.kind.text}{label}{' ' + expression(block.selector) if block.selector else ''}"


def expression(value: Expression) -> str:
    """An expression, with the parentheses that it needs and no others."""
    match value:
        case Number(text=text) | Name(text=text):
            return text
        case String(value=text):
            return f'"{text}"'
        case Sequence(items=items):
            return f"[{', '.join(map(expression, items))}]"
        case Call(name=name, arguments=arguments):
            shown = (f"{a.name.text} = {expression(a.value)}" if a.name else expression(a.value) for a in arguments)
            return f"{name.text}({', '.join(shown)})"
        case Negative(operand=operand):
            return f"-{_inside(operand, Negative, Operation)}"
        case Operation():
            return _operation(value)
        case Range(first=first, last=last, step=step):
            ends = f"{expression(first)}..{expression(last)}"
            return f"{ends} step {expression(step)}" if step is not None else ends


def _operation(value: Operation) -> str:
    """Adds parentheses around a sum in a product, and around a nested operation of the same kind."""
    is_sum = value.rest[0][0] in "+-"

    def part(operand: Expression) -> str:
        nested = isinstance(operand, Operation) and (not is_sum or operand.rest[0][0] in "+-")
        return f"({expression(operand)})" if nested else expression(operand)

    return part(value.first) + "".join(f" {operator} {part(operand)}" for operator, operand in value.rest)


def _inside(operand: Expression, *kinds: type) -> str:
    return f"({expression(operand)})" if isinstance(operand, kinds) else expression(operand)
