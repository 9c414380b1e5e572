"""Edits of expressions: a comparison, a sign, a constant, two arguments, a reduction, a row of a table."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mutation.mutant import Positions

COMPARISONS = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "is": "is not",
    "is not": "is",
    "in": "not in",
    "not in": "in",
}
SIGNS = {"+": "-", "-": "+", "*": "//", "//": "*", "/": "*", "%": "*", "&": "|", "|": "&"}
BOOLEANS = {"and": "or", "or": "and"}
REDUCTIONS = re.compile(
    r"_*(sum|amax|amin|max|min|any|all|mean|cumsum|(all_)?reduce\w*|all_(reduced|gather\w*)|summed)"
)
TYPED = ("Literal", "Callable", "ClassVar", "Annotated", "Mapping", "Sequence", "Iterator", "type", "Union", "Optional")
"""What is subscripted with types, or with values as types."""
NOT_SWAPPED = ("isinstance", "issubclass", "getattr", "setattr", "hasattr", "cast", "field")
"""Calls whose arguments are not swapped: every swap fails at once."""


@dataclass(frozen=True, slots=True)
class Edit:
    """The bytes [start, end) become `after`."""

    kind: str
    start: int
    end: int
    after: str


def expression_edits(at: Positions, root: ast.expr) -> Iterator[Edit]:
    """The edits of an expression and of all within it, except rows."""
    for node in _walk(root):
        match node:
            case ast.Compare():
                operands = [node.left, *node.comparators]
                for left, right in pairwise(operands):
                    yield from _between(at, "comparison", left, right, COMPARISONS)
            case ast.BoolOp():
                for left, right in pairwise(node.values):
                    yield from _between(at, "comparison", left, right, BOOLEANS)
            case ast.UnaryOp(op=ast.Not()):
                yield Edit("comparison", at.start(node), at.end(node), _text(at, node.operand))
            case ast.UnaryOp(op=ast.USub()):
                yield Edit("sign", at.start(node), at.end(node), _text(at, node.operand))
            case ast.BinOp() if not (_is_text(node.left) or _is_text(node.right) or _is_union(node)):
                yield from _between(at, "sign", node.left, node.right, SIGNS)
            case ast.Constant(value=bool() | int() | float() as value):
                yield Edit("constant", at.start(node), at.end(node), _other(value))
            case ast.Call():
                yield from _edits_of_call(at, node)
            case ast.IfExp(test=test) if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp):
                yield Edit("comparison", at.start(test), at.end(test), f"(not {_text(at, test)})")


def row_edits(at: Positions, root: ast.expr, *, tables: bool) -> Iterator[Edit]:
    """One entry left out of a dict; with `tables`, of a list, a set or a tuple of three or more as well."""
    for node in _walk(root):
        entries: list[tuple[int, int]] = []
        match node:
            case ast.Dict(keys=keys, values=values) if len(keys) > 1 and None not in keys:
                pairs = zip(keys, values, strict=True)
                entries = [(at.start(key), at.end(value)) for key, value in pairs if key is not None]
            case ast.List(elts=elements) | ast.Set(elts=elements) if tables and len(elements) > 1:
                entries = [(at.start(element), at.end(element)) for element in elements]
            case ast.Tuple(elts=elements) if tables and len(elements) > 2:
                entries = [(at.start(element), at.end(element)) for element in elements]
        for number, (start, end) in enumerate(entries):
            if number + 1 < len(entries):
                yield Edit("row", start, entries[number + 1][0], "")
            else:
                yield Edit("row", entries[number - 1][1], end, "")


def is_reduction(node: ast.expr) -> bool:
    """Whether it calls a sum, a maximum or a collective that reduces or gathers."""
    return isinstance(node, ast.Call) and REDUCTIONS.fullmatch(_name(node.func)) is not None


def _walk(node: ast.AST) -> Iterator[Any]:
    """The node and those within it: no f-string (Python 3.11 gives wrong columns there), no types."""
    if isinstance(node, ast.JoinedStr):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(node, ast.Subscript) and child is node.slice and _name(node.value) in TYPED:
            continue
        if isinstance(node, ast.Call) and _name(node.func) == "cast" and child in node.args[:1]:
            continue
        if isinstance(child, ast.arguments):
            for default in (*child.defaults, *filter(None, child.kw_defaults)):
                yield from _walk(default)
            continue
        yield from _walk(child)


def _edits_of_call(at: Positions, node: ast.Call) -> Iterator[Edit]:
    starred = any(isinstance(argument, ast.Starred) for argument in node.args)
    if not starred and _name(node.func) not in NOT_SWAPPED:
        for left, right in pairwise(node.args):
            before, between, after = _text(at, left), at.text(at.end(left), at.start(right)), _text(at, right)
            if before != after:
                yield Edit("arguments", at.start(left), at.end(right), f"{after}{between}{before}")
    if is_reduction(node) and not starred:
        function = node.func
        is_method = isinstance(function, ast.Attribute) and _name(function.value) not in ("torch", "dist", "np", "F")
        if node.args and not is_method:
            yield Edit("reduction", at.start(node), at.end(node), f"({_text(at, node.args[0])})")
        elif isinstance(function, ast.Attribute) and is_method:
            yield Edit("reduction", at.start(node), at.end(node), f"({_text(at, function.value)})")


def _between(at: Positions, kind: str, left: ast.expr, right: ast.expr, table: dict[str, str]) -> Iterator[Edit]:
    """The operator between two operands, where the text between them has exactly one."""
    start, between = at.end(left), at.text(at.end(left), at.start(right))
    hidden = re.sub(r"#[^\n]*", lambda comment: " " * len(comment[0].encode()), between)
    words = hidden.replace("(", " ").replace(")", " ").replace("\\", " ").split()
    operator = " ".join(words)
    found = re.search(r"\s+".join(map(re.escape, words)), hidden) if words else None
    if operator in table and found is not None:
        yield Edit(kind, start + found.start(), start + found.end(), table[operator])


def _other(value: bool | int | float) -> str:
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, int):
        return str(value + 1)
    return repr(2 * value if value else 1.0)


def _name(node: ast.expr) -> str:
    """The last name of `a.b.c`, or the only one."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _text(at: Positions, node: ast.expr) -> str:
    return at.text(at.start(node), at.end(node))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_union(node: ast.BinOp) -> bool:
    """Whether it is `A | None`, a union of types."""
    if not isinstance(node.op, ast.BitOr):
        return False
    for side in (node.left, node.right):
        named = _name(side)[:1].isupper() and not _name(side).isupper()
        builtin = _name(side) in ("int", "str", "float", "bool", "bytes", "tuple", "list", "dict", "set")
        if named or builtin or (isinstance(side, ast.Constant) and side.value is None):
            return True
    return False
