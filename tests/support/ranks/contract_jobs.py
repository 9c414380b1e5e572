"""Jobs that test_contract.py runs on ranks: several jobs, frozen parameters, norms, averaged weights."""

from __future__ import annotations

from typing import Any

import torch
from support.plans import moe_plan
from support.ranks.contract import FOUR, batch, distance, forward_backward, mine, parts_of, plain, whole_gradients
from support.ranks.training import gradients_of

import moec
from moec.runtime.weights.masters import local_part


def two_jobs(swapped: bool) -> tuple[float, float]:
    """A student at tp 2 and a teacher at tp 1 in one process: `distance` of the gradients of each."""
    student, teacher = {**FOUR, "experts": 4}, {"ranks": 4, "ep": 4, "experts": 4, "dim": 24}
    first, second = (teacher, student) if swapped else (student, teacher)
    with moec.launch(moe_plan(**first), device="cpu") as one, moec.launch(moe_plan(**second), device="cpu") as two:
        models = one.build(seed=1), two.build(seed=1)
        losses = [plain(model, *mine(job, *batch())) for job, model in zip((one, two), models, strict=True)]
        for loss in losses:
            loss.backward()
        found = [
            distance(gradients_of(model), parts_of(whole_gradients(**options), job))
            for job, model, options in zip((one, two), models, (first, second), strict=True)
        ]
    return found[0], found[1]


def frozen(options: dict[str, Any]) -> tuple[bool, bool, float]:
    """Whether frozen parameters have no gradient and do not change; and the largest error of the other gradients."""
    with moec.launch(moe_plan(**options, optimizer="adamw(weight_decay = 0.5)"), device="cpu") as job:
        model = job.build(seed=1)
        kept = {name for name in job.plan.parameters if "layers.1." in name or "embedding" in name}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in kept)
        before = {name: local_part(model.get_parameter(name)).clone() for name in kept}
        optimizer = job.optimizer(model)
        found = forward_backward(job, model)
        wanted = parts_of(whole_gradients(**options), job)
        error = distance(found, {name: wanted[name] for name in wanted.keys() - kept})
        optimizer.step()
        alike = all(torch.equal(local_part(model.get_parameter(name)), value) for name, value in before.items())
        return found.keys().isdisjoint(kept), alike, error


def norms(options: dict[str, Any]) -> tuple[float, str]:
    """The job's gradient norm, and the result or error of torch's function."""
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model = job.build(seed=1)
        forward_backward(job, model)
        try:
            torchs = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            whole = torchs.full_tensor() if hasattr(torchs, "full_tensor") else torchs
            told = f"{float(whole):.4f}"
        except (RuntimeError, ValueError, NotImplementedError) as error:
            told = type(error).__name__
        return float(job.clip_grad_norm_(model, 1e9)), told


def averaged(options: dict[str, Any]) -> float:
    """The error of `AveragedModel` against the mean of the weights before and after a step."""
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model = job.build(seed=1)
        mean = torch.optim.swa_utils.AveragedModel(model)
        optimizer = job.optimizer(model)
        parameters = list(model.parameters())
        mean.update_parameters(model)
        before = [local_part(p).clone() for p in parameters]
        job.step(model, *mine(job, *batch()))
        optimizer.step()
        mean.update_parameters(model)
        pairs = zip(mean.module.parameters(), before, parameters, strict=True)
        worst = max(float((local_part(m) - (b + local_part(p)) / 2).abs().max()) for m, b, p in pairs)
        assert mean(mine(job, batch()[0])[0]).logits.isfinite().all()
        return worst
