"""`permute` and `combine` against loops over tokens."""

from __future__ import annotations

import pytest
import torch
from support.combinations import diagonals
from torch import Tensor
from torch.autograd import gradcheck

from moec.runtime import ops

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
PERMUTE_BACKWARD = torch.ops.moec.permute_backward.default
COMBINE_BACKWARD = torch.ops.moec.combine_backward.default

# Sequences, tokens in each, experts, k.
SIZES = [
    (2, 5, 8, 2),
    (1, 1, 4, 2),
    (1, 1, 1, 1),
    (2, 3, 5, 5),
    (1, 300, 7, 3),
    (2, 4, 6, 1),
    (0, 3, 4, 2),
    (2, 0, 4, 2),
]
sizes = pytest.mark.parametrize(("sequences", "length", "num_experts", "k"), SIZES)
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def choose(sequences: int, length: int, num_experts: int, k: int) -> Tensor:
    """k distinct experts per token."""
    return torch.rand(sequences, length, num_experts).argsort(-1)[..., :k].contiguous()


def naive_permute(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, list[int], Tensor]:
    rows, counts, positions = [], [0] * num_experts, torch.empty_like(experts)
    for expert in range(num_experts):
        for sequence, token, choice in (experts == expert).nonzero().tolist():
            positions[sequence, token, choice] = len(rows)
            rows.append(x[sequence, token])
            counts[expert] += 1
    return torch.stack(rows) if rows else x.reshape(-1, x.shape[-1])[:0], counts, positions


