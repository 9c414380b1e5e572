"""A diagnostic for names that an object of a script does not have, with the nearest name that it has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from moec.grammar.diagnostics import DiagnosticError, diagnose
from moec.grammar.suggest import nearest


class UnknownNameError(DiagnosticError, AttributeError):
    """A name that `moec`, a plan or a job does not have (MOE0750); an `AttributeError`, as `hasattr` needs."""


def unknown_name(owner: str, name: str, known: Iterable[str], other_names: Mapping[str, str]) -> UnknownNameError:
    """The error for `owner.name`. `known`: its names; `other_names`: what to write for other libraries' names."""
    names = sorted(known)
    meant = nearest(name, names)
    help = other_names.get(name) or (f"did you mean `{owner}.{meant}`?" if meant else f"it has {', '.join(names)}")
    return UnknownNameError([diagnose("MOE0750", None, f"there is no `{owner}.{name}`", help=help)])


class KnownNames:
    """A class whose objects raise `UnknownNameError` for a public name that they do not have.

    `class Plan(KnownNames, owner="plan", other_names={…})`: the usual name of an object, and what to write in place of
    names that other libraries have.
    """

    _owner: ClassVar[str]
    _other_names: ClassVar[Mapping[str, str]]

    def __init_subclass__(cls, owner: str, other_names: Mapping[str, str]) -> None:
        super().__init_subclass__()
        cls._owner, cls._other_names = owner, other_names

    if not TYPE_CHECKING:  # with it, a type checker would accept every name

        def __getattr__(self, name: str) -> object:
            if name.startswith("_") or hasattr(type(self), name):
                return object.__getattribute__(self, name)  # raises again: Python's own, or that of a property
            raise unknown_name(
                self._owner, name, (known for known in dir(self) if not known.startswith("_")), self._other_names
            )
