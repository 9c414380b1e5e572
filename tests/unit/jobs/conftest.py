from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.plans import moe_plan

import moec
from moec.runtime.job.job import Job


@pytest.fixture
def job() -> Iterator[Job]:
    """A job of one rank."""
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        yield job
