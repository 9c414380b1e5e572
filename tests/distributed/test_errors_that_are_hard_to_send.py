"""An error that one rank cannot send as it is: other ranks raise it all the same, and the next step is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.plans import moe_plan
from support.ranks.gloo_pool import GlooPool
from torch import Tensor

import moec
from moec.runtime.errors import JobError

TOKENS = torch.arange(32).view(4, 8)


def raise_as_rank(kind: str) -> tuple[str, float]:
    """What a step with a loss that raises on rank 1 says, and the loss of the step after it."""
    names = [f"an_input_with_a_long_name_{number}" for number in range(200)] if kind == "many inputs" else []
    with moec.launch(moe_plan(ranks=2, ep=2), device="cpu") as job:
        model = job.build(seed=1)
        mine = TOKENS.chunk(2)[job.rank]

        def loss(logits: Tensor, labels: Tensor, **inputs: Any) -> Tensor:
            if job.rank == 1:
                raise ValueError("a file called \udce9" if kind == "no text" else "\N{SNOWMAN}" * 5000)
            return logits.float().sum()

        with pytest.raises(JobError) as raised:
            job.step(model, mine, mine + 0, loss=loss, inputs=dict.fromkeys(names, mine))
        model.zero_grad()
        return raised.value.diagnostics[0].message[:60], job.step(model, mine, mine.flip(-1)).item()


@pytest.mark.parametrize("kind", ["no text", "long words", "many inputs"])
def test_every_rank_raises_it_and_goes_on(gloo: GlooPool, kind: str) -> None:
    first, second = gloo.run(2, raise_as_rank, kind, timeout=60.0)
    assert first == second
    assert "ValueError" in first[0] or "loss" in first[0]