def naive_combine(rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    tokens = []
    for where, scale in zip(positions.flatten(0, 1).tolist(), weights.flatten(0, 1), strict=True):
        tokens.append(sum(w * rows[p] for p, w in zip(where, scale, strict=True)))
    flat = torch.stack(tokens) if tokens else rows * weights.sum()
    return flat.view(*positions.shape[:2], rows.shape[1])


@sizes
@dtypes
def test_permute_and_its_gradient_agree_with_a_loop_over_experts(
    sequences: int, length: int, num_experts: int, k: int, dtype: torch.dtype
) -> None:
    x = torch.randn(sequences, length, 3, dtype=dtype, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    experts = choose(sequences, length, num_experts, k)
    rows, counts, positions = ops.permute(x, experts, num_experts)
    expected_rows, expected_counts, expected_positions = naive_permute(exact, experts, num_experts)
    assert torch.equal(rows.double(), expected_rows)
    assert counts.tolist() == [expected_counts]
    assert torch.equal(positions, expected_positions)

    grad = torch.randn_like(rows)
    rows.backward(grad)
    expected_rows.backward(grad.double())
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@sizes
@dtypes
def test_combine_and_its_gradients_agree_with_a_loop_over_tokens(
    sequences: int, length: int, num_experts: int, k: int, dtype: torch.dtype
) -> None:
    _, _, positions = ops.permute(
        torch.empty(sequences, length, 1), choose(sequences, length, num_experts, k), num_experts
    )
    rows = torch.randn(positions.numel(), 6, dtype=dtype, requires_grad=True)
    weight_dtype = torch.promote_types(dtype, torch.float32)
    weights = torch.rand(positions.shape, dtype=weight_dtype, requires_grad=True)
    exact = [t.detach().double().requires_grad_() for t in (rows, weights)]
    out, expected = ops.combine(rows, positions, weights), naive_combine(exact[0], positions, exact[1])
    assert out.dtype == dtype
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(out.double(), expected, **tolerance)

    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad.double())
    assert rows.grad is not None
    assert weights.grad is not None
    torch.testing.assert_close(rows.grad.double(), exact[0].grad, **tolerance)
    torch.testing.assert_close(weights.grad.double(), exact[1].grad, rtol=1e-5, atol=1e-5)


def is_rounded_once(ours: torch.Tensor, exact: torch.Tensor) -> bool:
    """Rounded to the nearest bfloat16 (8 significant bits), ties either way."""
    assert ours.dtype == torch.bfloat16
    return bool(((ours.double() - exact).abs() <= 2**-8 * exact.abs()).all())


def test_sums_are_rounded_to_bfloat16_once_and_weights_too() -> None:
    _, _, positions = ops.permute(torch.empty(1, 40, 1), choose(1, 40, 8, 3), 8)
    rows, weights = torch.randn(120, 16).bfloat16(), torch.rand(1, 40, 3)
    exact = ops.combine(rows.double(), positions, weights.bfloat16().double())
    assert is_rounded_once(ops.combine(rows, positions, weights), exact)
    grad = torch.randn(1, 40, 16).bfloat16()
    ours = COMBINE_BACKWARD(grad, rows, positions, weights)
    grad_rows, grad_weights = COMBINE_BACKWARD(grad.float(), rows.float(), positions, weights)
    assert torch.equal(ours[0], grad_rows.bfloat16())
    torch.testing.assert_close(ours[1], grad_weights)
    assert is_rounded_once(PERMUTE_BACKWARD(rows, positions), PERMUTE_BACKWARD(rows.double(), positions))


def test_combine_undoes_permute() -> None:
    x = torch.randn(2, 9, 4, dtype=torch.float64)
    rows, _, positions = ops.permute(x, choose(2, 9, 6, 3), 6)
    weights = torch.rand(2, 9, 3, dtype=torch.float64)
    torch.testing.assert_close(
        ops.combine(rows, positions, weights / weights.sum(-1, keepdim=True)), x, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("num_experts", [3, 256, 2**15, 2**15 + 1])
def test_all_tokens_to_one_expert_keep_their_order(num_experts: int) -> None:
    x = torch.randn(2, 10, 3)
    rows, counts, positions = ops.permute(x, torch.full((2, 10, 1), num_experts - 1), num_experts)
    assert torch.equal(rows, x.flatten(0, 1))
    assert counts[0, -1] == 20
    assert counts.sum() == 20
    assert torch.equal(positions.flatten(), torch.arange(20))


@pytest.mark.parametrize("expert", [-1, 4, 2**40])
def test_an_expert_out_of_range_is_refused(expert: int) -> None:
    experts = torch.zeros(1, 2, 1, dtype=torch.int64)
    experts[0, 1, 0] = expert
    with pytest.raises(RuntimeError, match="experts must be from 0 to 3"):
        ops.permute(torch.randn(1, 2, 3), experts, 4)


def test_positions_and_rows_that_disagree_are_refused() -> None:
    with pytest.raises(RuntimeError, match="5 rows for 6 positions"):
        ops.combine(torch.randn(5, 3), torch.arange(6).view(1, 3, 2), torch.rand(1, 3, 2))


def test_shapes_that_disagree_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"not \[1, 2, 3\] and \[1, 3, 1\]"):
        ops.permute(torch.randn(1, 2, 3), torch.zeros(1, 3, 1, dtype=torch.int64), 4)


def test_gradients_are_those_of_finite_differences() -> None:
    experts = choose(2, 3, 5, 2)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    rows, _, positions = ops.permute(x, experts, 5)
    assert gradcheck(lambda x: ops.permute(x, experts, 5)[0], (x,))
    weights = torch.rand(2, 3, 2, dtype=torch.float64, requires_grad=True)
    rows = rows.detach().requires_grad_()
    assert gradcheck(lambda rows, weights: ops.combine(rows, positions, weights), (rows, weights))


@pytest.mark.parametrize(("size", "padding"), diagonals(SIZES, [0.4, 0.0, 1.0]))
def test_choices_of_no_expert_get_no_row_and_add_nothing(size: tuple[int, int, int, int], padding: float) -> None:
    sequences, length, num_experts, k = size
    experts = choose(sequences, length, num_experts, k)
    experts[torch.rand(sequences, length) < padding] = -1
    x = torch.randn(sequences, length, 3, dtype=torch.float64, requires_grad=True)
    rows, counts, positions = ops.permute(x, experts, num_experts, some_are_none=True)
    expected, expected_counts, _ = naive_permute(x, experts, num_experts)
    assert torch.equal(rows, expected)
    assert counts.tolist() == [expected_counts]
    assert torch.equal(positions < 0, experts < 0)
    kept = positions[positions >= 0]
    assert sorted(kept.tolist()) == list(range(len(rows)))
    weights = torch.rand(sequences, length, k, dtype=torch.float64, requires_grad=True)
    by_hand = (weights * (experts >= 0)).sum(-1, keepdim=True) * x
    torch.testing.assert_close(ops.combine(rows, positions, weights), by_hand)
    torch.testing.assert_close(ops.sum_rows(rows, positions, counts), (experts >= 0).sum(-1, keepdim=True) * x)
    if x.numel():
        leaf = rows.detach().requires_grad_()
        assert gradcheck(lambda x: ops.permute(x, experts, num_experts, True)[0], (x,)) or length > 20
        if length < 20 and leaf.numel():
            assert gradcheck(lambda rows, weights: ops.combine(rows, positions, weights), (leaf, weights))
            assert gradcheck(lambda rows: ops.sum_rows(rows, positions, counts), (leaf,))


@pytest.mark.parametrize("operator", ["combine", "sum_rows"])
def test_fewer_rows_than_positions_that_name_one_are_refused(operator: str) -> None:
    positions = torch.tensor([[[0, 1], [-1, -1], [2, 3]]])
    other = torch.rand(1, 3, 2) if operator == "combine" else torch.tensor([[4]])
    with pytest.raises(RuntimeError, match=f"moec::{operator}: 3 rows for 4 positions"):
        getattr(ops, operator)(torch.randn(3, 5), positions, other)
    assert getattr(ops, operator)(torch.randn(4, 5), positions, other).shape == (1, 3, 5)
