"""No tensor of a step outlives it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from support.plans import moe_plan

import moec


@pytest.fixture(autouse=True)
def _of_this_test_alone() -> Iterator[None]:
    """What other tests have left alive is not looked at again and again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def alive() -> int:
    """The tensors that were made since the test began and live."""
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize(
    ("beside", "dtype"),
    [
        pytest.param("", "bf16", marks=pytest.mark.slow),
        ("capacity = factor(1.0)", "fp32"),
        ("capacity = dynamic()", "bf16"),
    ],
)
def test_no_tensor_of_a_step_outlives_it(beside: str, dtype: str) -> None:
    tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(0))
    with moec.launch(moe_plan(ranks=1, ep=1, beside=beside, dtype=dtype), device="cpu") as job:
        model = job.build()
        optimizer = job.optimizer(model)
        found = []
        for _ in range(4):
            job.step(model, tokens, tokens, microbatches=2)
            optimizer.step()
            optimizer.zero_grad()
            found.append(alive())
    assert found[1:] == found[1:2] * 3
