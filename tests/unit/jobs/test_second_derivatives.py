"""Second derivatives, forward mode and `torch.func` through layers and models: right on one rank, else MOE0729."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from support.one_rank_jobs import TOKENS
from support.plans import layer_text, moe_plan
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import moec
from moec.grammar.diagnostics import DiagnosticError

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")
STEP = 1e-6


def directions(tensors: list[Tensor]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(x.shape, generator=draw, dtype=x.dtype) for x in tensors]


@torch.no_grad()
def change(function: Callable[[], Tensor], tensors: list[Tensor], along: list[Tensor]) -> Tensor:
    """The derivative of the function in this direction, by central differences."""
    ends = []
    for step in (STEP, -2 * STEP):
        torch._foreach_add_(tensors, along, alpha=step)
        with torch.enable_grad():
            ends.append(function().detach())
    torch._foreach_add_(tensors, along, alpha=STEP)
    return (ends[0] - ends[1]) / (2 * STEP)


def penalty(loss: Callable[[], Tensor], tensors: list[Tensor]) -> Tensor:
    return torch.stack([g.square().sum() for g in torch.autograd.grad(loss(), tensors, create_graph=True)]).sum()


def test_a_gradient_penalty_and_a_tangent_of_a_layer_are_central_differences_of_its_loss() -> None:
    """Also where its parameters are frozen: then torch would record nothing."""
    layer = moec.reference(layer_text(ranks=None, balance="[switch_loss(0.1)]"), seed=1, dtype=torch.float64)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    torch._foreach_mul_([p.data for p in layer.parameters()], 10)
    given = [x, *layer.parameters()]
    assert {p.dtype for p in given} == {torch.float64}

    def loss() -> Tensor:
        return layer(x).square().sum() + layer.aux_loss

    def penalised() -> Tensor:
        return penalty(loss, given)

    along = directions(given)
    slopes = torch.autograd.grad(penalised(), given)
    found = torch.stack([(s * d).sum() for s, d in zip(slopes, along, strict=True)]).sum()
    torch.testing.assert_close(found, change(penalised, given, along), rtol=1e-5, atol=0)
    expected = change(loss, given, along)
    layer.requires_grad_(False)
    names = [name for name, _ in layer.named_parameters()]

    def of(x: Tensor, *parameters: Tensor) -> Tensor:
        y = functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))
        return y.square().sum() + layer.aux_loss

    found = jvp(of, tuple(p.detach() for p in given), tuple(along))[1]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("group", ["sequence", "batch"])
def test_a_penalty_of_balance_terms_that_are_not_linear_in_loads(group: str) -> None:
    balance = "[importance_loss(1), importance_loss(1, of = all)]"
    text = layer_text(ranks=None, balance=balance, beside=f"group = {group}")
    layer = moec.reference(text, seed=1, dtype=torch.float64)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    given = [x, layer.gate.weight]

    def penalised() -> Tensor:
        def loss() -> Tensor:
            layer(x)
            return layer.aux_loss

        return penalty(loss, given)

    along = directions(given)
    slopes = torch.autograd.grad(penalised(), given)
    found = torch.stack([(s * d).sum() for s, d in zip(slopes, along, strict=True)]).sum()
    torch.testing.assert_close(found, change(penalised, given, along), rtol=1e-5, atol=0)


@contextmanager
def model_of(**options: Any) -> Any:
    """A model of one rank, inside of attention that can be differentiated twice."""
    plan = moe_plan(ranks=1, ep=1, **options)
    with moec.launch(plan, device="cpu") as job, sdpa_kernel(SDPBackend.MATH):
        yield job.build(seed=1)


def trained(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def test_second_derivatives_of_a_model_do_not_depend_on_what_is_recomputed() -> None:
    found = []
    for recompute in ("", "layer", "experts"):
        with model_of(recompute=recompute) as model:
            tensors = trained(model)
            found.append(torch.autograd.grad(penalty(lambda: model(TOKENS, TOKENS).loss, tensors), tensors))
    reference = moec.reference(moe_plan(ranks=1, ep=1), seed=1, dtype=torch.float64)
    tensors = trained(reference)
    with sdpa_kernel(SDPBackend.MATH):
        exact = torch.autograd.grad(penalty(lambda: reference(TOKENS, TOKENS).loss, tensors), tensors)
    for slopes in found:
        for one, other in zip(slopes, exact, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_count_and_check_as_a_plain_pass_does_but_for_vmap() -> None:
    """Of `vmap` a batch has no single loss; counts in the form that a transform gives them would be of what is gone."""
    gate = "topk(2, bias = online(0.01))"
    model = moec.reference(moe_plan(ranks=1, ep=1, gate=gate, balance="[]"), dtype=torch.float32).train()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(given: dict[str, Tensor]) -> Tensor:
        return functional_call(model, given, (TOKENS, TOKENS)).loss

    for _ in range(2):
        slopes = grad(loss)(parameters)
    assert slopes.keys() == parameters.keys()
    assert {int(counts.sum()) for counts in model.expert_counts.values()} == {2 * TOKENS.numel()}
    copy.deepcopy(model)
    before = {name: bias.clone() for name, bias in model.named_buffers()}
    model.update_states()
    assert any(not torch.equal(bias, before[name]) for name, bias in model.named_buffers())
    with pytest.raises(DiagnosticError, match="MOE0702"):
        grad(lambda given: functional_call(model, given, (TOKENS + 99, TOKENS)).loss)(parameters)
    stacked = {name: torch.stack([p, 2 * p]) for name, p in parameters.items()}
    one, two = vmap(loss)(stacked)
    torch.testing.assert_close(one, loss(parameters))
    torch.testing.assert_close(two, loss({name: 2 * p for name, p in parameters.items()}))
    with pytest.raises(DiagnosticError, match=r"MOE0729.*inside of `torch.func.vmap`"):
        vmap(grad(loss))(stacked)


def test_derivatives_through_parameters_that_are_cast_are_refused_not_zero() -> None:
    with model_of(dtype="bf16") as model:
        name, parameter = next(iter(model.named_parameters()))
        slopes = torch.autograd.grad(model(TOKENS, TOKENS).loss, trained(model), create_graph=True)
        moved = torch.stack([s.square().sum() for s in slopes]).sum()
        for again in (partial(moved.backward, retain_graph=True), partial(torch.autograd.grad, moved, parameter)):
            with pytest.raises(DiagnosticError, match=r"MOE0729.*no second derivative"):
                again()
        model.requires_grad_(False)
        with pytest.raises(DiagnosticError, match=r"MOE0729.*" + re.escape(name.removeprefix("layers.0."))):
            jvp(lambda p: functional_call(model, {name: p}, (TOKENS, TOKENS)).loss, (parameter,), (parameter,))
