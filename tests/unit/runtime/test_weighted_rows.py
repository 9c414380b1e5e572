"""Weights that travel with rows: `permute_weights`, `expert_mlp` with weights, and `sum_rows`."""

from __future__ import annotations

import pytest
import torch
from support.combinations import diagonals
from test_expert_mlp import AXES, COUNTS, TOLERANCE, biases_of, inputs, naive_expert_mlp
from torch import Tensor
from torch.autograd import gradcheck

from moec.passes.ir.row_table import table_length
from moec.runtime import ops

CAPACITY = (None, 3, 4, 3, 4, 1, 0, 1)


def weights_of(rows: Tensor) -> Tensor:
    return torch.randn(rows.shape[0], dtype=torch.promote_types(rows.dtype, torch.float32), requires_grad=True)


@pytest.mark.parametrize(("load", "activation", "beside", "dtype"), diagonals(*AXES, list(TOLERANCE), number=3))
def test_weighted_experts_and_their_gradients_agree_with_a_loop_over_rows(
    load: str, activation: str, beside: str, dtype: torch.dtype
) -> None:
    counts = COUNTS[load]
    rows, up, down = inputs(counts, activation, dtype)
    biases = biases_of(up, down) if beside == "biases" else []
    weights = weights_of(rows)
    out, *_ = ops.expert_mlp(rows, torch.tensor(counts), up, down, *(biases or (None, None)), weights, activation)
    ours = (rows, up, down, *biases, weights)
    exact = [t.detach().double().requires_grad_() for t in ours]
    of_rows = naive_expert_mlp(exact[0], counts, exact[1], exact[2], activation, *exact[3:-1])
    expected = of_rows * exact[-1][:, None]
    assert out.dtype == dtype
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad.double())
    tolerance = {"rtol": 2 * TOLERANCE[dtype], "atol": 10 * TOLERANCE[dtype]}
    torch.testing.assert_close(out.double(), expected, **tolerance)
    for one, other in zip(ours, exact, strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, **tolerance)


@pytest.mark.parametrize(("load", "activation", "beside"), diagonals(*AXES))
def test_gradients_of_weighted_experts(load: str, activation: str, beside: str) -> None:
    counts = COUNTS[load]
    rows, up, down = inputs(counts, activation, torch.float64)
    tensors = (rows, weights_of(rows), up, down, *(biases_of(up, down) if beside == "biases" else []))

    def run(rows: Tensor, weights: Tensor, up: Tensor, down: Tensor, *biases: Tensor) -> Tensor:
        out, *_ = ops.expert_mlp(rows, torch.tensor(counts), up, down, *(biases or (None, None)), weights, activation)
        return out

    assert gradcheck(run, tensors)


