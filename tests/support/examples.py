"""On how many examples a property is tried: the same few in `make test`, many and other ones in `make test-all`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from support.session import extent


def examples(few: int, many: int) -> settings:
    """Settings of a property. `make test-all` gives the day as the seed (`--hypothesis-seed`) and prints it."""
    return settings(
        max_examples=many if extent.everything else few,
        deadline=None,
        derandomize=not extent.everything,
        suppress_health_check=list(HealthCheck),
    )
