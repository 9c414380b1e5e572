"""`torch.amp.GradScaler` with the optimizers of a file, also after clipping in the step."""

import math

import pytest
import torch
from support.one_rank_jobs import OPTIMIZERS, TOKENS, ending, job_and_model
from support.plans import moe_plan
from torch import Tensor, nn
from torch.optim import Optimizer

import moec
from moec.runtime.job.job import Job

IN_BF16 = {f"{name}, bf16": f"{OPTIMIZERS[name]}; state = bf16" for name in ("adamw", "sgd", "muon", "lion")}
ALL = {**OPTIMIZERS, **IN_BF16}


def backward(job: Job, model: nn.Module, scaler: torch.amp.GradScaler | None) -> None:
    with job.accumulate(model, TOKENS):
        loss = model(TOKENS, TOKENS).loss
        (loss if scaler is None else scaler.scale(loss)).backward()


def values(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    states = (v for p in model.parameters() for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor))
    return [tensor.detach().clone() for tensor in (*model.parameters(), *states)]


@pytest.mark.parametrize("optimizer", ALL)
def test_scaled_losses_give_the_steps_of_unscaled_ones(optimizer: str):
    job, plain = job_and_model(ALL[optimizer])
    with ending(job):
        scaled = job.build(seed=1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        updates = {model: job.optimizer(model) for model in (plain, scaled)}
        for _ in range(2):
            backward(job, plain, None)
            updates[plain].step()
            backward(job, scaled, scaler)
            scaler.step(updates[scaled])
            scaler.update()
            for update in updates.values():
                update.zero_grad()
    for one, other in zip(values(scaled, updates[scaled]), values(plain, updates[plain]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ALL)
def test_a_scaled_gradient_that_is_infinite_changes_nothing(optimizer: str):
    plan = moe_plan(ranks=1, ep=1, optimizer=ALL[optimizer])
    with moec.launch(plan, device="cpu", on_nonfinite="ignore") as job:
        model = job.build(seed=1)
        update, scaler = job.optimizer(model), torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(2):
            backward(job, model, scaler)
            if step == 1:
                before = values(model, update)
                next(iter(model.parameters())).grad.mul_(math.inf)
            scaler.step(update)
            scaler.update()
            update.zero_grad()
        assert all(map(torch.equal, values(model, update), before))
        assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("optimizer", ["adamw", "adamw, bf16", "muon"])
def test_a_scaler_steps_before_and_after_clipping_in_the_step(optimizer: str):
    job, clipped = job_and_model(ALL[optimizer])
    with ending(job):
        models = {"before": clipped, "inside": job.build(seed=1)}
        updates = {name: job.optimizer(model) for name, model in models.items()}
        for name, model in models.items():
            given = {"optimizer": updates[name]} if name == "inside" else {}
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            job.step(model, TOKENS, TOKENS)
            job.clip_grad_norm_(model, 0.1, **given)
            updates[name].step()
            for clips in (False, True):
                updates[name].zero_grad()
                backward(job, model, scaler)
                if clips:
                    scaler.unscale_(updates[name])
                    job.clip_grad_norm_(model, 0.1, **given)
                scaler.step(updates[name])
                scaler.update()
    tolerance = 1e-4 if "bf16" in optimizer else 1e-6  # a state may round to the other side
    for one, other in zip(models["inside"].parameters(), models["before"].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=tolerance)


def test_a_scale_does_not_outlive_a_step_that_was_refused():
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        found = []
        for is_scaled in (False, True):
            model = job.build(seed=1)
            update, scaler = job.optimizer(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
            if is_scaled:
                backward(job, model, scaler)
                next(iter(model.parameters())).grad.mul_(math.inf)
                with pytest.raises(moec.JobError, match="MOE0723"):
                    scaler.step(update)
                scaler.update()
                update.zero_grad()
            backward(job, model, scaler if is_scaled else None)
            if is_scaled:
                scaler.unscale_(update)
                scaler.step(update)
            else:
                update.step()
            found.append(values(model, update))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
