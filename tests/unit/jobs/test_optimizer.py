"""The file's optimizer, over fp32 parameters with any compute dtype."""

import pytest
import torch
from support.plans import moe_plan

import moec
from moec.runtime.errors import JobError


def test_groups_and_numbers_are_those_of_the_file():
    options = "adamw(lr = 2e-3, beta1 = 0.8, beta2 = 0.9, eps = 1e-6, weight_decay = 0.3)"
    with moec.launch(moe_plan(ranks=1, ep=1, optimizer=options), device="cpu") as job:
        model = job.build()
        optimizer = job.optimizer(model)
    decayed, undecayed = optimizer.param_groups
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.3, 0.0)
    assert (decayed["lr"], decayed["betas"], decayed["eps"]) == (2e-3, (0.8, 0.9), 1e-6)
    assert {p.dim() for p in undecayed["params"]} == {1}
    assert len(decayed["params"]) + len(undecayed["params"]) == len(list(model.parameters()))


def test_updates_below_bf16_rounding_add_up_in_the_masters():
    with moec.launch(moe_plan(ranks=1, ep=1, dtype="bf16", optimizer="adamw(lr = 1e-5, weight_decay = 0)")) as job:
        model = job.build("cpu")
        optimizer = job.optimizer(model)
    weight = model.get_parameter("norm.weight")
    start = weight.detach().clone()
    for _ in range(400):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        optimizer.zero_grad()
        assert weight.grad is None
    # 400 steps of 1e-5 from 1.0, where bf16 has a spacing of 2^-8: rounded each time, all would be lost.
    assert (start - weight).mean().item() == pytest.approx(400e-5, rel=0.01)


def test_masters_are_not_missing_from_state_dict():
    """A model that loads it continues bit for bit. (OpenTau#185: it had rounded weights.)"""
    tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(0))
    with moec.launch(moe_plan(ranks=1, ep=1, dtype="bf16"), device="cpu") as job:
        model, other = job.build(seed=1), job.build(seed=2)
        optimizer = job.optimizer(model)
        for _ in range(3):
            job.step(model, tokens, tokens)
            optimizer.step()
            optimizer.zero_grad()
        state = model.state_dict()
        other.load_state_dict(state)
        job.step(model, tokens, tokens)
        job.step(other, tokens, tokens)
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    assert any(not torch.equal(tensor, tensor.bfloat16()) for tensor in state.values())
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one.grad, two.grad)


def test_gradients_of_many_micro_batches_add_up_in_fp32():
    """Each of equal micro-batches adds 1/64 of the gradient: a sum in bf16 is off by some percent at the end."""
    tokens = torch.randint(32, (1, 8), generator=torch.Generator().manual_seed(0))
    many = tokens.expand(64, 8).contiguous()
    with moec.launch(moe_plan(ranks=1, ep=1, dtype="bf16", depth=2), device="cpu") as job:
        model, other = job.build(seed=1), job.build(seed=1)
        job.step(model, tokens, tokens)
        job.step(other, many, many, microbatches=64)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert one.grad.dtype == two.grad.dtype == torch.float32
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-4, atol=1e-6 * float(one.grad.abs().max()))


def test_fp32_models_use_torchs_optimizer():
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        optimizer = job.optimizer(model := job.build())
        assert isinstance(optimizer, torch.optim.AdamW)
        tokens = torch.zeros((1, 8), dtype=torch.int64)
        job.step(model, tokens, tokens)
        optimizer.param_groups[0]["amsgrad"] = True
        with pytest.raises(JobError, match="MOE0715"):
            optimizer.step()
