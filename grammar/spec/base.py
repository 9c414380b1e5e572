"""What every part of a `Spec` is: a frozen pydantic model that remembers where each value was written.

The models are the schema. A field's type, bounds, default and description are stated once, here, and the
resolver, the diagnostics and the documentation read them from the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from moec.grammar.source import Span

Form = Literal["call", "block", "product"]


class Node(BaseModel):
    """One block or call of a `.moe` file, resolved.

    `word` is the name it is written by (`gqa` in `gqa(heads = 32)`); for a block it is the block's kind.
    `positional` lists the fields that a call also takes by position, in order.
    `form` is how it is written: `word(…)`, `word { … }`, or `first * second` of its two fields.
    A `labelled` block's field `name` is its label; one that `selects` takes a layer selector.
    `slots` are groups of fields of which a block may give one, and a later block's replaces an earlier one's.
    Spans take no part in equality: two files that say the same thing give equal Specs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)

    word: ClassVar[str] = ""
    positional: ClassVar[tuple[str, ...]] = ()
    form: ClassVar[Form] = "call"
    labelled: ClassVar[bool] = False
    selects: ClassVar[bool] = False
    slots: ClassVar[tuple[tuple[str, ...], ...]] = ()

    _spans: Mapping[str, Span] = PrivateAttr(default_factory=dict)

    def span(self, field: str = "") -> Span | None:
        """Where `field` was given (its value), or the node itself; None for a default or a Spec made in Python."""
        return self._spans.get(field) or (self._spans.get("") if field else None)

    def given(self, field: str) -> bool:
        """Whether `field` was written out rather than left to its default."""
        return field in self._spans or field in self.model_fields_set

    def with_spans(self, spans: Mapping[str, Span]) -> Self:
        """This node, remembering `spans` (field name to the span of its value; "" for the whole)."""
        self._spans = dict(spans)
        return self

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), *(_hashable(value) for value in self.__dict__.values())))


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class Unit:
    """The dimension that a number in a field has; the resolver converts to the base unit."""

    name: str  # "bytes", "bytes/s", "s", "FLOP/s"


@dataclass(frozen=True, slots=True)
class Reference:
    """A field that takes the name of a block declared elsewhere, of this kind."""

    kind: str  # "device", "cluster"


BlockLabel = Annotated[str, Field(pattern=r'^[^"\r\n\x00]*$', description="what tells it from others of its kind")]
Bytes = Annotated[float, Unit("bytes")]
BytesPerSecond = Annotated[float, Unit("bytes/s")]
Seconds = Annotated[float, Unit("s")]
FlopsPerSecond = Annotated[float, Unit("FLOP/s")]
