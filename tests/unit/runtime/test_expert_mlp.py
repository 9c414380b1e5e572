"""`expert_mlp` against a loop over rows."""

from __future__ import annotations

import math

import pytest
import torch
from support.combinations import diagonals
from torch import Tensor
from torch.autograd import gradcheck

from moec.passes.ir.activations import ACTIVATIONS
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
AXES = list(COUNTS), list(ACTIVATIONS), ["plain", "biases"]
activations = pytest.mark.parametrize("activation", ACTIVATIONS)


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


ACTIVE = {
    "swiglu": lambda x: x / (1 + torch.exp(-x)),
    "geglu": gelu,
    "gelu": gelu,
    "relu": lambda x: x * (x > 0),
    "relu2": lambda x: x * x * (x > 0),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "identity": lambda x: x,
}


def inputs(counts: list[list[int]], activation: str, dtype: torch.dtype) -> list[Tensor]:
    """rows, up, down: D 6, F 5."""
    num_experts, factor = len(counts[0]), ACTIVATIONS[activation].parts
    shapes = [(sum(map(sum, counts)), 6), (num_experts, factor, 5, 6), (num_experts, 6, 5)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def biases_of(up: Tensor, down: Tensor) -> list[Tensor]:
    """up_bias and down_bias: a number for each output."""
    return [torch.randn(t.shape[:-1], dtype=t.dtype, requires_grad=True) for t in (up, down)]


def naive_expert_mlp(
    rows: Tensor, counts: list[list[int]], up: Tensor, down: Tensor, activation: str, *biases: Tensor
) -> Tensor:
    owners = [expert for source in counts for expert, count in enumerate(source) for _ in range(count)]
    out = []
    for row, expert in zip(rows, owners, strict=True):
        hidden = [half @ row for half in up[expert]]
        if biases:
            hidden = [one + bias for one, bias in zip(hidden, biases[0][expert], strict=True)]
        active = ACTIVE[activation](hidden[0])
        activated = active * hidden[1] if len(hidden) == 2 else active
        out.append(down[expert] @ activated + (biases[1][expert] if biases else 0))
    given = 0 * sum(t.sum() for t in (rows, up, down, *biases))
    return torch.stack(out) + given if out else rows + given


@pytest.mark.parametrize(("load", "activation", "beside", "dtype"), diagonals(*AXES, list(TOLERANCE), number=3))
def test_expert_mlp_and_its_gradients_agree_with_a_loop_over_rows(
    load: str, activation: str, beside: str, dtype: torch.dtype
) -> None:
    counts = COUNTS[load]
    tensors = inputs(counts, activation, dtype)
    tensors += biases_of(*tensors[1:]) if beside == "biases" else []
    exact = [t.detach().double().requires_grad_() for t in tensors]
    rows, up, down = tensors[:3]
    out, hidden, _ = ops.expert_mlp(
        rows, torch.tensor(counts), up, down, *(tensors[3:] or (None, None)), None, activation
    )
    expected = naive_expert_mlp(exact[0], counts, exact[1], exact[2], activation, *exact[3:])
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
    out, *_ = ops.expert_mlp(rows, torch.tensor([[2, 0, 3]]), up, down, None, None, None, activation)
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
    out, *_ = ops.expert_mlp(rows, torch.tensor(counts), up, down, None, None, None, "swiglu")
    merged, *_ = ops.expert_mlp(
        rows[order], torch.tensor(counts).sum(0, keepdim=True), up, down, None, None, None, "swiglu"
    )
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
    ours = ops.expert_mlp(strided[0], counts, strided[1], strided[2], None, None, None, "swiglu")[0]
    torch.testing.assert_close(ours, ops.expert_mlp(rows, counts, up, down, None, None, None, "swiglu")[0])
    ours.sum().backward()  # a gradient with stride 0
    assert all(t.grad is not None for t in strided)


@pytest.mark.parametrize(("load", "activation", "beside"), diagonals(*AXES))
def test_gradients_are_those_of_finite_differences(load: str, activation: str, beside: str) -> None:
    counts = COUNTS[load]
    tensors = inputs(counts, activation, torch.float64)
    tensors += biases_of(*tensors[1:]) if beside == "biases" else []

    def run(rows: Tensor, up: Tensor, down: Tensor, *biases: Tensor) -> Tensor:
        out, *_ = ops.expert_mlp(rows, torch.tensor(counts), up, down, *(biases or (None, None)), None, activation)
        return out

    assert gradcheck(run, tensors)


def test_counts_that_do_not_add_up_are_refused() -> None:
    rows, up, down = inputs([[2, 3]], "gelu", torch.float32)
    with pytest.raises(RuntimeError, match="the counts add up to 6, but there are 5 rows"):
        ops.expert_mlp(rows, torch.tensor([[2, 4]]), up, down, None, None, None, "gelu")


def test_arguments_that_do_not_fit_are_refused() -> None:
    rows, up, down = inputs([[2, 3]], "gelu", torch.float32)
    counts = torch.tensor([[2, 3]])
    with pytest.raises(RuntimeError, match=r"activation must be one of swiglu, geglu, gelu, .*, not 'tanh'"):
        ops.expert_mlp(rows, counts, up, down, None, None, None, "tanh")
    with pytest.raises(RuntimeError, match=r"up \[2, 1, 5, 6\] does not fit swiglu"):
        ops.expert_mlp(rows, counts, up, down, None, None, None, "swiglu")
    with pytest.raises(RuntimeError, match="must share a dtype"):
        ops.expert_mlp(rows.bfloat16(), counts, up, down, None, None, None, "gelu")
    up_bias, down_bias = biases_of(up, down)
    with pytest.raises(RuntimeError, match="must both have biases, or none"):
        ops.expert_mlp(rows, counts, up, down, up_bias, None, None, "gelu")
    with pytest.raises(RuntimeError, match=r"biases must be \[E, G, F\] and \[E, D\]"):
        ops.expert_mlp(rows, counts, up, down, up_bias, up_bias, None, "gelu")
    with pytest.raises(RuntimeError, match=r"not \[2, 1, 5\], torch.float32 and \[2, 6\], torch.float64"):
        ops.expert_mlp(rows, counts, up, down, up_bias, down_bias.double(), None, "gelu")
