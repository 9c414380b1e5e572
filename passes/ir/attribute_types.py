"""Types that attributes of ops share. A reader checks a file's attributes against them (`attributes.py`)."""

from __future__ import annotations

import re
from typing import Annotated, Literal, NamedTuple

from moec.passes.ir.activations import ACTIVATIONS
from moec.passes.ir.limits import AXIS, LABEL, MAX_DIM, MAX_LABEL, MAX_LAYER, MAX_RANK


class Bounds(NamedTuple):
    """Bounds of a number: at least `ge`, more than `gt`, at most `le`, less than `lt`."""

    ge: int | None = None
    gt: int | None = None
    le: int | None = None
    lt: int | None = None

    def complaint(self, value: float) -> str:
        """The bound that `value` breaks; empty if there is none."""
        broken = (
            ("at least", self.ge, self.ge is not None and value < self.ge),
            ("more than", self.gt, self.gt is not None and value <= self.gt),
            ("at most", self.le, self.le is not None and value > self.le),
            ("less than", self.lt, self.lt is not None and value >= self.lt),
        )
        return next((f"must be {words} {limit}" for words, limit, is_broken in broken if is_broken), "")


class Longest(NamedTuple):
    """The greatest length of a text or of a tuple."""

    length: int

    def complaint(self, value: str | tuple[object, ...]) -> str:
        return f"must have at most {self.length} elements" if len(value) > self.length else ""


class Pattern(NamedTuple):
    """A regular expression that the whole text must match."""

    pattern: str

    def complaint(self, value: str) -> str:
        return "" if re.fullmatch(self.pattern, value) else f"must match {self.pattern}"


class Activation(NamedTuple):
    """A text that names an activation."""

    def complaint(self, value: str) -> str:
        return "" if value in ACTIVATIONS else f"must be one of {', '.join(ACTIVATIONS)}"


Count = Annotated[int, Bounds(ge=1, le=MAX_DIM)]
"""A number of things, at least 1."""
WideCount = Annotated[int, Bounds(ge=1, lt=2**63)]
"""A numerator or denominator."""
TokenId = Annotated[int, Bounds(ge=0, lt=MAX_DIM)]
LayerNumber = Annotated[int, Bounds(ge=0, le=MAX_LAYER)]
Stream = Annotated[int, Bounds(ge=0, lt=2**31)]
"""The number of a stream of random numbers: two ops with different streams draw different numbers."""
DimNumber = Annotated[int, Bounds(ge=0, lt=MAX_RANK)]
Positive = Annotated[float, Bounds(gt=0)]
AxisName = Annotated[str, Pattern(AXIS)]
BlockName = Annotated[str, Pattern(LABEL), Longest(MAX_LABEL)]
RoutingGroup = Literal["sequence", "batch", "rank"]
ActivationName = Annotated[str, Activation()]
ActivationParameter = Positive | None
"""A number of `PARAMETERS` that changes an activation; None is the plain activation."""
WindowFunction = Literal["none", "gelu"]
"""The function after a map at positions of a window; `gelu` is exact, by the error function."""
Reduction = Literal["sum", "max"]
