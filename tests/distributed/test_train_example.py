"""examples/train.py on the ranks of a job: its figures are those of the unsharded model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import train
from support.plans import moe_plan
from support.ranks.gloo_pool import GlooPool
from text import Text, even_windows

import moec
from moec.runtime.host.reference import reference

WORDS = torch.randint(32, (1200,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
TEXT = Text(WORDS, WORDS, "bytes below 32")
OPTIONS = {"balance": "[switch_loss(0.5)]"}
"""With a large balance term: an evaluation that contains it would differ."""


def evaluated(options: dict[str, Any]) -> dict[str, float]:
    with moec.launch(moe_plan(**options), device="cpu") as job:
        return train.evaluate(job, job.build(seed=1), TEXT)


def bits_by_hand() -> float:
    """Bits per byte of the unsharded model, from its logits."""
    model = reference(moe_plan(ranks=1, ep=1, **OPTIONS).spec, seed=1).eval()
    nats, seen = 0.0, 0
    with torch.no_grad():
        for tokens, labels in even_windows(TEXT.held_out, train.EVALUATED_WINDOWS, 8, 8):
            logits = model(tokens).logits.double()
            nats += float(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
            seen += labels.numel()
    return nats / seen / math.log(2)


@pytest.mark.parametrize(
    "degrees",
    [
        {"ranks": 1, "ep": 1},
        pytest.param({"ranks": 2, "tp": 2, "ep": 1}, marks=pytest.mark.slow),
        {"ranks": 4, "tp": 2, "ep": 2},
        {"ranks": 2, "tp": 2, "ep": 2, "sequence_parallel": False},
    ],
    ids=str,
)
def test_evaluation_gives_the_bits_per_byte_of_the_unsharded_model(gloo: GlooPool, degrees: dict[str, Any]) -> None:
    expected = bits_by_hand()
    for found in gloo.run(degrees["ranks"], evaluated, {**OPTIONS, **degrees}, initialize=False):
        assert found["bits_per_byte"] == pytest.approx(expected, rel=1e-6)
        assert found["bytes"] == 1152
