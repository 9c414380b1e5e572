"""Optimizer states that are kept in bf16 between steps (`train { state = bf16 }`)."""

import copy
import math

import pytest
import torch
from support.one_rank_jobs import OPTIMIZERS, TOKENS, ending, job_and_model
from support.plans import moe_plan
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from moec.passes.cost.memory import memory_of
from moec.passes.cost.optimizer_work import widened_bytes
from moec.passes.cost.optimizers import UPDATE_CHUNK, state_bytes
from moec.runtime.errors import JobError
from moec.runtime.weights import masters

NARROW = ("adamw", "sgd", "muon", "lion")


def narrow_job(optimizer: str, state: str = "bf16"):
    return job_and_model(f"{OPTIMIZERS[optimizer]}; state = {state}")


def train(job, model, update, steps: int) -> None:
    for _ in range(steps):
        job.step(model, TOKENS, TOKENS)
        update.step()
        update.zero_grad()


def adamw_by_hand(weights: Tensor, gradients: list[Tensor], decay: float, narrow: bool) -> Tensor:
    """Loshchilov & Hutter 2019, algorithm 2, in float64; `narrow` rounds moments to bf16 between steps."""
    value, first, second = weights.double(), torch.zeros_like(weights).double(), torch.zeros_like(weights).double()
    for t, gradient in enumerate(gradients, 1):
        g = gradient.double()
        first, second = 0.9 * first + 0.1 * g, 0.95 * second + 0.05 * g**2
        direction = first / (1 - 0.9**t) / ((second / (1 - 0.95**t)).sqrt() + 1e-8)
        value = value - 1e-2 * (decay * value + direction)
        if narrow:
            first, second = first.bfloat16().double(), second.bfloat16().double()
    return value


@pytest.mark.parametrize("chunk", [UPDATE_CHUNK, 1000])
def test_adamw_rounds_its_moments_between_steps_and_nothing_else(monkeypatch, chunk: int):
    monkeypatch.setattr(masters, "UPDATE_CHUNK", chunk)
    job, model = narrow_job("adamw")
    update = job.optimizer(model)
    decays = {p: group["weight_decay"] for group in update.param_groups for p in group["params"]}
    before = {p: p.detach().clone() for p in model.parameters()}
    random = torch.Generator().manual_seed(2)
    gradients = {p: [torch.randn(p.shape, generator=random) for _ in range(4)] for p in model.parameters()}
    for step in range(4):
        for parameter, of_steps in gradients.items():
            parameter.grad = of_steps[step].clone()
        update.step()
    for parameter, value in before.items():
        given = value, gradients[parameter], decays[parameter]
        narrow, wide = (parameter.detach() - adamw_by_hand(*given, narrow=of) for of in (True, False))
        # A moment between two numbers of bf16 may be rounded otherwise in float64: one in thousands.
        assert narrow.abs().mean() < 3e-7 < 3e-6 < wide.abs().mean()
        assert {update.state[parameter][key].dtype for key in ("exp_avg", "exp_avg_sq")} == {torch.bfloat16}


@pytest.mark.parametrize("optimizer", NARROW)
def test_a_narrow_run_is_near_the_wide_one_and_its_states_take_half(optimizer: str):
    losses, sizes = {}, {}
    for state in ("bf16", "fp32"):
        job, model = narrow_job(optimizer, state)
        with ending(job):
            update = job.optimizer(model)
            train(job, model, update, 8)
            losses[state] = job.step(model, TOKENS, TOKENS).item()
        tensors = [v for s in update.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim()]
        sizes[state] = sum(tensor.nbytes for tensor in tensors)
        spec, datas = job.plan.spec.update, job.plan.parameters
        assert sizes[state] == sum(
            state_bytes(p.shape, spec, datas[name].matrices) for name, p in model.named_parameters()
        )
    assert sizes["fp32"] == 2 * sizes["bf16"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] < 0.9 * math.log(32)


@pytest.mark.parametrize("optimizer", NARROW)
@pytest.mark.parametrize("helpers", [False, True], ids=["load_state_dict", "set_state_dict"])
def test_states_that_torch_widens_on_loading_continue_bit_for_bit(optimizer: str, helpers: bool):
    job, model = narrow_job(optimizer)
    with ending(job):
        update = job.optimizer(model)
        train(job, model, update, 2)
        weights = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        model_state = model.state_dict()
        saved = get_state_dict(model, update)[1] if helpers else update.state_dict()
        copied = {p: {k: v.clone() for k, v in s.items() if isinstance(v, Tensor)} for p, s in update.state.items()}
        other = job.optimizer(model)
        if helpers:
            set_state_dict(model, other, model_state_dict=model_state, optim_state_dict=saved)
        else:
            other.load_state_dict(saved)
        train(job, model, other, 2)
        expected = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        for parameter, state in copied.items():
            update.state[parameter].update(state)
        train(job, model, update, 2)
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter, wanted)
    kept = [v for s in other.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim()]
    assert {value.dtype for value in kept} == {torch.bfloat16}


