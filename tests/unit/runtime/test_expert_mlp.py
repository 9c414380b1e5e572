"""`expert_mlp` against a loop over rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from moec.runtime import ops

TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 3e-2}

# Rows each source sends for each local expert.
COUNTS = {
    "uneven": [[3, 1, 4]],
    "an unused expert": [[2, 0, 3]],
    "all to one": [[0, 7, 0, 0]],
    "one row": [[0, 1]],
    "no rows": [[0, 0, 0]],
    "one expert": [[5]],
    "four sources": [[3, 1, 2], [0, 2, 0], [0, 0, 0], [1, 4, 1]],
    "four sources, one expert": [[2], [0], [3], [1]],
    "two sources, no rows": [[0, 0], [0, 0]],
    "two sources, an expert that neither uses": [[2, 0, 1], [1, 0, 2]],
}
loads = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
activations = pytest.mark.parametrize("activation", ["swiglu", "geglu", "gelu", "relu", "relu2"])


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


ACTIVE = {
    "swiglu": lambda x: x / (1 + torch.exp(-x)),
    "geglu": gelu,
    "gelu": gelu,
    "relu": lambda x: x * (x > 0),
    "relu2": lambda x: x * x * (x > 0),
}


def inputs(counts: list[list[int]], activation: str, dtype: torch.dtype) -> list[Tensor]:
    """rows, up, down: D 6, F 5."""
    num_experts, factor = len(counts[0]), 2 if activation.endswith("glu") else 1
    shapes = [(sum(map(sum, counts)), 6), (num_experts, factor, 5, 6), (num_experts, 6, 5)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def naive_expert_mlp(rows: Tensor, counts: list[list[int]], up: Tensor, down: Tensor, activation: str) -> Tensor:
    owners = [expert for source in counts for expert, count in enumerate(source) for _ in range(count)]
    out = []
    for row, expert in zip(rows, owners, strict=True):
        hidden = [half @ row for half in up[expert]]
        active = ACTIVE[activation](hidden[0])
        activated = active * hidden[1] if len(hidden) == 2 else active
        out.append(down[expert] @ activated)
    return torch.stack(out) if out else rows * up.sum() * down.sum()


@loads
@activations
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_expert_mlp_and_its_gradients_agree_with_a_loop_over_rows(
    counts: list[list[int]], activation: str, dtype: torch.dtype
) -> None:
    tensors = inputs(counts, activation, dtype)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    rows, up, down = tensors
    out, hidden = ops.expert_mlp(rows, torch.tensor(counts), up, down, activation)
    expected = naive_expert_mlp(exact[0], counts, exact[1], exact[2], activation)
    assert out.dtype == dtype
    assert not hidden.requires_grad
    tolerance = {"rtol": TOLERANCE[dtype], "atol": 10 * TOLERANCE[dtype]}
    torch.testing.assert_close(out.double(), expected, **tolerance)

    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad.double())
    for ours, theirs in zip(tensors, exact, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad.double(), theirs.grad, **tolerance)


@activations
def test_an_unused_expert_gets_zero_gradients(activation: str) -> None:
    rows, up, down = inputs([[2, 0, 3]], activation, torch.float32)
    out, _ = ops.expert_mlp(rows, torch.tensor([[2, 0, 3]]), up, down, activation)
    out.sum().backward()
    assert up.grad is not None
    assert down.grad is not None
    assert not up.grad[1].any()
    assert not down.grad[1].any()


def test_rows_from_many_sources_cost_the_same_numbers_as_from_one() -> None:
    counts = [[2, 1], [0, 3], [1, 1]]
    rows, up, down = inputs(counts, "swiglu", torch.float64)
    owners = torch.tensor([e for source in counts for e, count in enumerate(source) for _ in range(count)])
    order = owners.sort(stable=True)[1]
    out, _ = ops.expert_mlp(rows, torch.tensor(counts), up, down, "swiglu")
    merged, _ = ops.expert_mlp(rows[order], torch.tensor(counts).sum(0, keepdim=True), up, down, "swiglu")
    assert torch.equal(out[order], merged)


def test_layouts_that_are_not_contiguous_give_the_same_numbers() -> None:
    counts = torch.tensor([[2, 3]])
    rows, up, down = (t.detach() for t in inputs([[2, 3]], "swiglu", torch.float64))
    strided = [
        rows.t().contiguous().t(),
        up.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        down.mT.contiguous().mT,
    ]
    for t in strided:
        t.requires_grad_()
    ours = ops.expert_mlp(strided[0], counts, strided[1], strided[2], "swiglu")[0]
    torch.testing.assert_close(ours, ops.expert_mlp(rows, counts, up, down, "swiglu")[0])
    ours.sum().backward()  # a gradient with stride 0
    assert all(t.grad is not None for t in strided)


@loads
@activations
def test_gradients(counts: list[list[int]], activation: str) -> None:
    tensors = inputs(counts, activation, torch.float64)
    assert gradcheck(
        lambda rows, up, down: ops.expert_mlp(rows, torch.tensor(counts), up, down, activation)[0], tensors
    )


def test_counts_that_do_not_add_up_are_refused() -> None:
    rows, up, down = inputs([[2, 3]], "gelu", torch.float32)
    with pytest.raises(RuntimeError, match="the counts add up to 6, but there are 5 rows"):
        ops.expert_mlp(rows, torch.tensor([[2, 4]]), up, down, "gelu")


def test_arguments_that_do_not_fit_are_refused() -> None:
    rows, up, down = inputs([[2, 3]], "gelu", torch.float32)
    counts = torch.tensor([[2, 3]])
    with pytest.raises(RuntimeError, match="activation must be one of swiglu, geglu, gelu, relu, relu2, not 'tanh'"):
        ops.expert_mlp(rows, counts, up, down, "tanh")
    with pytest.raises(RuntimeError, match=r"up \[2, 1, 5, 6\] does not fit swiglu"):
        ops.expert_mlp(rows, counts, up, down, "swiglu")
    with pytest.raises(RuntimeError, match="must share a dtype"):
        ops.expert_mlp(rows.bfloat16(), counts, up, down, "gelu")
