"""All mutants of a Python file, from its syntax tree: statements here, expressions in `expression_mutants.py`.

Left alone: docstrings and other strings, annotations, type aliases, `if TYPE_CHECKING`, `__all__`, imports, what an
`assert` says and what `raise` gets.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from mutation.expression_mutants import Edit, expression_edits, is_reduction, row_edits
from mutation.mutant import Mutant, Positions

Body = Sequence[ast.stmt]


def python_mutants(file: str, source: bytes) -> list[Mutant]:
    """Every mutant of the file, in the order of the source. Some do not compile: `Mutant.is_change` tells."""
    found = list(_Finder(file, Positions(source)).body(ast.parse(source).body, in_function=False, nested=False))
    return sorted(found, key=lambda mutant: (mutant.start, mutant.end, mutant.after))


class _Finder:
    def __init__(self, file: str, at: Positions) -> None:
        self.file = file
        self.at = at

    def body(self, body: Body, *, in_function: bool, nested: bool) -> Iterator[Mutant]:
        """`nested`: whether the statements run only under a condition of their function."""
        for statement in body:
            yield from self.statement(statement, in_function=in_function, nested=nested)

    def statement(self, statement: ast.stmt, *, in_function: bool, nested: bool) -> Iterator[Mutant]:
        for edit in self.edits(statement, in_function=in_function, nested=nested):
            last = _last_of_head(statement)
            yield Mutant(
                self.file,
                edit.kind,
                self.at.line(edit.start),
                edit.start,
                edit.end,
                self.at.text(edit.start, edit.end),
                edit.after,
                min(statement.lineno, last),
                last,
                in_function,
            )
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from self.body(statement.body, in_function=True, nested=False)
            case ast.ClassDef():
                yield from self.body(statement.body, in_function=in_function, nested=nested)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from self.body(statement.orelse, in_function=in_function, nested=nested)
            case ast.Match():
                for case in statement.cases:
                    yield from self.body(case.body, in_function=in_function, nested=True)
            case ast.Try():
                for body in (statement.body, statement.orelse, statement.finalbody):
                    yield from self.body(body, in_function=in_function, nested=nested)
                for handler in statement.handlers:
                    yield from self.body(handler.body, in_function=in_function, nested=True)
            case ast.With():
                yield from self.body(statement.body, in_function=in_function, nested=nested)
            case ast.If() | ast.For() | ast.While():
                yield from self.body(statement.body, in_function=in_function, nested=True)
                yield from self.body(statement.orelse, in_function=in_function, nested=True)

    def edits(self, statement: ast.stmt, *, in_function: bool, nested: bool) -> Iterator[Edit]:
        """The edits of the statement itself and of the expressions in its head."""
        if _is_declaration(statement):
            return
        if _can_be_left_out(statement, nested):
            kind = "reduction" if isinstance(statement, ast.Expr) and is_reduction(statement.value) else "statement"
            yield Edit(kind, self.at.start(statement), self.at.end(statement), "pass")
        if isinstance(statement, ast.Match) and len(statement.cases) > 1:
            for case in statement.cases:
                yield Edit("row", self.at.starts[case.pattern.lineno - 1], self.at.end(case.body[-1]), "")
        for expression in _expressions(statement):
            yield from expression_edits(self.at, expression)
            yield from row_edits(self.at, expression, tables=not in_function)


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of a statement's head that are mutated."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from statement.args.defaults
            yield from (default for default in statement.args.kw_defaults if default is not None)
        case ast.Expr(value=value) | ast.AnnAssign(value=ast.expr() as value) | ast.Return(value=ast.expr() as value):
            yield value
        case ast.Assign() | ast.AugAssign():
            yield statement.value
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from (target.slice for target in targets if isinstance(target, ast.Subscript))
        case ast.If() | ast.While() | ast.Assert():
            yield statement.test
        case ast.For():
            yield statement.iter
        case ast.With():
            yield from (item.context_expr for item in statement.items)
        case ast.Match():
            yield statement.subject
            yield from (case.guard for case in statement.cases if case.guard is not None)


def _last_of_head(statement: ast.stmt) -> int:
    """The last line of the statement without its body."""
    if isinstance(statement, ast.Match):
        return statement.subject.end_lineno or statement.lineno
    body: Body = getattr(statement, "body", ())
    last = statement.end_lineno or statement.lineno
    return max(statement.lineno, body[0].lineno - 1) if body else last


def _is_declaration(statement: ast.stmt) -> bool:
    """Whether only readers and type checkers look at it: a docstring, an alias of types, `__all__`."""
    match statement:
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.AnnAssign(annotation=ast.Name(id="TypeAlias")):
            return True
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            made = isinstance(value, ast.Call) and isinstance(value.func, ast.Name)
            if made and value.func.id in ("TypeVar", "ParamSpec", "NewType"):
                return True
            is_type = isinstance(value, ast.Subscript | ast.BinOp) and name.lstrip("_")[:1].isupper()
            return name in ("__all__", "__slots__") or (is_type and not name.isupper())
    return False


def _can_be_left_out(statement: ast.stmt, nested: bool) -> bool:
    match statement:
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete():
            return True
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(value))
        case ast.Assign(targets=targets):
            return all(isinstance(target, ast.Attribute | ast.Subscript) for target in targets)
        case ast.Return() | ast.Raise() | ast.Continue() | ast.Break():
            return nested
    return False
