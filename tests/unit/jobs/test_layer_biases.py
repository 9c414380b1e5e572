"""`bias = online(…)` in a layer: biases move when the host says that a step ended, and forgetting that is an error."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from support.plans import layer_plan, layer_text
from support.verified import require_equal
from support.wrong_plans import change_op
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.checkpoint import checkpoint

import moec
from moec.runtime.verify.verification import verify

RATE = 0.01
GATE = f"topk(2, score = sigmoid, normalize = true, bias = online({RATE}))"
TEXT = layer_text(ranks=None, gate=GATE)


def x_of(seed: int = 1) -> Tensor:
    return torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(seed))


def bias(layer: moec.MoeLayer) -> Tensor:
    return layer.get_buffer("gate.bias").clone()


def moved(before: Tensor, loads: Tensor) -> Tensor:
    """Wang et al. 2024, arXiv 2408.15664, algorithm 1."""
    wide = loads.double()
    return before + RATE * (wide.mean() - wide).sign().float()


def test_plans_equal_the_unsharded_layer_and_another_rate_is_found() -> None:
    plan = layer_plan(gate=GATE, ep=2)
    require_equal(plan)
    assert not verify(change_op(plan, "update[0]", "moved", rate=2 * RATE), float32=False).ok


def test_a_step_moves_them_by_the_rows_of_all_its_passes_in_training() -> None:
    layer = moec.layer(TEXT)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(3):
        before, loads = bias(layer), torch.zeros(8, dtype=torch.int64)
        for part in range(2):
            x = x_of(2 * step + part).requires_grad_()
            checkpoint(layer, x, use_reentrant=False).square().sum().backward()
            loads += layer.expert_counts
            layer.eval()(x_of(9))
            layer.train()
        optimizer.step()
        assert torch.equal(bias(layer), before)
        moec.end_step(layer)
        assert torch.equal(bias(layer), moved(before, loads))
        assert not torch.equal(bias(layer), before)


def test_they_choose_and_do_not_weigh() -> None:
    layer = moec.layer(TEXT)
    with torch.no_grad():
        layer.get_buffer("gate.bias").copy_(torch.tensor([9.0, 9.0, 0, 0, 0, 0, 0, 0]))
    layer(x_of())
    assert layer.expert_counts.tolist() == [21, 21, 0, 0, 0, 0, 0, 0]


def step_before(layer: moec.MoeLayer, optimizer: torch.optim.Optimizer) -> None:
    moec.end_step(layer)
    optimizer.step()


def step_after(layer: moec.MoeLayer, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    moec.end_step(layer)


def evaluate(layer: moec.MoeLayer, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    layer.eval()(x_of())
    moec.end_step(layer.train())


def load(layer: moec.MoeLayer, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    layer.load_state_dict(layer.state_dict())


def step_another(layer: moec.MoeLayer, optimizer: torch.optim.Optimizer) -> None:
    """Of a discriminator, say."""
    other = torch.nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    torch.optim.SGD([other], lr=0.1).step()


@pytest.mark.parametrize("end", [step_before, step_after, evaluate, load, step_another])
def test_a_host_that_says_so_hears_nothing(end: Callable[..., None]) -> None:
    layer = moec.layer(TEXT)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    for _ in range(2):
        layer(x_of()).sum().backward()
        end(layer, optimizer)
    layer(x_of())


def test_a_host_that_forgets_it_is_told_the_line_at_the_next_pass_in_training() -> None:
    layer = moec.layer(TEXT)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), copy.deepcopy(layer))
    for each in (layer, model):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        each(x_of()).sum().backward()
        optimizer.step()
        each.eval()(x_of())
        with pytest.raises(moec.JobError, match=r"MOE0713.*have not moved") as caught:
            each.train()(x_of())
        assert "moec.end_step(model)" in caught.value.diagnostics[0].help
        moec.end_step(each)
        each(x_of())


def test_a_step_without_a_pass_is_refused_and_a_model_without_biases_has_nothing_to_end() -> None:
    layer = moec.layer(TEXT)
    layer.eval()(x_of())
    with pytest.raises(moec.JobError, match=r"MOE0713.*no forward pass in training"):
        moec.end_step(layer)
    moec.end_step(torch.nn.Sequential(moec.layer(layer_text(ranks=None)), torch.nn.Linear(2, 2)))


def test_copies_and_saved_states_have_them_and_a_dropped_layer_leaves_no_hook() -> None:
    gc.collect()  # layers of other tests
    hooks = len(_global_optimizer_post_hooks)
    layer = moec.layer(TEXT)
    layer(x_of())
    assert len(_global_optimizer_post_hooks) == hooks + 1
    moec.end_step(layer)
    other = moec.layer(TEXT, seed=5)
    other.load_state_dict(layer.state_dict())
    for each in (copy.deepcopy(layer), other):
        assert torch.equal(bias(each), bias(layer))
        assert torch.equal(each(x_of()), layer(x_of()))
    del layer, other, each
    gc.collect()
    assert len(_global_optimizer_post_hooks) == hooks


def test_a_layer_with_biases_is_not_captured() -> None:
    with pytest.raises(moec.JobError, match=r"MOE0744.*for its biases"):
        moec.layer(TEXT).capture(x_of())


def test_narrow_or_infinite_biases_are_refused() -> None:
    layer = moec.layer(TEXT)
    layer.get_buffer("gate.bias")[3] = float("inf")
    with pytest.raises(moec.JobError, match=r"MOE0708.*gate\.bias is NaN or infinite"):
        layer(x_of())
    with pytest.raises(moec.JobError, match="MOE0710"):
        moec.layer(TEXT).to(torch.bfloat16)(x_of())
