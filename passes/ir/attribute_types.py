"""Types that attributes of ops share. A reader checks a file's attributes against them (`attributes.py`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from moec.passes.ir.activations import ACTIVATIONS
from moec.passes.ir.limits import AXIS, LABEL, MAX_DIM, MAX_LABEL, MAX_LAYER, MAX_RANK

Count = Annotated[int, Field(ge=1, le=MAX_DIM)]
"""How many there are of something."""
WideCount = Annotated[int, Field(ge=1, lt=2**63)]
"""A numerator or denominator."""
TokenId = Annotated[int, Field(ge=0, lt=MAX_DIM)]
LayerNumber = Annotated[int, Field(ge=0, le=MAX_LAYER)]
Stream = Annotated[int, Field(ge=0, lt=2**31)]
"""Tells apart the random numbers of two ops."""
DimNumber = Annotated[int, Field(ge=0, lt=MAX_RANK)]
Positive = Annotated[float, Field(gt=0)]
AxisName = Annotated[str, Field(pattern=f"^{AXIS}$")]
BlockName = Annotated[str, Field(pattern=f"^{LABEL}$", max_length=MAX_LABEL)]
RoutingGroup = Literal["sequence", "batch", "rank"]


def _known_activation(word: str) -> str:
    if word not in ACTIVATIONS:
        raise ValueError(f"an activation is one of {', '.join(ACTIVATIONS)}")
    return word


ActivationName = Annotated[str, AfterValidator(_known_activation)]
ActivationParameter = Positive | None
"""A number of `PARAMETERS` that changes an activation; None is the plain activation."""
WindowFunction = Literal["none", "gelu"]
"""What follows a map at positions of a window; `gelu` is exact, by the error function."""
Reduction = Literal["sum", "max"]
