"""What every part of the resolver shares: the constants in scope, and the diagnostics found so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.model import Diagnostic, Label
from moec.grammar.source import Span
from moec.grammar.syntax.tree import Expression, Name


class Broken(Enum):
    """In the place of a value that was diagnosed already: whatever needs it stays silent."""

    BROKEN = "broken"


BROKEN: Final = Broken.BROKEN


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number in the base unit of its dimension ("" for a plain number)."""

    value: int | float
    dimension: str = ""


@dataclass(frozen=True, slots=True)
class Constant:
    """What a `let` stands for. `place` is its value, or the `--let` that overrides it."""

    value: Expression | Broken
    place: Label
    number: Quantity | None = None
    depth: int = 1
    size: int = 1


@dataclass(frozen=True, slots=True)
class Written:
    """A value as written: behind the `let`s it came through, but pointing at where it is used."""

    value: Expression | Broken
    span: Span
    lets: tuple[Label, ...] = ()
    constant: Constant | None = None


@dataclass(slots=True)
class Scope:
    """The constants of all files read, what was found wrong with them, and how many layers were selected so far."""

    lets: dict[str, Constant] = field(default_factory=dict)
    diagnostics: list[Diagnostic] = field(default_factory=list)
    selected: int = 0

    def follow(self, expression: Expression) -> Written:
        """What `expression` says once `let` names are replaced. Ends: a `let` only uses those above it."""
        value: Expression | Broken = expression
        lets: list[Label] = []
        constant = None
        while isinstance(value, Name) and value.text in self.lets:
            constant = self.lets[value.text]
            lets.append(constant.place)
            value = constant.value
        return Written(value, expression.span, tuple(lets), constant)

    def error(self, code: str, written: Written | Span, message: str, *labels: Label, help: str = "") -> Broken:
        """Diagnose something about a value; the `let`s it came through are shown as well."""
        span, lets = (written, ()) if isinstance(written, Span) else (written.span, written.lets)
        self.diagnostics.append(diagnose(code, span, message, labels=(*labels, *lets), help=help))
        return BROKEN
