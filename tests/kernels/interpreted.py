"""What Triton's interpreter alone can show. `test_interpreted.py` runs it, in its own process.

The operators' numbers are in `conformance/`, which runs in the interpreter too.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
from support.combinations import diagonals, some
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import moec
from moec.codegen.kernels.kernel_shape import KernelShape
from moec.codegen.kernels.plan_kernels import kernels_of
from moec.codegen.kernels.shapes import RouteShape
from moec.runtime import ops, unscored
from moec.runtime.backends import BackendError, plain_torch
from moec.runtime.backends.torch import torch_routing
from moec.runtime.backends.triton import (
    triton_backend,
    triton_experts,
    triton_mixture,
    triton_padded,
    triton_queues,
    triton_routing,
    triton_rows,
    triton_slots,
    triton_table,
)
from moec.runtime.backends.triton.triton_launch import Kernels
from moec.runtime.backends.triton.triton_launch import kernels_of as kernels_of_shape
from moec.runtime.backends.triton.triton_modules import kernels_in
from moec.runtime.backends.triton.triton_tiles import target_at
from moec.runtime.ops import permute_weights

assert os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    torch.manual_seed(0)


HERE = target_at(torch.device("cpu"))
"""The interpreter, which is no device of a plan: it has persistent products in fp32."""

GPU = 'device "toy" { kind = cuda; memory = 80GB; bandwidth = 1TB/s; peak { fp32 = 1TFLOPS; bf16 = 1TFLOPS } }\n'

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


BIASED = TINY.replace("swiglu(8)", "swiglu(8, bias = true)")
with_or_without_biases = pytest.mark.parametrize("text", [TINY, BIASED], ids=["plain", "biases"])


def test_verify_proves_the_kernels_against_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = moec.compile(TINY)
    report = moec.verify(plan, scale=True)
    assert report.ok
    assert report.max_gradient_error > 0  # kernels and definition round differently, so that both have run

    def slightly_off(*arguments: Tensor) -> tuple[Tensor, ...]:
        *grads, grad_weights = exact(*arguments)
        return *grads, grad_weights * (1 + 1e-6)

    exact = triton_backend.expert_mlp_backward
    monkeypatch.setattr(triton_backend, "expert_mlp_backward", slightly_off)
    report = moec.verify(plan, scale=True)
    assert not report.ok
    assert report.first_difference is not None
    assert (report.first_difference.value, report.first_difference.gradient) == ("row_weights.1", True)
    assert report.first_difference.span == "<text>:9"


@pytest.mark.parametrize("ep", some([1, 2], [2]))
def test_verify_proves_the_kernels_of_experts_with_biases(ep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = moec.compile(BIASED.replace("ep = 2", f"ep = {ep}"))
    report = moec.verify(plan, scale=True)
    assert report.ok, report
    launch = Kernels.launch

    def forgetful(kernels: Kernels, kernel: str, *arguments: object, **options: object) -> None:
        if kernel != "down_bias":
            launch(kernels, kernel, *arguments, **options)

    monkeypatch.setattr(Kernels, "launch", forgetful)
    found = moec.verify(plan, scale=True).first_difference
    assert found is not None
    assert found.value == "@moe.experts.down.bias"


@pytest.mark.parametrize(
    ("capacity", "ep"),
    [
        ("; capacity = factor(0.75)", 1),
        pytest.param("", 2, marks=pytest.mark.slow),
        pytest.param("; capacity = dynamic()", 2, marks=pytest.mark.slow),
    ],
)
def test_verify_proves_the_kernels_of_a_model_with_padding(capacity: str, ep: int) -> None:
    text = TINY.replace("dtype = fp32", "dtype = fp32; embedding = tokens(padding = 3)").replace("ep = 2", f"ep = {ep}")
    report = moec.verify(moec.compile(text.replace("gate =", f"balance = [switch_loss(0.1)]{capacity}; gate =")))
    assert report.ok, report
    assert report.max_gradient_error > 0  # kernels and definition round differently, so that both have run


def test_a_plan_in_bf16_is_proven_but_not_trained_in_the_interpreter() -> None:
    plan = moec.compile(TINY.replace("fp32", "bf16").replace("size = 2", "size = 1").replace("ep = 2", "ep = 1"))
    assert moec.verify(plan).ok  # in float64
    hook = sys.excepthook
    try:
        with (
            pytest.raises(BackendError, match="Triton's interpreter computes bf16 wrongly") as refused,
            moec.launch(plan, device="cpu") as job,
        ):
            job.build()(torch.zeros(1, 4, dtype=torch.int64))
    finally:
        sys.excepthook = hook
    assert refused.value.diagnostics[0].code == "MOE0707"


def noting(monkeypatch: pytest.MonkeyPatch) -> set[KernelShape]:
    """Records the shapes of kernels that are requested from now on."""
    run: set[KernelShape] = set()

    def noted(shape: KernelShape, x: Tensor) -> Kernels:
        run.add(shape)
        return kernels_of_shape(shape, x)

    for module in (
        triton_routing,
        triton_queues,
        triton_rows,
        triton_padded,
        triton_experts,
        triton_slots,
        triton_table,
    ):
        monkeypatch.setattr(module, "kernels_of", noted)
    return run


def noting_launches(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Records the kernels that are launched from now on."""
    launched: set[str] = set()
    launch = Kernels.launch

    def noted(kernels: Kernels, kernel: str, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
        launched.add(kernel)
        launch(kernels, kernel, grid, *arguments, **options)

    monkeypatch.setattr(Kernels, "launch", noted)
    return launched


@with_or_without_biases
def test_a_plan_lists_the_kernels_that_are_run(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = moec.compile(GPU + text.replace("device = cpu", 'device = "toy"'))
    listed = {kernel.shape for kernel in kernels_of(plan, HERE)}
    run, launched = noting(monkeypatch), noting_launches(monkeypatch)
    # A rank of two: half the batch, half the experts, rows from both.
    x, logits = torch.randn(1, 4, 8), torch.randn(1, 4, 4)
    probabilities, weights, experts = triton_backend.route(logits, None, 2, "softmax", "before", True)
    triton_backend.route_backward(logits, probabilities, weights, weights, experts, "softmax", "before", True)
    rows, counts, positions = triton_backend.permute(x, experts, 4)
    up, down = torch.randn(2, 2, 8, 8), torch.randn(2, 8, 8)
    biases = (torch.randn(2, 2, 8), torch.randn(2, 8)) if text == BIASED else (None, None)
    beside = permute_weights(weights, positions, rows)
    given = (counts.view(2, 2), up, down, *biases, beside, "swiglu")
    out, *saved = triton_backend.expert_mlp(rows, *given)
    mixed = triton_backend.sum_rows(out, positions, counts)
    grad = triton_backend.sum_rows_backward(mixed, positions, counts, rows.shape[:1])
    grad_rows, *_ = triton_backend.expert_mlp_backward(grad, rows, *saved, *given)
    triton_backend.permute_backward(grad_rows, positions)
    assert run == listed
    assert launched == {
        name for kernel in kernels_of(plan, HERE) for name, _ in kernels_in(kernel.shape, kernel.launched)
    }


@with_or_without_biases
def test_a_plan_lists_the_kernels_of_a_mixture_whose_rows_stay(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = moec.compile(GPU + text.replace("device = cpu", 'device = "toy"').replace("ep = 2", "ep = 1"))
    listed = {kernel.shape for kernel in kernels_of(plan, HERE)}
    run, launched = noting(monkeypatch), noting_launches(monkeypatch)
    x, up, down = torch.randn(1, 4, 8), torch.randn(4, 2, 8, 8), torch.randn(4, 8, 8)
    logits = torch.randn(1, 4, 4)
    probabilities, weights, experts = triton_backend.route(logits, None, 2, "softmax", "before", True)
    triton_backend.route_backward(logits, probabilities, weights, weights, experts, "softmax", "before", True)
    of_experts = (up, down, *((torch.randn(4, 2, 8), torch.randn(4, 8)) if text == BIASED else (None, None)), "swiglu")
    mixed, counts, hidden, *saved = triton_backend.mixture_mlp(x, experts, weights, *of_experts)
    triton_backend.mixture_mlp_backward(mixed, x, hidden, counts, *saved, weights, *of_experts)
    assert run == listed
    assert launched == {
        name for kernel in kernels_of(plan, HERE) for name, _ in kernels_in(kernel.shape, kernel.launched)
    }


class Waits(TorchDispatchMode):
    """Notes operators that make the host wait for a device, or whose results' sizes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "bincount", "unique", "masked_select"):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@with_or_without_biases
def test_a_local_mixture_never_waits_for_the_device_so_that_a_graph_can_capture_it(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On CPU alone they look at values.
    monkeypatch.setattr(triton_rows, "refuse_out_of_range", lambda *_: None)
    monkeypatch.setattr(triton_mixture, "refuse_out_of_range", lambda *_: None)
    x, up, down = torch.randn(1, 4, 8), torch.randn(4, 2, 8, 8), torch.randn(4, 8, 8)
    logits = torch.randn(1, 4, 4)
    biases = (torch.randn(4, 2, 8), torch.randn(4, 8)) if text == BIASED else (None, None)
    of_experts = (up, down, *biases, "swiglu")
    with Waits() as waits, unscored.noting():
        probabilities, weights, experts = triton_backend.route(logits, None, 2, "softmax", "before", True)
        mixed, counts, hidden, *saved = triton_backend.mixture_mlp(x, experts, weights, *of_experts)
        triton_backend.mixture_mlp_backward(mixed, x, hidden, counts, *saved, weights, *of_experts)
        triton_backend.route_backward(logits, probabilities, weights, weights, experts, "softmax", "before", True)
    assert waits.seen == []
    with Waits() as waits:
        int(counts.sum())
    assert waits.seen == ["aten._local_scalar_dense.default"]


@pytest.mark.parametrize(("forward", "sources"), diagonals(["torch", "triton", "grouped_mm"], [0, 1, 2]))
def test_backward_runs_with_the_backend_of_its_forward_whatever_is_forced_by_then(
    forward: str, sources: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a mixture, and of rows from one rank and from two."""
    leaves = [torch.randn(s, requires_grad=True) for s in ((1, 40, 8), (1, 40, 2), (3, 2, 16, 8), (3, 8, 16))]
    choices = torch.randint(3, (1, 40, 2))

    def out() -> Tensor:
        x, weights, up, down = leaves
        if not sources:
            return ops.mixture_mlp(x, choices, weights, up, down, None, None, "swiglu")[0]
        counts = torch.tensor([[30, 0, 50]] if sources == 1 else [[10, 0, 30], [20, 5, 15]])
        rows = x.expand(2, 40, 8).reshape(80, 8)
        return ops.expert_mlp(rows, counts, up, down, None, None, weights.flatten(), "swiglu")[0]

    with plain_torch():
        exact = torch.autograd.grad(out().square().sum(), leaves)
    monkeypatch.setenv("MOEC_BACKEND", forward)
    loss = out().square().sum()
    for later in ("torch", "triton", "grouped_mm"):
        monkeypatch.setenv("MOEC_BACKEND", later)
        found = torch.autograd.grad(loss, leaves, retain_graph=True)
        for ours, theirs in zip(found, exact, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().amax()))


def test_ways_that_are_no_ways_are_refused_like_other_arguments() -> None:
    x, weights, up, down = (torch.randn(s) for s in ((1, 4, 8), (1, 4, 2), (3, 2, 16, 8), (3, 8, 16)))
    choices = torch.randint(3, (1, 4, 2))
    with pytest.raises(RuntimeError, match="moec: ways: `up=no` does not name each product once"):
        ops.mixture_mlp(x, choices, weights, up, down, None, None, "swiglu", None, None, "up=no")


MIXTURE = "moe { experts = 4 * swiglu(8); gate = topk(2) }"
HEADS = """
model "tiny" {
  vocab = 8; dim = 8; depth = 1; dtype = fp32
  layers { attention = moa(heads = 2, head_dim = 3, experts = 5, gate = topk(3, normalize = true)); BODY }
}
cluster "one" { device = cpu; level "process" { size = 1 } }
train { batch = 1; sequence = 3 }
"""


def test_a_plan_lists_the_kernels_of_experts_of_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    text = TINY.replace("topk(2, normalize = true)", "soft()").replace("= 2 }", "= 1 }")
    plan = moec.compile(GPU + text.replace("device = cpu", 'device = "toy"'))
    run, launched = noting(monkeypatch), noting_launches(monkeypatch)
    tokens = torch.randint(8, (2, 4))
    with moec.launch(moec.compile(text), device="cpu") as job:
        job.step(job.build(seed=1), tokens, tokens)
    assert run == {kernel.shape for kernel in kernels_of(plan, HERE)}
    assert launched == {
        name for kernel in kernels_of(plan, HERE) for name, _ in kernels_in(kernel.shape, kernel.launched)
    }


@pytest.mark.parametrize("body", some([MIXTURE, "ffn = gelu(8)"], [MIXTURE]))
def test_a_plan_lists_the_kernels_of_a_mixture_of_heads(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = HEADS.replace("BODY", body)
    plan = moec.compile(GPU + text.replace("device = cpu", 'device = "toy"'))
    run, launched = noting(monkeypatch), noting_launches(monkeypatch)
    tokens = torch.randint(8, (1, 3))
    with moec.launch(moec.compile(text), device="cpu") as job:
        job.step(job.build(seed=1), tokens, tokens)
    assert run == {kernel.shape for kernel in kernels_of(plan, HERE)}
    assert launched == {
        name for kernel in kernels_of(plan, HERE) for name, _ in kernels_in(kernel.shape, kernel.launched)
    }


GATE = """topk(2, score = sigmoid, normalize = true, scale = 2.5, groups = 2, keep_groups = 1,
                                    bias = online(0.01))"""


def test_the_whole_gate_of_deepseek_v3_is_one_kernel_that_the_plan_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    text = TINY.replace("topk(2, normalize = true)", GATE)
    plan = moec.compile(GPU + text.replace("device = cpu", 'device = "toy"'))
    listed = {
        (kernel.shape, kernel.launched) for kernel in kernels_of(plan, HERE) if isinstance(kernel.shape, RouteShape)
    }
    monkeypatch.setattr(torch_routing, "route", None)
    run, launched = noting(monkeypatch), noting_launches(monkeypatch)
    logits, bias = torch.randn(1, 4, 4), torch.randn(4)
    options = ("sigmoid", "before", True, 2.5)
    probabilities, weights, experts = triton_backend.route(logits, bias, 2, *options, 2, 1, "top2_sum")
    triton_backend.route_backward(logits, probabilities, weights, weights, experts, *options)
    assert run == {shape for shape, _ in listed}
    assert launched == {name for _, only in listed for name in only} == {"route", "route_backward"}


@pytest.mark.parametrize("order", some(["before", "after"], ["before"]))
def test_verify_proves_the_kernels_of_gates_with_groups_and_biases(order: str) -> None:
    gate = GATE.replace("sigmoid", f"sigmoid, order = {order}")
    report = moec.verify(moec.compile(TINY.replace("topk(2, normalize = true)", gate)))
    assert report.ok, report
    assert report.max_gradient_error > 0  # kernels and definition round differently, so that both have run
