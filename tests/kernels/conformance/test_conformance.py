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


INTERPRETED_FAST = re.compile(
    r"biased route.*|equal.*|grouped route (softmax before True|sigmoid after False).*"
    r"|route softmax before True|route, no tokens"
    r"|balance.*|rope|linear experts.*|(swi|ge|re)glu( with.*)?"
    r"|rows, (uneven, 0\.5 padding|more than one block|k is all|wide|one token|one expert|no tokens|no sequences)"
    r"|experts, (four sources|more than one tile|one row|no rows|swiglu \(64, 32\) 2)"
    r"|experts with biases, (four sources|no rows)|experts with clamp and alpha"
    r"|experts with weights, (four sources|more than one tile|no rows|swiglu \(64, 32\) 2|\w+ \(70, 40\) 2)"
    r"|mixture, (one token|no tokens|gelu \(70, 40\)|swiglu \(64, 32\))"
    r"|mixture with biases, (swiglu \(70, 40\)|all dropped)"
    r"|padded, (0\.5 padding, 2 groups|no tokens)"
)
"""Cases of `make test` in the interpreter, which is slow: together they reach every branch of every template.

Several tiles and blocks each way are in `interpreted_tiles.py` and `interpreted_blocks.py`, in smaller tiles.
"""


def _all() -> Iterator[object]:
    """On CPU each case runs in one dtype of those in turn; the others are slow."""
    for place in PLACES:
        for number, name in enumerate((*OF_ROUTER, *CASES)):
            dtypes = [dtype for dtype in place.dtypes if name in CASES or dtype in ROUTER]
            for dtype in dtypes:
                said = f"{place.name}-{name}-{str(dtype).removeprefix('torch.')}"
                later = place.device == "cpu" and dtype != dtypes[number % len(dtypes)]
                later = later or (INTERPRETED and not INTERPRETED_FAST.fullmatch(name))
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
