"""The names that a block has defined so far, while its text is read."""

from __future__ import annotations

from collections.abc import Iterable

from moec.passes.ir.ir_error import UnreadableLineError, at_most, quoted
from moec.passes.ir.limits import MAX_OPERANDS, is_name, is_setting_name
from moec.passes.ir.value import Value


class Scope:
    """Names of values (`%x`), parameters (`@gate.weight`), settings (`$training`) and states (`^gate.bias`).

    Raises `UnreadableLineError`.
    """

    def __init__(self) -> None:
        self._defined: dict[str, str] = {}

    def define(self, name: str, sigil: str = "%") -> None:
        """Adds a name, which must be well-formed and new."""
        if not (is_setting_name(name) if sigil == "$" else is_name(name)):
            raise UnreadableLineError(f"{quoted(name)} may not be a name")
        if (defined := f"{sigil}{name}") in self._defined:
            raise UnreadableLineError(f"{quoted(defined)} is defined twice")
        self._defined[defined] = name if sigil == "%" else defined

    def used(self, text: str) -> tuple[str, ...]:
        """The operands that `text` lists, by the names that ops use. All must be defined."""
        names = text.split(", ")
        at_most(len(names), MAX_OPERANDS, "operands")
        try:
            # One string object per name: a million uses need only references.
            return tuple([self._defined[name] for name in names])
        except KeyError as error:
            raise UnreadableLineError(f"{quoted(str(error.args[0]))} is not defined here") from None

    def require_counted(self, values: Iterable[Value]) -> None:
        """Requires that the counts of each ragged value's rows are defined."""
        for value in values:
            if value.ragged is not None and f"%{value.ragged}" not in self._defined:
                raise UnreadableLineError(f"%{value.ragged}, which counts rows, is not defined here")
