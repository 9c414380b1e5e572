"""The warnings of labels on padding."""

from __future__ import annotations

import warnings

import torch
from support.plans import moe_plan

import moec

TOKENS = torch.arange(16).view(2, 8) % 7 + 1
MASK = (torch.arange(8) < 6).long().expand(2, 8)
"""As other libraries have it: 1 for real tokens."""


def test_labels_on_padding_and_an_inverted_mask_are_told_of_once_at_the_scripts_line() -> None:
    labels, ignored = TOKENS.roll(1), TOKENS.roll(1).masked_fill(MASK == 0, -100)
    given = moe_plan(ranks=1, ep=1, model="embedding = tokens(padding = given)")
    by_id = moe_plan(ranks=1, ep=1, model="embedding = tokens(padding = 0)")
    padded = TOKENS * MASK
    for plan, tokens, labels_, more, words in (
        (
            given,
            TOKENS,
            labels,
            {"padding": 1 - MASK},
            "4 of the 16 valid labels of job.step are on padding",
        ),
        (given, TOKENS, ignored, {"padding": MASK}, "padding covers 12 of the 12 valid labels"),
        (by_id, padded, labels, {}, "4 of the 16 valid labels"),
        (given, TOKENS, ignored, {"padding": 1 - MASK}, ""),
        (given, TOKENS, labels, {}, ""),
        (by_id, padded, ignored, {}, ""),
    ):
        with moec.launch(plan, device="cpu") as job, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model = job.build()
            job.step(model, tokens, labels_, **more)
            model.zero_grad()
            job.step(model, tokens, labels_, **more)
        assert [warning.filename for warning in said] == [__file__] * bool(words)
        assert all(words in str(warning.message) for warning in said)
