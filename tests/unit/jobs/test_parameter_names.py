"""What stands in a parameter's place is used, or refused by name; hooks that would never run are warned of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import moe_plan
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, weight_norm

import moec
from moec.runtime.errors import JobError
from moec.runtime.job.module import PlanModule

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
