"""Every test that asks for a `place` runs in each that is present, and is skipped once where there is no CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import INTERPRETED, NO_CUDA, PLACES, Place

from moec.runtime.backends import Backend

collect_ignore = ["test_derivatives.py"] if INTERPRETED else []
"""Compositions do not depend on the backend."""

ABSENT = "on cuda"
HERE = [pytest.param(place, id=place.name) for place in PLACES]
if NO_CUDA:
    HERE.append(pytest.param(None, id=ABSENT, marks=pytest.mark.skip(reason=NO_CUDA)))


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One skip per test, with the reason."""
    seen: set[str] = set()

    def repeats(item: pytest.Item) -> bool:
        if not NO_CUDA or Path(__file__).parent not in item.path.parents or ABSENT not in item.name:
            return False
        test = item.nodeid.partition("[")[0]
        return test in seen or bool(seen.add(test))

    items[:] = [item for item in items if not repeats(item)]
