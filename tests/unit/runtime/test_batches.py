"""Experts in batches: every expert once and in order, few rows together, and results that no batch changes."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moec.runtime.backends.torch import torch_backend, torch_batches
from moec.runtime.backends.torch.torch_batches import batches_of
from moec.runtime.backends.torch.torch_blocks import BLOCK


@given(st.lists(st.integers(0, 400), min_size=1, max_size=40))
def test_every_expert_is_in_one_batch_with_its_rows(sizes: list[int]) -> None:
    starts = list(accumulate(sizes, initial=0))
    found = [
        (expert, batch.start + own.start, batch.start + own.stop)
        for batch in batches_of(sizes, 1024)
        for expert, own in batch.experts()
    ]
    assert found == [(expert, starts[expert], starts[expert + 1]) for expert in range(len(sizes))]


@given(st.lists(st.integers(0, 400), min_size=1, max_size=40))
def test_a_batch_is_full_or_one_expert(sizes: list[int]) -> None:
    batches, most = batches_of(sizes, 1024), BLOCK // 2048
    assert all(batch.size <= most or len(batch.sizes) == 1 for batch in batches)
    assert all(one.size + other.sizes[0] > most for one, other in pairwise(batches))


def test_a_batch_costs_the_weights_of_its_experts_that_have_rows() -> None:
    (batch,) = batches_of([8, 0, 8, 8], 1024)
    assert batch.cost == 24 + 2 * torch_batches.ROWS_OF_WEIGHTS
    (empty,) = batches_of([0, 0], 1024)
    assert empty.cost == 0


def gradients(activation: str, biased: bool) -> list[Tensor]:
    """Forward and backward of a mixture with dropped choices and an expert that nobody chose: T 60, D 24, F 16, E 7."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    factor = 2 if activation == "swiglu" else 1
    x, grad, up, down = normal(1, 60, 24), normal(1, 60, 24), normal(7, factor, 16, 24), normal(7, 24, 16)
    biases = (normal(7, factor, 16), normal(7, 24)) if biased else (None, None)
    experts, weights = normal(1, 60, 6).argsort(-1)[..., :2].contiguous(), normal(1, 60, 2)
    experts[0, ::11, 1] = -1
    mixed, counts, hidden, positions, table = torch_backend.mixture_mlp(
        x, experts, weights, up, down, *biases, activation
    )
    given = (x, hidden, counts, positions, table, weights, up, down, *biases)
    return [mixed, *torch_backend.mixture_mlp_backward(grad, *given, activation)]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_batches_do_not_change_results(activation: str, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    together = gradients(activation, biased)
    for block in (1, 2 * 16 * 40):
        monkeypatch.setattr(torch_batches, "BLOCK", block)
        torch.testing.assert_close(gradients(activation, biased), together, rtol=1e-12, atol=1e-12)
