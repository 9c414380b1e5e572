"""Optimizers that step inside of backward, by a hook of each parameter, on gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.plans import moe_plan
from support.ranks import contract
from support.ranks.gloo_pool import GlooPool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import moec

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd foreach": (torch.optim.SGD, {"lr": 0.1, "foreach": True}),
    "adamw fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
}


def step_in_backward(parameter: nn.Parameter, optimizer: str) -> None:
    """Gives the parameter an optimizer of its own, which steps as soon as its gradient is there."""
    kind, options = OPTIMIZERS[optimizer]
    own = kind([parameter], **options)

    def step(_: Tensor) -> None:
        own.step()
        own.zero_grad()

    parameter.register_post_accumulate_grad_hook(step)


def trained(options: dict[str, Any], optimizer: str) -> dict[str, Tensor]:
    """Whole weights after two steps of two micro-batches, each of which updates the weights."""
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model = job.build(seed=1)
        for parameter in model.parameters():
            step_in_backward(parameter, optimizer)
        tokens, labels = contract.mine(job, *contract.batch())
        for _ in range(2):
            job.step(model, tokens, labels, microbatches=2)
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for name, p in model.named_parameters()
        }


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("recompute", ["none", pytest.param("layer", marks=pytest.mark.slow)])
def test_later_micro_batches_use_the_weights_of_steps_in_backward(gloo: GlooPool, optimizer: str, recompute: str):
    options = {"ranks": 2, "ep": 2, "recompute": recompute}
    expected = gloo.run(2, trained, {**options, "zero": 0}, optimizer)[0]
    for zero in (1, 2):
        found = gloo.run(2, trained, {**options, "zero": zero}, optimizer)[0]
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-5)
