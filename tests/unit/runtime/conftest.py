from __future__ import annotations

import pytest
import torch

import moec.runtime.ops  # noqa: F401 - registers the operators


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    torch.manual_seed(0)
