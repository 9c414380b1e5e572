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

import moec
from moec.codegen.kernels import KernelShape
from moec.codegen.plan_kernels import kernels_of
from moec.runtime.backends import (
    BackendError,
    torch_backend,
    triton_backend,
    triton_experts,
    triton_routing,
    triton_rows,
)
from moec.runtime.backends.triton_launch import Kernels
from moec.runtime.backends.triton_launch import kernels_of as kernels_of_shape

assert os.environ.get("TRITON_INTERPRET") == "1"

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3}
both_dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


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
ROUTES = [(1, 1), (8, 8), (13, 3), (256, 8)]


@both_dtypes
@pytest.mark.parametrize(("score", "after", "normalize"), HOW)
def test_route(score: str, after: bool, normalize: bool, dtype: torch.dtype) -> None:
    for experts, k in ROUTES:
        for tokens in (1, 65):
            logits = torch.randn(1, tokens, experts, dtype=dtype) * 3
            ours = triton_backend.route(logits, k, score, after, normalize)
            exact = torch_backend.route(logits, k, score, after, normalize)
            close(ours, exact)
            of_all, of_chosen = torch.randn_like(exact[0]), torch.randn_like(exact[1])
            for gradients in ((of_all, of_chosen), (of_all, None), (None, of_chosen)):
                arguments = (logits, *gradients, *exact[1:], score, after, normalize)
                close(triton_backend.route_backward(*arguments), torch_backend.route_backward(*arguments))


def test_no_tokens_are_routed_nowhere() -> None:
    logits = torch.randn(2, 0, 5)
    exact = torch_backend.route(logits, 2, "softmax", False, True)
    close(triton_backend.route(logits, 2, "softmax", False, True), exact)
    arguments = (logits, None, exact[1], *exact[1:], "softmax", False, True)
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
    "many experts": (1, 12, 200, 8, 3),
    "k is all": (1, 9, 4, 4, 16),
    "one token": (1, 1, 8, 2, 7),
    "no tokens": (1, 0, 8, 2, 7),
    "no sequences": (0, 5, 8, 2, 7),
    "one expert": (1, 12, 1, 1, 2),
    "more than one block": (1, 70, 64, 2, 1),
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
    for _ in range(8):
        num_experts = draw.randint(1, 40)
        k, tokens, dim = draw.randint(1, num_experts), draw.randint(1, 60), draw.randint(1, 40)
        x, skew = torch.randn(1, tokens, dim), torch.randn(num_experts) * draw.choice([0, 1, 5])
        experts = (torch.rand(1, tokens, num_experts) + skew).argsort(-1)[..., :k]
        close(triton_backend.permute(x, experts, num_experts), torch_backend.permute(x, experts, num_experts))


# ---- expert_mlp --------------------------------------------------------------------------------------

# Rows each source sends for each expert.
COUNTS = {
    "uneven": [[3, 1, 4]],
    "more than one tile": [[70, 0, 33, 65]],
    "all to one": [[0, 130, 0, 0]],
    "one row": [[0, 1]],
    "no rows": [[0, 0, 0]],
    "one expert": [[5]],
    "four sources": [[3, 1, 2], [0, 2, 0], [0, 0, 0], [1, 70, 1]],
    "two sources, no rows": [[0, 0], [0, 0]],
    "two sources, an expert that neither uses": [[2, 0, 1], [1, 0, 2]],
}
# dim, hidden: below a tile, multiples of it, and beyond it by a little.
WIDTHS = [(6, 5), (64, 32), (70, 40)]
ACTIVATIONS = ("swiglu", "geglu", "gelu", "relu", "relu2")


def agree_on_experts(counts: list[list[int]], dim: int, hidden: int, activation: str, dtype: torch.dtype) -> None:
    """Forward and backward, on random numbers of unit variance throughout."""
    of_experts = torch.tensor(counts)
    num_experts, parts = of_experts.shape[1], 2 if activation in ("swiglu", "geglu") else 1
    rows = torch.randn(int(of_experts.sum()), dim, dtype=dtype)
    up = torch.randn(num_experts, parts, hidden, dim, dtype=dtype) / dim**0.5
    down = torch.randn(num_experts, dim, hidden, dtype=dtype) / hidden**0.5
    out, saved = triton_backend.expert_mlp(rows, of_experts, up, down, activation)
    exact, exact_saved = torch_backend.expert_mlp(rows, of_experts, up, down, activation)
    close(out, exact)
    grad = torch.randn_like(out)
    close(
        triton_backend.expert_mlp_backward(grad, rows, saved, of_experts, up, down, activation),
        torch_backend.expert_mlp_backward(grad, rows, exact_saved, of_experts, up, down, activation),
    )


