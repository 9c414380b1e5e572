"""`moec.compile(file, experts=16)`: arguments that override a file's `let`s, and errors that name them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real

from moec.grammar.diagnostics import Diagnostic
from moec.grammar.schema import fields
from moec.grammar.source import Source, Span
from moec.grammar.spec import Model, Parallel, Train
from moec.grammar.spec.base import Node
from moec.grammar.suggest import nearest
from moec.runtime.errors import CallError, wrong_argument

FROM_COMMAND_LINE = "--let"
"""The name of the grammar's sources for overrides."""

NO_LETS = "the file declares none"
"""The grammar's help where a file has no `let`."""

BLOCKS: tuple[type[Node], ...] = (Parallel, Train, Model)
"""Blocks whose words a script may mistake for arguments."""

OUTPUTS = {"output", "out", "path", "save", "to"}


def texts_of(lets: Mapping[str, object]) -> dict[str, str | float]:
    """The arguments as overrides of a file. Raises `CallError` for one that is no number and no text."""
    return {name: _override(name, value) for name, value in lets.items()}


def _override(name: str, value: object) -> str | float:
    if isinstance(value, str | bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    raise _no_override(name, value)


def _no_override(name: str, value: object) -> CallError:
    if value is None:
        return wrong_argument(
            f"{name} is None, and a `let` has a value", f"leave `{name}` out to keep the file's value"
        )
    help = "give a number or a text as the file would have it: `experts=16`, `routing='zipf(1.2)'`"
    if hasattr(value, "item"):
        help = f"`{name}.item()` is the number of a tensor or an array of one element"
    description = repr(value) if isinstance(value, Real) else f"an object of class {type(value).__name__}"
    return wrong_argument(f"{name} is {description}, and a `let` is a number or a text", help)


def as_arguments(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Diagnostics of a file whose overrides are arguments of a call, and not of a command line."""
    return tuple(_as_argument(diagnostic) for diagnostic in diagnostics)


def _as_argument(diagnostic: Diagnostic) -> Diagnostic:
    labels = tuple(label._replace(span=_renamed(label.span)) for label in diagnostic.labels)
    renamed = diagnostic._replace(span=_renamed(diagnostic.span) if diagnostic.span else None, labels=labels)
    if diagnostic.code != "MOE0213" or renamed.span is None:
        return renamed
    name = renamed.span.source.text[renamed.span.start : renamed.span.end]
    return renamed._replace(message=f"no file that was read declares `{name}`", help=_help(name, diagnostic.help))


def _help(name: str, help: str) -> str:
    if nearest(name, ("world_size",)):
        return f"did you mean `world_size`, an argument of `moec.compile`? Further ones are the file's `let`s; {help}"
    if name in OUTPUTS:
        return "`moec.compile` returns the plan and writes nothing: `plan.save(path)` does"
    if block := next((block for block in BLOCKS if name in fields(block)), None):
        lets = "it declares none" if help == NO_LETS else help
        return (
            f"write `{name}` in the file, in `{block.word} {{ … }}`: only its `let`s can be given here ({lets}). To "
            f"give it here, put `let {name} = …` at the top of the file and `{name} = {name}` in `{block.word}`"
        )
    if help == NO_LETS:
        return f"the file declares no `let`: write `let {name} = …` in it and use the name, or change the value there"
    return help


def _renamed(span: Span) -> Span:
    if span.source.name != FROM_COMMAND_LINE:
        return span
    return Span(Source("arguments of moec.compile", span.source.text), span.start, span.end)
