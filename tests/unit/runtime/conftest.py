from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import moec.runtime.ops  # noqa: F401 - registers the operators


@pytest.fixture(autouse=True)
def _reproducible() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
