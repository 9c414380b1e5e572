"""Every test that asks for a `place` runs in each that is present, and is skipped once where there is no CUDA."""

from __future__ import annotations

import pytest
from places import NO_CUDA, PLACES, Place

from moec.runtime.backends import Backend

HERE = [pytest.param(place, id=place.name) for place in PLACES]
if NO_CUDA:
    HERE.append(pytest.param(None, id="on cuda", marks=pytest.mark.skip(reason=NO_CUDA)))


@pytest.fixture(params=HERE)
def place(request: pytest.FixtureRequest) -> Place:
    """A backend and a device."""
    found = request.param
    assert isinstance(found, Place)
    return found


@pytest.fixture
def device(place: Place) -> str:
    return place.device


@pytest.fixture
def backend(place: Place) -> Backend:
    return place.backend
