"""`mixture_mlp` against a loop over tokens and experts, and against the operators that it replaces."""

from __future__ import annotations

import math

import pytest
import torch
from support.combinations import diagonals
from torch import Tensor
from torch.autograd import gradcheck

from moec.passes.ir.activations import ACTIVATIONS
from moec.passes.ir.row_table import table_length
from moec.runtime import ops

# float32 rounds weights even where all else is float64's; bf16's are three roundings of a result.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 4e-2}

ACTIVE = {
    "swiglu": lambda x: x / (1 + torch.exp(-x)),
    "geglu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "relu": lambda x: x * (x > 0),
    "relu2": lambda x: x * x * (x > 0),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "identity": lambda x: x,
}

# batch, tokens, experts, k, fraction of choices dropped
SHAPES = {
    "dropless": (2, 7, 5, 2, 0.0),
    "some dropped": (2, 7, 5, 2, 0.4),
    "all dropped": (1, 4, 3, 2, 1.0),
    "k is all": (1, 5, 3, 3, 0.0),
    "one expert": (1, 6, 1, 1, 0.0),
    "one token": (1, 1, 4, 1, 0.0),
    "no tokens": (1, 0, 4, 2, 0.0),
    "no sequences": (0, 3, 4, 2, 0.0),
}


def inputs(
    shape: tuple[int, int, int, int, float], activation: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, experts, weights, up, down: D 6, F 5."""
    batch, tokens, num_experts, k, dropped = shape
    experts = torch.rand(batch, tokens, num_experts).argsort(-1)[..., :k]
    experts = experts.masked_fill(torch.rand(experts.shape) < dropped, -1)
    factor = ACTIVATIONS[activation].parts
    x, up, down = (
        torch.randn(size, dtype=dtype, requires_grad=True)
        for size in ((batch, tokens, 6), (num_experts, factor, 5, 6), (num_experts, 6, 5))
    )
    weights = torch.rand(experts.shape, dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)
    return x, experts, weights, up, down


def biases_of(up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """up_bias and down_bias: a number for each output."""
    of_up, of_down = (torch.randn(t.shape[:-1], dtype=t.dtype, requires_grad=True) for t in (up, down))
    return of_up, of_down


def naive(
    x: Tensor, experts: Tensor, weights: Tensor, up: Tensor, down: Tensor, activation: str, *biases: Tensor
) -> Tensor:
    mixed = x * 0 + 0 * sum(t.sum() for t in (up, down, weights, *biases))
    for expert in range(up.shape[0]):
        hidden = [x @ half.T for half in up[expert]]
        if biases:
            hidden = [one + bias for one, bias in zip(hidden, biases[0][expert], strict=True)]
        active = ACTIVE[activation](hidden[0])
        out = (active * hidden[1] if len(hidden) == 2 else active) @ down[expert].T
        out = out + biases[1][expert] if biases else out
        mixed = mixed + out * ((experts == expert) * weights).sum(-1, keepdim=True)
    return mixed


@pytest.mark.parametrize(
    ("shape", "activation", "beside", "dtype"),
    diagonals(list(SHAPES), list(ACTIVE), ["plain", "biases"], list(TOLERANCE), number=4),
)
def test_mixture_mlp_and_its_gradients_agree_with_a_loop(
    shape: str, activation: str, beside: str, dtype: torch.dtype
) -> None:
    x, experts, weights, up, down = inputs(SHAPES[shape], activation, dtype)
    biases = biases_of(up, down) if beside == "biases" else ()
    mixed, counts, *_ = ops.mixture_mlp(x, experts, weights, up, down, *(biases or (None, None)), activation)
    ours = (x, weights, up, down, *biases)
    exact = [t.detach().double().requires_grad_() for t in ours]
    expected = naive(exact[0], experts, *exact[1:4], activation, *exact[4:])
    grad = torch.randn_like(mixed)
    mixed.backward(grad)
    expected.backward(grad.double())
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype] * 4}
    torch.testing.assert_close(mixed.double(), expected, **tolerance)
    for one, other in zip(ours, exact, strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, **tolerance)
    assert counts.tolist() == [[int((experts == expert).sum()) for expert in range(up.shape[0])]]


def test_it_is_what_permute_expert_mlp_and_combine_compute() -> None:
    x, experts, weights, up, down = inputs((3, 40, 7, 3, 0.0), "swiglu", torch.float64)
    mixed, counts, hidden, positions, _ = ops.mixture_mlp(x, experts, weights, up, down, None, None, "swiglu")
    rows, alone, places = ops.permute(x, experts, 7)
    out, saved, _ = ops.expert_mlp(rows, alone, up, down, None, None, None, "swiglu")
    for one, other in zip(
        (mixed, counts, hidden, positions), (ops.combine(out, places, weights), alone, saved, places), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_a_dropped_choice_does_not_matter_even_beside_nan() -> None:
    x, experts, weights, up, down = inputs((1, 4, 3, 2, 0.0), "swiglu", torch.float32)
    experts[0, 0], experts[0, 1] = torch.tensor([0, -1]), torch.tensor([-1, -1])
    with torch.no_grad():
        x[0, 0] = torch.nan
        weights[0, 1] = 3.0
    mixed, _, _, positions, _ = ops.mixture_mlp(x, experts, weights, up, down, None, None, "swiglu")
    assert mixed[0, 0].isnan().all()
    assert mixed[0, 1].tolist() == [0.0] * 6
    assert positions[0, :2].tolist()[1] == [-1, -1]
    mixed[0, 1:].sum().backward()
    assert x.grad is not None
    assert x.grad[0, 1].tolist() == [0.0] * 6


@pytest.mark.parametrize(("activation", "bias"), diagonals(list(ACTIVE), [False, True]))
def test_gradients_of_mixture_mlp(activation: str, bias: bool) -> None:
    x, experts, weights, up, down = inputs((1, 5, 4, 2, 0.2), activation, torch.float64)
    tensors = (x, weights, up, down, *(biases_of(up, down) if bias else ()))

    def run(*given: Tensor) -> Tensor:
        mixed, *_ = ops.mixture_mlp(given[0], experts, *given[1:4], *(given[4:] or (None, None)), activation)
        return mixed

    assert gradcheck(run, tensors)


def test_nothing_of_a_row_per_choice_is_saved_but_the_pre_activation() -> None:
    x, experts, weights, up, down = inputs((2, 50, 4, 3, 0.0), "swiglu", torch.float32)
    saved: list[tuple[int, ...]] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        ops.mixture_mlp(x, experts, weights, up, down, None, None, "swiglu")
    of_routing = [(1, 4), (2, 50, 3), (2, 50, 3), (table_length(300, 4),)]
    assert sorted(saved) == sorted([(2, 50, 6), (300, 2, 5), *of_routing, (4, 2, 5, 6), (4, 6, 5)])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"experts": torch.full((1, 3, 2), 4)}, r"experts must be from -1 to 3, not 4 to 4"),
        ({"experts": torch.full((1, 3, 2), -2)}, r"experts must be from -1 to 3, not -2 to -2"),
        ({"experts": torch.zeros(1, 3, 2)}, "experts must be int64"),
        ({"experts": torch.zeros(1, 4, 2, dtype=torch.int64)}, r"x must be \[B, S, D\]"),
        ({"weights": torch.rand(1, 3, 2).bfloat16()}, "weights must be float32 or float64"),
        ({"x": torch.rand(1, 3, 6).double()}, "must share a dtype"),
        ({"down": torch.rand(4, 5, 6)}, r"up must be \[E, G, F, D\] and down \[E, D, F\]"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], complaint: str) -> None:
    given = dict(
        zip(("x", "experts", "weights", "up", "down"), inputs((1, 3, 4, 2, 0.0), "gelu", torch.float32), strict=True)
    )
    with pytest.raises(RuntimeError, match=complaint):
        ops.mixture_mlp(*(given | change).values(), None, None, "gelu")