@both_dtypes
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_experts_under_every_load(counts: list[list[int]], dtype: torch.dtype) -> None:
    agree_on_experts(counts, 70, 40, "swiglu", dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("dim", "hidden"), WIDTHS)
def test_experts_of_every_activation_and_width(dim: int, hidden: int, activation: str) -> None:
    agree_on_experts([[3, 1, 40]], dim, hidden, activation, torch.float32)
    agree_on_experts([[3, 1], [2, 5]], dim, hidden, activation, torch.float64)


def test_experts_under_random_loads() -> None:
    draw = random.Random(0)
    for _ in range(6):
        num_experts, sources = draw.randint(1, 9), draw.choice([1, 1, 3])
        most = draw.choice([1, 5, 90])
        counts = [[draw.randint(0, most) for _ in range(num_experts)] for _ in range(sources)]
        agree_on_experts(counts, draw.randint(1, 80), draw.randint(1, 80), draw.choice(ACTIVATIONS), torch.float32)


def test_counts_that_do_not_add_up_are_refused() -> None:
    rows, up, down = torch.randn(5, 4), torch.randn(2, 1, 3, 4), torch.randn(2, 4, 3)
    with pytest.raises(RuntimeError, match="the counts add up to 6, but there are 5 rows"):
        triton_backend.expert_mlp(rows, torch.tensor([[2, 4]]), up, down, "gelu")


def test_bf16_is_refused_in_the_interpreter_which_computes_it_wrongly() -> None:
    x = torch.randn(1, 2, 8).bfloat16()
    with pytest.raises(BackendError, match="interpreter computes bf16 wrongly"):
        triton_backend.permute(x, torch.zeros(1, 2, 1, dtype=torch.int64), 2)


# ---- dense feed-forwards -----------------------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_gated_activations(name: str, dtype: torch.dtype) -> None:
    for shape in ((2, 3, 2, 5), (1, 1, 2, 1100), (0, 4, 2, 8), (7, 2, 64)):
        x = torch.randn(shape, dtype=dtype) * 3
        exact = getattr(torch_backend, name)(x)
        close(getattr(triton_backend, name)(x), exact)
        grad = torch.randn_like(exact)
        backward = f"{name}_backward"
        close(getattr(triton_backend, backward)(grad, x), getattr(torch_backend, backward)(grad, x))


# ---- whole plans -------------------------------------------------------------------------------------

TINY = """
model "tiny" {
  vocab = 8
  dim   = 8
  depth = 1
  dtype = fp32
  layers {
    attention = mha(heads = 2)
    moe { experts = 4 * swiglu(8); gate = topk(2, normalize = true) }
  }
}
cluster "two" { device = cpu; level "process" { size = 2 } }
train { batch = 2; sequence = 4; optimizer = adamw(lr = 1e-2) }
parallel { ep = 2 }
"""


def test_verify_proves_the_kernels_against_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = moec.compile(TINY)
    report = moec.verify(plan, scale=True)
    assert report.ok
    assert report.max_gradient_error > 0  # kernels and definition round differently, so that both have run

    def slightly_off(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        grad_rows, grad_weights = exact(*arguments)
        return grad_rows * (1 + 1e-6), grad_weights

    exact = triton_backend.combine_backward
    monkeypatch.setattr(triton_backend, "combine_backward", slightly_off)
    report = moec.verify(plan, scale=True)
    assert not report.ok
    assert report.first_difference is not None
    assert report.first_difference.op == "moec.combine.default"
    assert report.first_difference.span == "<text>:9"


def test_a_plan_lists_the_kernels_that_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = 'device "toy" { kind = cuda; memory = 80GB; bandwidth = 1TB/s; peak { fp32 = 1TFLOPS; bf16 = 1TFLOPS } }\n'
    plan = moec.compile(gpu + TINY.replace("device = cpu", 'device = "toy"'))
    listed = {kernel.shape for kernel in kernels_of(plan)}
    run: set[KernelShape] = set()
    for module in (triton_routing, triton_rows, triton_experts):

        def noted(shape: KernelShape, x: Tensor) -> Kernels:
            run.add(shape)
            return kernels_of_shape(shape, x)

        monkeypatch.setattr(module, "kernels_of", noted)
    # A rank of two: half the batch, half the experts, rows from both.
    x = torch.randn(1, 4, 8)
    _, weights, experts = triton_backend.route(torch.randn(1, 4, 4), 2, "softmax", False, True)
    rows, counts, positions = triton_backend.permute(x, experts, 4)
    up, down = torch.randn(2, 2, 8, 8), torch.randn(2, 8, 8)
    triton_backend.expert_mlp(rows, counts.view(2, 2), up, down, "swiglu")
    triton_backend.combine(rows, positions, weights)
    assert run == listed
