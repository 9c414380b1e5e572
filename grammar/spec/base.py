"""What every part of a `Spec` is: a frozen node that remembers where each value was written.

The classes are the schema. A field's type, bounds, default and description are stated once, in its annotation, and the
resolver, the diagnostics, the printer and the documentation read them there. pydantic validates what is built in
Python (see validation.py). A file's values were checked by the resolver against the same annotations, which leaves
pydantic's import, half of the time that `moec check` may take, to those who need it.
"""

# Annotations are evaluated where they stand, with no `from __future__`: the schema reads them without compiling text.

import math
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    TypeVar,
    dataclass_transform,
    get_origin,
)

from moec.grammar.source import Span
from moec.grammar.units import LARGEST_WHOLE

Form = Literal["call", "block", "product"]

Number = TypeVar("Number", int, float, Fraction)

_NOWHERE: Mapping[str, Span] = {}
_MISSING = object()


@dataclass_transform(eq_default=True, frozen_default=True, kw_only_default=True)
class Node:
    """One block or call of a `.moe` file, resolved. Raises pydantic's `ValidationError` for what the schema forbids.

    `word` is the name it is written by (`gqa` in `gqa(heads = 32)`); for a block it is the block's kind.
    `source` says where it was described first. `implemented` is false until something here can compile it; without
    such a word, which is one of planning or placement, only speed and memory differ.
    `positional` lists the fields that a call also takes by position, in order.
    `form` is how it is written: `word(…)`, `word { … }`, or `first * second` of its two fields.
    A `labelled` block's field `name` is its label; one that `selects` takes a layer selector.
    `exclusive` are groups of fields of which a block may give one, and a later block's replaces an earlier one's.
    Spans take no part in equality: two files that say the same thing give equal Specs.
    """

    __slots__ = ("__dict__", "_given", "_spans")

    word: ClassVar[str] = ""
    source: ClassVar[str] = ""
    implemented: ClassVar[bool] = True
    positional: ClassVar[tuple[str, ...]] = ()
    form: ClassVar[Form] = "call"
    labelled: ClassVar[bool] = False
    selects: ClassVar[bool] = False
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = ()

    _given: frozenset[str]
    _spans: Mapping[str, Span]

    def __init__(self, **values: Any) -> None:
        cls = type(self)
        if values or not all(hasattr(cls, name) for name in field_names(cls)):
            from moec.grammar.spec.validation import validated

            self._hold(validated(cls, values), frozenset(values), _NOWHERE)
        else:  # all defaults: nothing to check, and no pydantic for what the schema itself builds
            self._hold({name: getattr(cls, name) for name in field_names(cls)}, frozenset(), _NOWHERE)

    @classmethod
    def checked(cls, values: Mapping[str, object], spans: Mapping[str, Span]) -> Self:
        """A node of `values` that were checked already; `spans` is where each stands ("" for the whole)."""
        node = cls.__new__(cls)
        every = {name: values[name] if name in values else getattr(cls, name) for name in field_names(cls)}
        node._hold(every, frozenset(values), dict(spans))
        return node

    def _hold(self, values: Mapping[str, object], stated: frozenset[str], spans: Mapping[str, Span]) -> None:
        self.__dict__.update(values)
        object.__setattr__(self, "_given", stated)
        object.__setattr__(self, "_spans", spans)

    def span(self, field: str = "") -> Span | None:
        """Where `field` was given (its value), or the node itself; None for a default or a Spec made in Python."""
        return self._spans.get(field) or (self._spans.get("") if field else None)

    def given(self, field: str) -> bool:
        """Whether `field` was written out rather than left to its default."""
        return field in self._spans or field in self._given

    def with_spans(self, spans: Mapping[str, Span]) -> Self:
        """The same node with other spans."""
        return type(self).checked(self.__dict__, spans)

    def replace(self, spans: Mapping[str, Span] = _NOWHERE, /, **changes: object) -> Self:
        """A node with some fields changed, which is validated again, and with the same spans but for `spans`."""
        cls = type(self)
        # A default need not be a value that the annotation allows: a Spec of one layer has the model None.
        kept = {name: value for name, value in self.__dict__.items() if value is not getattr(cls, name, _MISSING)}
        changed = cls(**{**kept, **changes})
        changed._hold({}, self._given | frozenset(changes), {**self._spans, **spans} if spans else self._spans)
        return changed

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is type(self) and self.__dict__ == other.__dict__)

    def __hash__(self) -> int:
        return hash((type(self), *self.__dict__.values()))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items() if self.given(name))
        return f"{type(self).__name__}({shown})"

    if not TYPE_CHECKING:  # a type checker would take every name

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):  # Python and tools ask for these
                raise AttributeError(name)
            from moec.grammar.suggest import advice

            cls = type(self)
            words = f"{cls.__name__} has no {name}: {advice(name, field_names(cls))}"
            raise AttributeError(words, name=name, obj=self)

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), dict(self.__dict__), self._given, dict(self._spans))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: use replace({name}=…)")

    __delattr__ = __setattr__  # type: ignore[assignment]


