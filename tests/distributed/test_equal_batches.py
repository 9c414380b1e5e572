"""The warning of a batch that every rank has, where each data-parallel group should have its part."""

from __future__ import annotations

import warnings

import pytest
import torch
from support.plans import moe_plan
from support.ranks.gloo_pool import GlooPool

import moec

TOKENS = torch.arange(32).view(4, 8)


def steps_as_rank(ep: int, tp: int, apart: bool) -> list[tuple[str, bool]]:
    """The warnings of two steps, and whether each is at a line of this file."""
    with moec.launch(moe_plan(ranks=2, ep=ep, tp=tp), device="cpu") as job:
        model = job.build(seed=1)
        tokens = TOKENS.chunk(job.data_size)[job.data_rank] if apart else TOKENS
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model.zero_grad()
                job.step(model, tokens, tokens.flip(-1))
    return [(str(warning.message), warning.filename == __file__) for warning in caught]


def test_the_same_batch_on_every_rank_warns_once(gloo: GlooPool) -> None:
    first, second = gloo.run(2, steps_as_rank, 2, 1, False)
    ((message, is_here),) = first
    assert message.startswith("every rank gives job.step the same batch, which counts 2 times: give each its part")
    assert is_here
    assert second == []


@pytest.mark.parametrize(("ep", "tp", "apart"), [(2, 1, True), (1, 2, False)], ids=["its parts", "one tp group"])
def test_a_right_batch_does_not(gloo: GlooPool, ep: int, tp: int, apart: bool) -> None:
    assert gloo.run(2, steps_as_rank, ep, tp, apart) == [[], []]