def routed(batch: int, tokens: int, experts: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, S, 6], experts and weights [B, S, k]."""
    choices = torch.rand(batch, tokens, experts).argsort(-1)[..., :k]
    weights = torch.rand(choices.shape, dtype=torch.float64, requires_grad=True)
    return torch.randn(batch, tokens, 6, dtype=torch.float64, requires_grad=True), choices, weights


def mixed(x: Tensor, choices: Tensor, weights: Tensor, up: Tensor, down: Tensor, capacity: bool) -> Tensor:
    """A mixture of rows that come with their weights."""
    if not capacity:
        rows, counts, positions = ops.permute(x, choices, up.shape[0])
        beside = ops.permute_weights(weights, positions, rows)
        out, *_ = ops.expert_mlp(rows, counts, up, down, None, None, beside, "swiglu")
        return ops.sum_rows(out, positions, counts)
    starts = ops.queue_starts(ops.count_queues(choices, up.shape[0]), 0)
    rows, counts, positions = ops.permute_padded(x, choices, starts, *CAPACITY)
    beside = ops.permute_weights(weights, positions, rows)
    even = torch.full((1, len(rows)), rows.shape[1])
    out, *_ = ops.expert_mlp(rows.flatten(0, 1), even, up, down, None, None, beside.flatten(), "swiglu")
    return ops.sum_rows(out.view(rows.shape), positions, counts)


@pytest.mark.parametrize("capacity", [False, True])
def test_a_mixture_of_weighted_rows_is_the_local_one(capacity: bool) -> None:
    x, choices, weights = routed(2, 9, 5, 2)
    up, down = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((5, 2, 3, 6), (5, 6, 3)))
    kept = choices
    if capacity:
        kept = ops.keep_choices(choices, ops.queue_starts(ops.count_queues(choices, 5), 0), *CAPACITY)
        assert 0 < int((kept < 0).sum()) < kept.numel()
    leaves = (x, weights, up, down)
    found = []
    for out in (
        mixed(x, choices, weights, up, down, capacity),
        ops.mixture_mlp(x, kept, weights, up, down, None, None, "swiglu")[0],
    ):
        found.append((out, *torch.autograd.grad(out, leaves, torch.linspace(-1, 1, out.numel()).view(out.shape))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("capacity", [False, True])
def test_gradients_of_permuted_weights_and_summed_rows(capacity: bool) -> None:
    x, choices, weights = routed(2, 3, 4, 2)
    if capacity:
        starts = ops.queue_starts(ops.count_queues(choices, 4), 0)
        rows, counts, positions = ops.permute_padded(x.detach(), choices, starts, *CAPACITY)
    else:
        rows, counts, positions = ops.permute(x.detach(), choices, 4)
    assert gradcheck(lambda given: ops.permute_weights(given, positions, rows), (weights,))
    assert gradcheck(lambda given: ops.sum_rows(given, positions, counts), (rows.requires_grad_(),))


def test_what_is_empty_or_dropped_has_no_weight_and_no_gradient() -> None:
    positions = torch.tensor([[[1, -1], [4, 0]]])
    weights = torch.tensor([[[0.5, 9.0], [0.25, 2.0]]], requires_grad=True)
    rows = torch.full((2, 3, 2), torch.nan)
    beside = ops.permute_weights(weights, positions, rows)
    assert beside.tolist() == [[2.0, 0.5, 0.0], [0.0, 0.25, 0.0]]
    beside.backward(torch.arange(6.0).view(2, 3))
    assert weights.grad is not None
    assert weights.grad.tolist() == [[[1.0, 0.0], [4.0, 0.0]]]

    rows = torch.arange(12.0).view(2, 3, 2).requires_grad_()
    summed = ops.sum_rows(rows, positions, torch.tensor([[2, 2]]))
    assert summed.tolist() == [[[2.0, 3.0], [8.0, 10.0]]]
    summed.backward(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))
    assert rows.grad is not None
    assert rows.grad.view(6, 2).tolist() == [[3.0, 4.0], [1.0, 2.0], [0.0, 0.0], [0.0, 0.0], [3.0, 4.0], [0.0, 0.0]]


def test_of_rows_only_those_that_came_are_saved() -> None:
    x, choices, weights = routed(2, 50, 4, 3)
    up, down = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((4, 2, 5, 6), (4, 6, 5)))
    saved: list[tuple[int, ...]] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        mixed(x, choices, weights, up, down, capacity=False)
    of_experts = [(300, 6), (300, 2, 5), (1, 4), (4, 2, 5, 6), (4, 6, 5), (300,), (table_length(300, 4),)]
    places = [(2, 50, 3)] * 3  # of permute, permute_weights and sum_rows: one tensor
    assert sorted(saved) == sorted([*of_experts, *places, (1, 4)])


@pytest.mark.parametrize(
    ("weights", "complaint"),
    [
        (torch.rand(4), "4 weights for 5 rows"),
        (torch.rand(5, 1), r"weights must be \[R\] in float32 or float64"),
        (torch.rand(5).bfloat16(), r"weights must be \[R\] in float32 or float64"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights: Tensor, complaint: str) -> None:
    rows, up, down = inputs([[2, 3]], "gelu", torch.float32)
    with pytest.raises(RuntimeError, match=complaint):
        ops.expert_mlp(rows, torch.tensor([[2, 3]]), up, down, None, None, weights, "gelu")


def test_rows_that_are_not_as_many_as_positions_are_refused() -> None:
    with pytest.raises(RuntimeError, match="5 rows for 6 positions"):
        ops.sum_rows(torch.rand(5, 2), torch.zeros(1, 3, 2, dtype=torch.int64), torch.tensor([[5]]))
    with pytest.raises(RuntimeError, match=r"weights and positions must be \[B, S, k\]"):
        ops.permute_weights(torch.rand(1, 3, 2), torch.zeros(1, 3, 1, dtype=torch.int64), torch.rand(6, 2))
