"""Steps with a closure that clips, and steps of `GradScaler` after clipping in the step, on gloo ranks."""

from __future__ import annotations

from typing import Any

import torch
from support.plans import moe_plan
from support.ranks import contract
from support.ranks.gloo_pool import GlooPool
from torch import Tensor
from torch.distributed.tensor import DTensor

import moec


def trained(options: dict[str, Any], inside: bool) -> dict[str, Tensor]:
    """Whole weights after a step with a closure, one after it, and one with `GradScaler`; all but the last clip."""
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model = job.build(seed=1)
        optimizer, scaler = job.optimizer(model), torch.amp.GradScaler("cpu", init_scale=4.0)
        tokens, labels = contract.mine(job, *contract.batch())

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = job.step(model, tokens, labels)
            job.clip_grad_norm_(model, 0.1, **({"optimizer": optimizer} if inside else {}))
            return loss

        optimizer.step(closure)
        closure()
        optimizer.step()
        optimizer.zero_grad()
        with job.accumulate(model, labels):
            scaler.scale(model(tokens, labels).loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for name, p in model.named_parameters()
        }


def test_clipping_in_a_closure_and_then_gradscaler_step_as_with_gradients_scaled_before(gloo: GlooPool) -> None:
    options = {"ranks": 2, "ep": 2, "zero": 3, "optimizer": "adamw(lr = 1e-2)"}
    expected, found = (gloo.run(2, trained, options, inside)[0] for inside in (False, True))
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-5)
