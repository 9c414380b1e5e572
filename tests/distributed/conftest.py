"""`gloo`: a pool of worker processes shared by all tests of the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.ranks.gloo_pool import GlooPool


@pytest.fixture(scope="session")
def gloo() -> Iterator[GlooPool]:
    """`gloo.run(world_size, function, *arguments)`: what `function` returned on every rank."""
    pool = GlooPool(size=8)
    yield pool
    pool.close()
