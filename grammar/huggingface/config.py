"""A `config.json` that a family reads key by key, with a method for each kind of value; it collects the mistakes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Final

from moec.grammar.diagnostics import Diagnostic, DiagnosticError, Severity, diagnose
from moec.grammar.huggingface.places import place_of
from moec.grammar.source import Source, Span

MISSING: Final = object()
"""The default of keys that a config must have."""

PLACEHOLDER = 1
"""Stands for a number that is missing or wrong, so that reading goes on and reports the other mistakes too."""

UNKNOWN = "is not known here and has no effect"


class Config:
    """The keys of a config. Methods read one key each; null counts as left out.

    A key that is missing or has a value of another kind is MOE0902, a value that moec cannot express MOE0903: both are
    kept in `errors` and raised together by `require_sound`. `unread` warns of keys that nobody asked for. `defaults`
    are values of keys that are left out, but not of keys that are null.
    """

    def __init__(self, values: Mapping[str, Any], source: Source | None = None, path: tuple[str, ...] = ()) -> None:
        self.values, self._source, self._path = values, source, path
        self.defaults: Mapping[str, Any] = {}
        self.errors: list[Diagnostic] = []
        self.notes: list[Diagnostic] = []
        self.asked: set[str] = set()
        self._inner: dict[str, Config] = {}
        self._spelled: dict[str, str] = {}

    # ---- reading -----------------------------------------------------------------------------------

    def has(self, *keys: str) -> bool:
        """Whether one of the keys has a value. Does not count as reading."""
        return self._value(keys) is not None

    def is_null(self, key: str) -> bool:
        """Whether the key stands in the config with the value null."""
        self.asked.add(key)
        return key in self.values and self.values[key] is None

    def raw(self, *keys: str) -> Any:
        """The value of the first key that has one, or None. `keys` are the spellings of one thing."""
        self.asked.update(keys)
        return self._value(keys)

    def count(self, *keys: str, default: Any = MISSING, least: int = 1) -> int:
        """A whole number of at least `least`."""
        return int(
            self._scalar(keys, default, partial(_is_count, least), f"a whole number, at least {least}", PLACEHOLDER)
        )

    def count_or_none(self, *keys: str) -> int | None:
        """A whole number from 1 on; None where the key is left out or 0."""
        return self.count(*keys, default=0, least=0) or None

    def number(self, *keys: str, default: Any = MISSING) -> float:
        """A finite number."""
        return float(self._scalar(keys, default, _is_number, "a finite number", PLACEHOLDER))

    def flag(self, *keys: str, default: Any = MISSING) -> bool:
        """true or false."""
        if not self.has(*keys) and any(key in self.values for key in keys):
            self.asked.update(keys)
            return False  # null is false to transformers, and leaving the key out is its default
        return bool(self._scalar(keys, default, lambda value: isinstance(value, bool), "true or false", False))

    def word(self, *keys: str, default: Any = MISSING) -> str:
        """A text."""
        return str(self._scalar(keys, default, lambda value: isinstance(value, str), "a text", ""))

    def numbers(self, *keys: str, length: int | None = None) -> tuple[float, ...] | None:
        """A list of finite numbers, of this length; None where it is left out."""
        value, key = self.raw(*keys), self._first(keys)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(map(_is_number, value)):
            self._wrong(key, "a list of finite numbers")
            return None
        if length is not None and len(value) != length:
            self._wrong(key, f"a list of {length} numbers")
            return None
        return tuple(float(element) for element in value)

    def words(self, *keys: str, length: int) -> tuple[str, ...] | None:
        """A list of `length` texts; None where it is left out."""
        value, key = self.raw(*keys), self._first(keys)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(element, str) for element in value):
            self._wrong(key, "a list of texts")
            return None
        if len(value) < length:
            self._wrong(key, f"a list of {length} texts, one for each layer")
            return None
        return tuple(value[:length])

    def nested(self, *keys: str) -> Config:
        """The config inside of a key; its default, or else empty, where it is left out or null."""
        value, key = self.raw(*keys), self._first(keys)
        if value is None:
            value = self.defaults.get(key)
        if value is not None and not isinstance(value, Mapping):
            self._wrong(key, "an object")
            value = None
        if key not in self._inner:
            self._inner[key] = Config(value or {}, self._source, (*self._path, key))
        return self._inner[key]

    def inside(self, key: str, values: Mapping[str, Any]) -> Config:
        """A config with these values in the place of those of a key, which is an object."""
        return Config(values, self._source, (*self._path, key))

    def replaced(self, values: Mapping[str, Any]) -> Config:
        """A config with these values in the place of this one's."""
        return self if values is self.values else Config(values, self._source, self._path)

    def rename(self, aliases: Mapping[str, str]) -> None:
        """Reads keys under the names that `aliases` gives them; MOE0903 for a key that has two values."""
        for alias, key in aliases.items():
            if alias not in self.values or alias == key:
                continue
            self.asked.add(alias)
            value = self.values[alias]
            if key in self.values:
                if value != self.values[key]:
                    shown = _shown(self.values[key])
                    self.refuse(alias, f"it is another name of `{key}`, which is {shown}: leave one of them out")
                continue
            self.values = {**self.values, key: value}
            self._spelled[key] = alias

    # ---- what moec cannot express ------------------------------------------------------------------

    def only(self, key: str, *allowed: Any, default: Any = MISSING, why: str = "") -> Any:
        """The key's value, which must be one of `allowed`; MOE0903 for others. `default` where it is left out."""
        value = self.raw(key)
        if value is None:
            return allowed[0] if default is MISSING else default
        if not any(value == element and isinstance(value, bool) == isinstance(element, bool) for element in allowed):
            shown = " or ".join(_shown(element) for element in allowed)
            self.refuse(key, why or f"moec has no word for it: only {shown}")
            return allowed[0]
        return value

    def inert(self, key: str, *without_effect: Any) -> None:
        """Reads a key that acts in training alone: a value that is none of `without_effect` is a warning."""
        value = self.raw(key)
        if value is not None and value not in without_effect:
            said = _in_the_table(key, value) or "moec has none"
            self.note(key, f"it acts in training alone, and is not imported: {said}")

    def refuse(self, key: str, why: str) -> None:
        """Adds MOE0903 for a key."""
        shown = _shown(self.values.get(key)) if key in self.values else "left out"
        self.errors.append(diagnose("MOE0903", self.span(key), f"`{self.named(key)}` is {shown}: {why}"))

    def note(self, key: str, why: str) -> None:
        """Adds a warning, MOE0904, for a key that is not imported."""
        self.warn(key, f"`{self.named(key)}` is {_shown(self.values.get(key))}: {why}")

    def warn(self, key: str, message: str) -> None:
        """Adds a warning, MOE0904, at a key."""
        self.notes.append(diagnose("MOE0904", self.span(key), message, severity=Severity.WARNING))

    # ---- afterwards --------------------------------------------------------------------------------

    def all_errors(self) -> list[Diagnostic]:
        """The errors of this config and of those inside of it."""
        return _once([*self.errors, *(error for inner in self._inner.values() for error in inner.all_errors())])

    def all_notes(self) -> list[Diagnostic]:
        """The warnings of this config and of those inside of it."""
        return _once([*self.notes, *(note for inner in self._inner.values() for note in inner.all_notes())])

    def require_sound(self) -> None:
        """Raises `DiagnosticError` with every error."""
        if errors := self.all_errors():
            raise DiagnosticError(errors)

    def unread(self, inert: Collection[str]) -> list[Diagnostic]:
        """Warnings, MOE0904, for keys of this and inner configs that no method has read and that switch something on.

        `inert` keys are left out.
        """
        notes = [
            diagnose("MOE0904", self.span(key), f"`{self.named(key)}` {UNKNOWN}", severity=Severity.WARNING)
            for key, value in self.values.items()
            if key not in self.asked and key not in inert and not _is_off(value)
        ]
        return [*notes, *(note for inner in self._inner.values() for note in inner.unread(inert))]

    def named(self, key: str) -> str:
        """The key as the config spells it, with those around it: `rope_scaling.factor`."""
        return ".".join((*self._path, self._spelled.get(key, key)))

    def span(self, key: str) -> Span | None:
        """Where the key stands in the file; its beginning for a key that is left out."""
        if self._source is None:
            return None
        place = place_of(self._source.text, (*self._path, self._spelled.get(key, key)))
        return Span(self._source, *(place or (0, 0)))

    # ---- inside ------------------------------------------------------------------------------------

    def _value(self, keys: tuple[str, ...]) -> Any:
        """The value of the first key that has one; else, if none of them stands in the config, their default."""
        stated = next((self.values[key] for key in keys if self.values.get(key) is not None), None)
        if stated is not None or any(key in self.values for key in keys):
            return stated
        return next((self.defaults[key] for key in keys if key in self.defaults), None)

    def _first(self, keys: tuple[str, ...]) -> str:
        return next((key for key in keys if self.values.get(key) is not None), keys[0])

    def _scalar(
        self, keys: tuple[str, ...], default: Any, fits: Callable[[Any], bool], wanted: str, placeholder: Any
    ) -> Any:
        """The value of the first key that has one, else `default`; `placeholder` after adding MOE0902."""
        self.asked.update(keys)
        key, value = self._first(keys), self._value(keys)
        if value is not None and fits(value):
            return value
        if value is not None:
            self._wrong(key, wanted)
            return placeholder if default is MISSING else default
        if default is not MISSING:
            return default
        others = f" (or {', '.join(f'`{other}`' for other in keys[1:])})" if len(keys) > 1 else ""
        self.errors.append(diagnose("MOE0902", self.span(key), f"`{self.named(key)}` is missing{others}"))
        return placeholder

    def _wrong(self, key: str, wanted: str) -> None:
        message = f"`{self.named(key)}` is {_shown(self.values.get(key))}, and must be {wanted}"
        self.errors.append(diagnose("MOE0902", self.span(key), message))


def _once(notes: list[Diagnostic]) -> list[Diagnostic]:
    """Each message once: readers ask for some keys several times."""
    return list({(note.code, note.message): note for note in notes}.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(least: int, value: Any) -> bool:
    return _is_number(value) and int(value) == value and value >= least


def _is_off(value: Any) -> bool:
    """Whether a value switches nothing on: null, false, zero, NaN, or empty."""
    return value in (None, False, 0, "", [], {}) or (isinstance(value, float) and math.isnan(value))


def _shown(value: Any) -> str:
    """A value as JSON writes it, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else text[:57] + "…"


def _in_the_table(key: str, value: Any) -> str:
    """The form for transformers' `key` with a value, from the table of other systems' names; empty if it has none."""
    from moec.grammar.foreign.lookup import elsewhere  # most configs do without it

    known = elsewhere(key)
    meanings = known.meanings if known is not None else ()
    of_transformers = (meaning for meaning in meanings if "hf" in meaning.systems and meaning.path)
    return next((meaning.said(str(value), brief=True) for meaning in of_transformers), "")
