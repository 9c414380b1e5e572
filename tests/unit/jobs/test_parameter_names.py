"""A replaced parameter is used or refused by name; hooks that would never run give a warning."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.plans import moe_plan
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, weight_norm

import moec
from moec.runtime.errors import JobError
from moec.runtime.host.reference import reference
from moec.runtime.model.module import PlanModule

TOKENS = torch.arange(16).view(2, 8)


@pytest.fixture
def model() -> PlanModule:
    return moec.reference(moe_plan(ranks=1, ep=1).spec)


class Adapter(nn.Module):
    """Like a LoRA adapter: wraps the module and has its own `weight`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.weight = inner, inner.weight


HOOKED: dict[str, Callable[[nn.Module], object]] = {
    "forward": lambda module: module.register_forward_hook(print),
    "before forward": lambda module: module.register_forward_pre_hook(print),
    "backward": lambda module: module.register_full_backward_hook(print),
    "before backward": lambda module: module.register_full_backward_pre_hook(print),
}


@pytest.mark.parametrize("hooked", HOOKED)
def test_a_hook_that_never_runs_is_warned_of(model: PlanModule, hooked: str) -> None:
    with pytest.warns(UserWarning, match="a hook of attention.q never runs"):
        HOOKED[hooked](model.layers[0].get_submodule("attention.q"))


def test_hooks_of_layers_and_of_the_model_run(model: PlanModule) -> None:
    ran = []
    model.register_forward_hook(lambda *_: ran.append("model"))
    model.layers[1].register_forward_hook(lambda *_: ran.append("layer"))
    model(TOKENS)
    assert ran == ["layer", "model"]


@pytest.mark.parametrize("by_hook", [weight_norm, lambda module: prune.l1_unstructured(module, "weight", 0.5)])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_a_hook_would_keep_up_to_date_is_refused(
    model: PlanModule, by_hook: Callable[[nn.Module], object]
) -> None:
    with pytest.warns(UserWarning, match="never runs"):
        by_hook(model.layers[0].get_submodule("attention.q"))
    with pytest.raises(JobError, match=r"MOE0710.*attention.q.weight was replaced: weight is no longer a parameter"):
        model(TOKENS)


def test_a_module_whose_forward_would_never_run_is_refused(model: PlanModule) -> None:
    attention = model.layers[0].get_submodule("attention")
    attention.q = Adapter(attention.q)
    with pytest.raises(JobError, match=r"MOE0710.*attention.q.weight was replaced: q is now of class Adapter"):
        model(TOKENS)


def test_a_parametrization_is_used(model: PlanModule) -> None:
    module, before = model.layers[0].get_submodule("attention.q"), model(TOKENS).logits

    class Halved(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight / 2

    parametrize.register_parametrization(module, "weight", Halved())
    halved = model(TOKENS).logits
    assert not torch.allclose(halved, before)
    parametrize.remove_parametrizations(module, "weight")
    assert torch.equal(model(TOKENS).logits, halved)


def test_a_normed_weight_trains(model: PlanModule) -> None:
    module = parametrizations.weight_norm(model.layers[0].get_submodule("attention.q"))
    model(TOKENS, TOKENS).loss.backward()
    assert module.parametrizations.weight.original0.grad.abs().max() > 0


def test_a_functional_call_is_of_the_parameters_it_is_given(model: PlanModule) -> None:
    zeros = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    assert torch.func.functional_call(model, zeros, TOKENS).logits.abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("file_dtype", ["fp32", "bf16"])
def test_converted_masters_are_refused(dtype: torch.dtype, file_dtype: str) -> None:
    wanted = rf"MOE0710.*embedding.weight .* was converted to {dtype}, but an optimizer updates masters in torch.float"
    with moec.launch(moe_plan(ranks=1, ep=1, dtype=file_dtype), device="cpu") as job:
        model = job.build().to(dtype)
        with pytest.raises(JobError, match=wanted) as error:
            job.step(model, TOKENS, TOKENS)
        help = error.value.diagnostics[0].help or ""
        assert help.startswith("layers compute in the file's `dtype`; leave the parameters float32; `moec.reference(")
        with torch.no_grad(), pytest.raises(JobError, match=wanted):
            model(TOKENS)
        assert all(parameter.grad is None for parameter in model.parameters())
        model.float()
        job.step(model, TOKENS, TOKENS)


def test_one_converted_parameter_is_refused_by_its_name(model: PlanModule) -> None:
    model.layers[1].get_submodule("moe.gate").half()
    with pytest.raises(JobError, match=r"MOE0710.*moe.gate.weight \(layer 1.* was converted to torch.float16"):
        model(TOKENS)


def test_float64_references_keep_float64_masters() -> None:
    exact = reference(moe_plan(ranks=1, ep=1).spec, dtype=torch.float64)
    assert exact(TOKENS).logits.dtype == torch.float64
    with pytest.raises(JobError, match=r"MOE0710.*an optimizer updates masters in torch.float64"):
        exact.float()(TOKENS)


def test_a_parametrization_may_compute_in_another_dtype(model: PlanModule) -> None:
    class Rounded(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight.bfloat16()

    parametrize.register_parametrization(model.layers[0].get_submodule("attention.q"), "weight", Rounded(), unsafe=True)
    model(TOKENS, TOKENS).loss.backward()
    original = model.get_parameter("layers.0.attention.q.parametrizations.weight.original")
    assert original.grad.dtype == original.dtype == torch.float32
