"""Calls that hints advise, in the place of names of other libraries, are calls that moec takes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from inspect import signature

from support.tables import each_row

import moec
from moec.codegen.plan import Plan
from moec.runtime import other_names
from moec.runtime.job.job import Job

OWNERS = {"job": Job, "plan": Plan, "moec": moec}
TABLES = [table for name, table in vars(other_names).items() if name.isupper() and not isinstance(table, str)]
HINTS = sorted({hint for table in [*TABLES, Plan._other_names] for hint in table.values()})


def calls(hint: str) -> Iterator[tuple[str, str, ast.Call]]:
    """The calls of moec's own functions in the code of a hint: owner, name, call."""
    for code in re.findall(r"`([^`]+)`", hint):
        text = code.replace("…", "...")
        try:
            tree = ast.parse(text)
        except SyntaxError:  # of a `.moe` file
            continue
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)) if owner in OWNERS:
                    yield owner, name, node


@each_row("hint", [hint for hint in HINTS if any(calls(hint))])
def test_a_hint_advises_a_call_that_fits_the_functions_signature(hint: str) -> None:
    for owner, name, call in calls(hint):
        function = getattr(OWNERS[owner], name)
        given = [ast.unparse(each) for each in call.args]
        arguments = [owner, *given] if isinstance(OWNERS[owner], type) else given
        signature(function).bind(*arguments, **{each.arg or "": ... for each in call.keywords})


def test_most_hints_advise_a_call() -> None:
    assert len([hint for hint in HINTS if any(calls(hint))]) > 20
