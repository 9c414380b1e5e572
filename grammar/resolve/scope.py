"""State that all parts of the resolver use: the constants in scope, and the diagnostics found so far."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from fractions import Fraction
from typing import Final, NamedTuple

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, Edit, Label
from moec.grammar.source import Span
from moec.grammar.syntax.tree import Expression, Name


class Broken(Enum):
    """Replaces a value that has a diagnostic already; code that needs the value reports no further one."""

    BROKEN = "broken"


BROKEN: Final = Broken.BROKEN


class Quantity(NamedTuple):
    """A number in the base unit of its dimension ("" for a plain number), exactly as written or computed."""

    value: Fraction
    dimension: str = ""


class Constant(NamedTuple):
    """The value of a `let`. `place` is the place of its value, or the `--let` that overrides it.

    `overrides` are the texts of the `--let`s that change it, its own or those of the constants that it uses.
    """

    value: Expression | Broken
    place: Label
    number: Quantity | None = None
    depth: int = 1
    size: int = 1
    overrides: tuple[str, ...] = ()


class Written(NamedTuple):
    """A value as written, with `let`s replaced, but with the span of its use."""

    value: Expression | Broken
    span: Span
    lets: tuple[Label, ...] = ()
    constant: Constant | None = None


class Scope:
    """The constants of all files read, the diagnostics found, the number of layers selected so far, and the spans of
    values that depend on the command line.

    `trial`: only whether there is an error counts, so no time goes into advice. `moved` are the words that the file
    says in another place or under another system's name: they are diagnosed there, and not reported missing.
    """

    def __init__(self, lets: dict[str, Constant] | None = None, *, trial: bool = False) -> None:
        self.lets = {} if lets is None else lets
        self.diagnostics: list[Diagnostic] = []
        self.selected = 0
        self.overridden: list[tuple[Span, str]] = []
        self.trial = trial
        self.moved: set[str] = set()

    def follow(self, expression: Expression) -> Written:
        """The value of `expression` with `let` names replaced. Terminates: a `let` only uses those above it."""
        value: Expression | Broken = expression
        lets: list[Label] = []
        constant = None
        while isinstance(value, Name) and value.text in self.lets:
            constant = self.lets[value.text]
            lets.append(constant.place)
            self.overridden += [(value.span, text) for text in constant.overrides]
            value = constant.value
        return Written(value, expression.span, tuple(lets), constant)

    def error(
        self,
        code: str,
        written: Written | Span,
        message: str,
        *labels: Label,
        help: str = "",
        instead: str | None = None,
        fix: Iterable[Edit] = (),
    ) -> Broken:
        """Diagnose something about a value; the `let`s it came through are shown as well.

        `instead` is what should stand there, where that is known and the value was not given by a `let`; `fix` are
        the edits where there are others.
        """
        span, lets = (written, ()) if isinstance(written, Span) else (written.span, written.lets)
        fix = [Edit(span, instead)] if instead is not None and not lets else fix
        self.diagnostics.append(diagnose(code, span, message, labels=(*labels, *lets), help=help, fix=fix))
        return BROKEN