def _rebuilt(cls: type[Node], values: Mapping[str, object], stated: frozenset[str], spans: Mapping[str, Span]) -> Node:
    """A node from what `__reduce__` gives, for processes that a script starts."""
    node = cls.__new__(cls)
    node._hold(values, stated, spans)
    return node


def field_names(cls: type[Node]) -> tuple[str, ...]:
    """The fields of `cls`, those of its bases first."""
    return tuple(field_types(cls))


def field_types(cls: type[Node]) -> dict[str, Any]:
    """The fields' annotations, as written; read once per class."""
    annotated = _ANNOTATIONS.get(cls)
    if annotated is None:
        bases = [base for base in reversed(cls.__mro__) if issubclass(base, Node) and base is not Node]
        annotations = [item for base in bases for item in base.__annotations__.items()]
        annotated = {name: value for name, value in annotations if not _is_class_var(value)}
        _ANNOTATIONS[cls] = annotated
    return annotated


def _is_class_var(annotation: object) -> bool:
    return get_origin(annotation) is ClassVar


_ANNOTATIONS: dict[type[Node], dict[str, Any]] = {}


# ---- what an annotation can say besides its type ---------------------------------------------------


class Bound(NamedTuple):
    """A lower or upper bound of a number: `name` is its wording, as in `at least 1`; `code` is its diagnostic's."""

    name: Literal["at least", "more than", "at most", "less than"]
    limit: int
    code: str = "MOE0207"

    def holds(self, value: float | Fraction) -> bool:
        """Whether `value` is within the bound."""
        match self.name:
            case "at least":
                return value >= self.limit
            case "more than":
                return value > self.limit
            case "at most":
                return value <= self.limit
            case _:
                return value < self.limit

    def __str__(self) -> str:
        return f"{self.name} {self.limit:_}"

    def __get_pydantic_core_schema__(self, kind: Any, handler: Any) -> Any:
        """Validates the bound in pydantic; only numbers have bounds."""
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self._required, handler(kind))

    def _required(self, value: Number) -> Number:
        if not self.holds(value):
            raise ValueError(f"must be {self}")
        return value


def at_least(limit: int) -> Bound:
    return Bound("at least", limit)


def more_than(limit: int) -> Bound:
    return Bound("more than", limit)


def at_most(limit: int, code: str = "MOE0207") -> Bound:
    return Bound("at most", limit, code)


def less_than(limit: int) -> Bound:
    return Bound("less than", limit)


class Doc(NamedTuple):
    """What a field means, in one phrase."""

    text: str


class NotYet(NamedTuple):
    """Marks a field that moec cannot compile yet, or only its `words`. `help` suggests an alternative.

    `numbers`: without it the model computes other numbers; else only speed and memory differ. `neutral`: a value that
    asks for nothing.
    """

    words: tuple[str, ...] = ()
    help: str = ""
    numbers: bool = False
    neutral: int | None = None


class Word(NamedTuple):
    """The word that a field is written by, where Python does not allow it as a name."""

    text: str


class Unit(NamedTuple):
    """The dimension that a number in a field has; the resolver converts to the base unit."""

    name: str  # "bytes", "bytes/s", "s", "FLOP/s"


class AsWritten:
    """A fraction that arithmetic must not round, such as what a count is multiplied by before it is rounded up.

    A float made in Python stands for its shortest digits: 0.3 is three tenths.
    """

    def __get_pydantic_core_schema__(self, kind: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(self._fraction)

    def _fraction(self, value: object) -> Fraction:
        if isinstance(value, bool) or not isinstance(value, int | float | Decimal | Fraction):
            raise ValueError("must be a number")
        if isinstance(value, float | Decimal) and not math.isfinite(value):
            raise ValueError("must be finite")
        fraction = Fraction(str(value)) if isinstance(value, float) else Fraction(value)
        if max(abs(fraction.numerator), fraction.denominator) > LARGEST_WHOLE:
            raise ValueError("numerator and denominator must fit 64 bits")
        return fraction


class Reference(NamedTuple):
    """A field that takes the name of a block declared elsewhere, of this kind."""

    kind: str  # "device", "cluster", "layer"


class Plain:
    """A text that can be written between quotes, which know no escapes."""

    def __get_pydantic_core_schema__(self, kind: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self._required, handler(kind))

    def _required(self, value: str) -> str:
        if '"' in value or not value.isprintable():
            raise ValueError("a text between quotes has only characters that print, and no quote")
        return value


BlockLabel = Annotated[str, Plain(), Doc("what tells it from others of its kind")]
Text = Annotated[str, Plain()]
PositiveInt = Annotated[int, at_least(1)]
Positive = Annotated[float, more_than(0)]
Portion = Annotated[float, at_least(0), at_most(1)]
Ratio = Annotated[Fraction, AsWritten(), more_than(0)]
Bytes = Annotated[float, Unit("bytes"), more_than(0)]
BytesPerSecond = Annotated[float, Unit("bytes/s"), more_than(0)]
Seconds = Annotated[float, Unit("s"), at_least(0)]
FlopsPerSecond = Annotated[float, Unit("FLOP/s"), more_than(0)]
