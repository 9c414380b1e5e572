"""Every operator of the Triton backend against the plain-torch one. `test_interpreted.py` runs it, in its own process.

float32 and float64: the interpreter's bf16 matrix product is wrong, and it truncates where devices round.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from moec.runtime.backends import torch_backend, triton_backend

assert os.environ.get("TRITON_INTERPRET") == "1"

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
both_dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    torch.manual_seed(0)


def close(ours: Tensor | Sequence[Tensor], exact: Tensor | Sequence[Tensor]) -> None:
    """Equal in shape and dtype, and in value to the dtype's bound, scaled by the largest."""
    pairs = [(ours, exact)] if isinstance(ours, Tensor) else zip(ours, exact, strict=True)
    for one, other in pairs:
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        if not one.dtype.is_floating_point:
            assert torch.equal(one, other)
        elif one.numel():
            scale = max(1.0, float(other.abs().max()))
            assert float((one - other).abs().max()) <= TOLERANCE[one.dtype] * scale


# ---- route -------------------------------------------------------------------------------------------

HOW = list(itertools.product(("softmax", "sigmoid"), (False, True), (False, True)))
ROUTES = [(1, 1), (3, 2), (8, 8), (13, 3), (70, 6), (256, 8)]


@both_dtypes
@pytest.mark.parametrize(("score", "after", "normalize"), HOW)
def test_route(score: str, after: bool, normalize: bool, dtype: torch.dtype) -> None:
    for experts, k in ROUTES:
        for tokens in (0, 1, 7, 65):
            logits = torch.randn(1, tokens, experts, dtype=dtype) * 3
            ours = triton_backend.route(logits, k, score, after, normalize)
            exact = torch_backend.route(logits, k, score, after, normalize)
            close(ours, exact)
            of_all, of_chosen = torch.randn_like(exact[0]), torch.randn_like(exact[1])
            for gradients in ((of_all, of_chosen), (of_all, None), (None, of_chosen)):
                arguments = (logits, *gradients, *exact[1:], score, after, normalize)
                close(triton_backend.route_backward(*arguments), torch_backend.route_backward(*arguments))


@pytest.mark.parametrize(("score", "after", "normalize"), HOW)
def test_equal_scores_go_to_the_lower_index(score: str, after: bool, normalize: bool) -> None:
    logits = torch.randint(-2, 3, (2, 40, 12)).float()
    logits[0, 0] = -torch.inf
    logits[0, 0, 5] = 0.0
    logits[0, 1] = 0.0
    exact = torch_backend.route(logits, 5, score, after, normalize)
    assert exact[2][0, 1].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(triton_backend.route(logits, 5, score, after, normalize)[2], exact[2])


# ---- permute, combine --------------------------------------------------------------------------------

# batch, tokens, experts, k, dim
ROWS = {
    "uneven": (2, 33, 6, 2, 5),
    "many experts": (1, 40, 200, 8, 3),
    "k is all": (1, 9, 4, 4, 16),
    "one token": (1, 1, 8, 2, 7),
    "no tokens": (1, 0, 8, 2, 7),
    "no sequences": (0, 5, 8, 2, 7),
    "one expert": (1, 12, 1, 1, 2),
    "more than one block": (1, 140, 40, 2, 1),
    "wide": (1, 2, 3, 2, 2100),
}


@both_dtypes
@pytest.mark.parametrize("shape", ROWS.values(), ids=ROWS)
def test_permute_and_combine(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, tokens, num_experts, k, dim = shape
    x = torch.randn(batch, tokens, dim, dtype=dtype)
    experts = torch.rand(batch, tokens, num_experts).argsort(-1)[..., :k]
    exact = torch_backend.permute(x, experts, num_experts)
    close(triton_backend.permute(x, experts, num_experts), exact)
    rows, _, positions = exact
    weights = torch.rand(positions.shape, dtype=dtype)
    close(triton_backend.permute_backward(rows, positions), torch_backend.permute_backward(rows, positions))
    close(triton_backend.combine(rows, positions, weights), torch_backend.combine(rows, positions, weights))
    arguments = (torch.randn_like(x), rows, positions, weights)
    close(triton_backend.combine_backward(*arguments), torch_backend.combine_backward(*arguments))


def test_one_expert_takes_all_in_the_order_of_the_tokens() -> None:
    x, experts = torch.randn(1, 300, 4), torch.full((1, 300, 1), 3)
    rows, counts, positions = triton_backend.permute(x, experts, 6)
    assert torch.equal(rows, x[0])
    assert counts.tolist() == [[0, 0, 0, 300, 0, 0]]
    assert positions.flatten().tolist() == list(range(300))


def test_random_loads() -> None:
    draw = random.Random(0)
    for _ in range(20):
        num_experts = draw.randint(1, 40)
        k, tokens, dim = draw.randint(1, num_experts), draw.randint(1, 60), draw.randint(1, 40)
        x, skew = torch.randn(1, tokens, dim), torch.randn(num_experts) * draw.choice([0, 1, 5])
        experts = (torch.rand(1, tokens, num_experts) + skew).argsort(-1)[..., :k]
        close(triton_backend.permute(x, experts, num_experts), torch_backend.permute(x, experts, num_experts))
