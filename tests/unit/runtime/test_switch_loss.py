"""`switch_loss` against its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from moec.runtime import ops


def switch_loss(probabilities: Tensor, experts: Tensor) -> Tensor:
    """Of whole sequences."""
    return ops.switch_loss(probabilities, ops.count_choices(experts, probabilities.shape[2], 0))


def naive_switch_loss(probabilities: Tensor, experts: Tensor) -> Tensor:
    num_tokens, num_experts = probabilities.shape[1:]
    total = probabilities.new_zeros(())
    for sequence in range(probabilities.shape[0]):
        for expert in range(num_experts):
            share = (experts[sequence] == expert).sum() / experts[sequence].numel()
            total = total + num_tokens * num_experts * share * probabilities[sequence, :, expert].mean()
    return total


@pytest.mark.parametrize(("num_experts", "k"), [(8, 2), (5, 5), (3, 1), (64, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_switch_loss_and_its_gradient_agree_with_the_definition(num_experts: int, k: int, dtype: torch.dtype) -> None:
    logits = torch.randn(3, 7, num_experts, dtype=dtype)
    probabilities, _, experts = ops.route(logits, None, k, "softmax", "before", True)
    probabilities.requires_grad_()
    exact = probabilities.detach().double().requires_grad_()
    loss, expected = switch_loss(probabilities, experts), naive_switch_loss(exact, experts)
    assert loss.dtype == dtype
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    (3 * loss).backward()
    (3 * expected).backward()
    assert probabilities.grad is not None
    torch.testing.assert_close(probabilities.grad.double(), exact.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_balanced_load_costs_one_per_token_for_any_k(k: int) -> None:
    experts = (torch.arange(8)[:, None] + torch.arange(k)).remainder(8)[None]
    probabilities = torch.full((1, 8, 8), 1 / 8)
    torch.testing.assert_close(switch_loss(probabilities, experts), torch.tensor(8.0))


def test_sequences_are_counted_apart() -> None:
    probabilities, _, experts = ops.route(torch.randn(3, 5, 4), None, 2, "softmax", "before", True)
    apart = [switch_loss(p[None], e[None]) for p, e in zip(probabilities, experts, strict=True)]
    torch.testing.assert_close(switch_loss(probabilities, experts), torch.stack(apart).sum())


def test_switch_loss_gradients() -> None:
    probabilities = torch.rand(2, 3, 4, dtype=torch.float64, requires_grad=True)
    experts = torch.randint(0, 4, (2, 3, 2))
    assert gradcheck(lambda p: switch_loss(p, experts), (probabilities,))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_no_tokens_cost_nothing_and_still_have_a_gradient(shape: tuple[int, int]) -> None:
    probabilities = torch.rand(*shape, 4, requires_grad=True)
    loss = switch_loss(probabilities, torch.zeros(*shape, 2, dtype=torch.int64))
    assert loss.item() == 0
    loss.backward()
    assert probabilities.grad is not None
    assert probabilities.grad.shape == probabilities.shape


def test_the_terms_of_parts_of_a_sequence_add_up() -> None:
    probabilities, _, experts = ops.route(torch.randn(2, 6, 4), None, 2, "softmax", "before", True)
    choices = ops.count_choices(experts, 4, 0)
    parts = [ops.switch_loss(part, choices) for part in probabilities.chunk(3, dim=1)]
    torch.testing.assert_close(torch.stack(parts).sum(), ops.switch_loss(probabilities, choices))
    torch.testing.assert_close(sum(ops.count_choices(part, 4, 0) for part in experts.chunk(3, dim=1)), choices)


def test_shapes_that_disagree_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"not \[2, 3, 4\] and \[2, 3\]"):
        ops.switch_loss(torch.rand(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64))