def test_clipping_inside_of_a_narrow_step_is_clipping_before_it():
    after = []
    for inside in (True, False):
        job, model = narrow_job("adamw")
        with ending(job):
            update = job.optimizer(model)
            for _ in range(2):
                job.step(model, TOKENS, TOKENS)
                assert job.clip_grad_norm_(model, 0.1, **({"optimizer": update} if inside else {})) > 0.1
                update.step()
                update.zero_grad()
        after.append([parameter.detach().clone() for parameter in model.parameters()])
    for inner, outer in zip(*after, strict=True):
        torch.testing.assert_close(inner, outer, rtol=1e-5, atol=1e-6)


def test_the_budget_counts_half_the_states_and_the_chunk_that_a_step_widens():
    plans = {s: moe_plan(ranks=1, ep=1, optimizer=f"adamw(lr = 1e-2); state = {s}") for s in ("bf16", "fp32")}
    peaks = {s: memory_of(plan.program, plan.spec) for s, plan in plans.items()}
    steps = {s: next(m for m in memory.moments if m.event == "optimizer step") for s, memory in peaks.items()}
    before = {s: memory.moments[0].bytes.of["optimizer"] for s, memory in peaks.items()}
    assert before["fp32"] == 2 * before["bf16"]
    # This model is one chunk: all states are widened at once.
    assert steps["bf16"].bytes.of["work"] - steps["fp32"].bytes.of.get("work", 0.0) == 2 * before["bf16"]
    update = plans["bf16"].spec.update
    assert widened_bytes(1e12, 1e6, update) == 2 * 4 * UPDATE_CHUNK
    assert widened_bytes(1e12, 1e10, update) == 2e10
    assert widened_bytes(1e12, 1e10, plans["fp32"].spec.update) == 0


@pytest.mark.parametrize("optimizer", NARROW)
@pytest.mark.parametrize("saved", ["bf16", "fp32"])
def test_a_checkpoint_of_states_in_another_dtype_is_refused_and_nothing_loaded(tmp_path, optimizer: str, saved: str):
    job, model = narrow_job(optimizer, saved)
    with ending(job):
        update = job.optimizer(model)
        train(job, model, update, 1)
        job.save(tmp_path / "1", model, update).wait()
    job, model = narrow_job(optimizer, {"bf16": "fp32", "fp32": "bf16"}[saved])
    with ending(job):
        update = job.optimizer(model)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(JobError, match=r"MOE0806.*(bf16|BF16).*"):
            job.load(tmp_path / "1", model, update)
        assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
        assert not update.state


def test_copied_optimizers_update_copied_models():
    for optimizer in NARROW:
        job, model = narrow_job(optimizer)
        with ending(job):
            update = job.optimizer(model)
            train(job, model, update, 1)
            other, other_update = copy.deepcopy((model, update))
            train(job, model, update, 2)
            train(job, other, other_update, 2)
        for parameter, copied in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(parameter, copied)


def test_a_default_dtype_changes_no_state_and_no_loss():
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        job, model = narrow_job("muon")
        with ending(job):
            update = job.optimizer(model)
            torch.set_default_dtype(dtype)
            try:
                found.append(job.step(model, TOKENS, TOKENS))
                job.clip_grad_norm_(model, 0.5, optimizer=update)
                update.step()
            finally:
                torch.set_default_dtype(torch.float32)
        assert {s["step"].dtype for s in update.state.values() if "step" in s} == {torch.float32}
    assert found[0].dtype == found[1].dtype
    assert torch.equal(*found)


@pytest.mark.parametrize("optimizer", NARROW)
def test_a_closure_gives_the_step_its_gradients(optimizer: str):
    weights = []
    for in_closure in (True, False):
        job, model = narrow_job(optimizer)
        with ending(job):
            update = job.optimizer(model)

            def gradients(job=job, model=model) -> Tensor:
                return job.step(model, TOKENS, TOKENS)

            loss = gradients() if not in_closure else None
            returned = update.step(gradients if in_closure else None)
        assert (returned is None) == (loss is not None)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_maximize_of_a_group_is_followed():
    job, model = narrow_job("adamw")
    update = job.optimizer(model)
    parameter = model.get_parameter("norm.weight")
    before = parameter.detach().clone()
    for group in update.param_groups:
        group["maximize"] = True
    parameter.grad = torch.ones_like(parameter)
    update.step()
    assert (parameter.detach() > before).all()
