"""Every operator of every backend present, on every device present, against the definition: plain torch in float64.

`test_interpreted.py` runs this folder once more, with Triton's interpreter on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from cases import CASES, OF_ROUTER
from places import INTERPRETED, NO_CUDA, PLACES, ROUTER, TOLERANCE, Numbers, Place

from moec.runtime.backends.torch import torch_backend

ROUNDINGS = {"mixture": 5, "experts with weights": 6, "experts": 4}
"""Of 16-bit results, beside three for all others: experts round their gate too, a whole mixture its rows, and weighted
experts the gradient behind down and its products with what was activated."""


RARE = re.compile(
    r"(?<!swiglu) \((6, 5|64, 32)\)|(?<!swiglu) \(70, 40\) 1|(?<!uneven), [01]\.0 padding|random [1-9]"
    r"|^(experts|mixture), (?!swiglu|gelu)\w+ \(70|^(|scaled |grouped )route \w+ (before False|after True)"
)
"""Cases that the interpreter runs with `-m slow` alone: small widths of all activations but one, more random loads.

Each activation has its case with weights, and each way to route its case with biases.
"""


def _all() -> Iterator[object]:
    """The interpreter, which is slow, runs each case in one dtype of those in turn, and the others with `-m slow`."""
    for place in PLACES:
        for number, name in enumerate((*OF_ROUTER, *CASES)):
            dtypes = [dtype for dtype in place.dtypes if name in CASES or dtype in ROUTER]
            for dtype in dtypes:
                said = f"{place.name}-{name}-{str(dtype).removeprefix('torch.')}"
                later = INTERPRETED and (dtype != dtypes[number % len(dtypes)] or bool(RARE.search(name)))
                yield pytest.param(place, name, dtype, id=said, marks=[pytest.mark.slow] if later else [])
    if NO_CUDA:
        yield pytest.param(None, "", None, id="on cuda", marks=pytest.mark.skip(reason=NO_CUDA))


@pytest.mark.parametrize(("place", "name", "dtype"), list(_all()))
def test_a_backend_computes_what_the_definition_says(place: Place, name: str, dtype: torch.dtype) -> None:
    case = {**OF_ROUTER, **CASES}[name]
    ours = case(place.backend, Numbers(dtype, place.device))
    alike = case(torch_backend, Numbers(dtype))
    exact = case(torch_backend, Numbers(dtype, exact=True))
    for number, (one, same, other) in enumerate(zip(ours, alike, exact, strict=True)):
        assert one.device.type == place.device
        assert (one.shape, one.dtype) == (same.shape, same.dtype), number
        if not one.dtype.is_floating_point:
            assert torch.equal(one.cpu(), other), number
        elif one.numel():
            scale = max(1.0, float(other.abs().max()))
            error = float((one.cpu().double() - other).abs().max()) / scale
            roundings = next((more for kind, more in ROUNDINGS.items() if name.startswith(kind)), 3)
            more = roundings / 3 if dtype in (torch.bfloat16, torch.float16) else 1
            assert error <= more * TOLERANCE[dtype], number
