"""gloo processes: wrong routes, segments or padding of one rank are one error of all ranks before any collective."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.plans import moe_plan
from support.ranks.gloo_pool import GlooPool
from support.ranks.refusals import said
from torch import Tensor

import moec

OPTIONS: dict[str, Any] = {
    "ranks": 4,
    "tp": 2,
    "ep": 2,
    "depth": 2,
    "optimizer": "adamw(); replay = true",
    "model": "embedding = tokens(segments = true, padding = given)",
}
SEGMENTS = torch.tensor([[0, 0, 0, 0, 0, 4, 4, 9]]).repeat(4, 1)
ROUTES = torch.tensor([1, 7]).repeat(4, 8, 1, 1)
PADDING = torch.arange(8).repeat(4, 1) > 5
RIGHT: dict[str, Tensor] = {"segments": SEGMENTS, "routes": ROUTES, "padding": PADDING}

WRONG: dict[str, tuple[str, Any, str]] = {
    "segments that descend": ("segments", SEGMENTS.flip(1), "MOE0727 .*segments descend in sequence 0"),
    "segments of int32": ("segments", SEGMENTS.int(), "MOE0727 .*segments are torch.int32"),
    "short segments": ("segments", SEGMENTS[:, 1:], r"MOE0727 .*segments have shape \[4, 7\]"),
    "segments of fewer sequences": ("segments", SEGMENTS[1:], r"MOE0727 .*segments have shape \[3, 8\]"),
    "a list of segments": ("segments", SEGMENTS.tolist(), "MOE0727 .*segments are of class list"),
    "segments elsewhere": ("segments", SEGMENTS.to("meta"), "MOE0727 .*segments are on meta"),
    "no segments": ("segments", None, "MOE0702 rank 0 has segments and rank 3 none: give"),
    "other segments in a tp group": ("segments", SEGMENTS + 1, "MOE0702 ranks 2 and 3 have the same"),
    "routes of int32": ("routes", ROUTES.int(), "MOE0726 .*routes are torch.int32"),
    "routes of floats": ("routes", ROUTES.float(), "MOE0726 .*routes are torch.float32"),
    "routes of one choice": ("routes", ROUTES[..., :1], r"MOE0726 .*routes have shape \[4, 8, 1, 1\]"),
    "routes without mixtures": ("routes", ROUTES[:, :, 0], r"MOE0726 .*routes have shape \[4, 8, 2\]"),
    "routes of fewer sequences": ("routes", ROUTES[1:], r"MOE0726 .*routes have shape \[3, 8, 1, 2\]"),
    "routes elsewhere": ("routes", ROUTES.to("meta"), "MOE0726 .*routes are on meta"),
    "an expert too many": ("routes", ROUTES + 1, r"MOE0726 .*mixture 0 \(layer 1\) have expert 8 in sequence 0"),
    "an expert below none": ("routes", ROUTES - 3, r"MOE0726 .*routes of mixture 0 \(layer 1\) have expert -2"),
    "an expert twice": ("routes", ROUTES.clamp_max(1), "MOE0726 .*send a token to one expert twice"),
    "no routes": ("routes", None, "MOE0702 rank 0 has routes and rank 3 none: give"),
    "other routes in a tp group": ("routes", ROUTES - 1, "MOE0702 ranks 2 and 3 have the same"),
    "padding of floats": ("padding", PADDING.float(), "MOE0728 .*marks of padding are torch.float32"),
    "short padding": ("padding", PADDING[:, 1:], r"MOE0728 .*marks of padding have shape \[4, 7\]"),
    "padding elsewhere": ("padding", PADDING.to("meta"), "MOE0728 .*marks of padding are on meta"),
    "marks of 2": ("padding", PADDING.long() * 2, "MOE0728 .*padding contains 2"),
    "no padding": ("padding", None, "MOE0702 rank 0 has padding and rank 3 none: give"),
    "other padding in a tp group": ("padding", ~PADDING, "MOE0702 ranks 2 and 3 have the same"),
}
"""What the last rank gives in place of what is right."""


def mistakes() -> dict[str, dict[str, str]]:
    """The diagnostic of each mistake of the last rank, in each way to run a batch; and that of a right step at last."""
    with moec.launch(moe_plan(**OPTIONS), device="cpu", checks="all") as job:
        model = job.build(seed=1)
        tokens = torch.arange(32).view(4, 8) - job.data_rank
        tokens = tokens % 32
        last = job.rank == job.world_size - 1

        def accumulated(beside: dict[str, Any]) -> None:
            with job.accumulate(model, tokens, padding=[PADDING]):
                model(tokens, tokens, **beside).loss.backward()

        ways: dict[str, Callable[[dict[str, Any]], object]] = {
            "forward": lambda beside: model(tokens, tokens, **beside),
            "step": lambda beside: job.step(model, tokens, tokens, **beside),
            "micro-batches": lambda beside: job.step(model, tokens, tokens, **beside, microbatches=2),
            "accumulate": accumulated,
        }
        found: dict[str, dict[str, str]] = {}
        for name, (argument, wrong, _) in WRONG.items():
            beside = {**RIGHT, argument: wrong} if last else RIGHT
            found[name] = {way: said(lambda act=act, beside=beside: act(beside)) for way, act in ways.items()}
            model.zero_grad()
        found["right"] = {way: said(lambda act=act: act(RIGHT)) for way, act in ways.items()}
    return found


@pytest.fixture(scope="module")
def found(gloo: GlooPool) -> list[dict[str, dict[str, str]]]:
    return gloo.run(4, mistakes)


def test_every_rank_raises_the_same_and_a_right_batch_runs_after_all(found: list[dict[str, dict[str, str]]]) -> None:
    assert all(other == found[0] for other in found)
    assert set(found[0]["right"].values()) == {"nothing"}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_of_one_rank_is_named(found: list[dict[str, dict[str, str]]], name: str) -> None:
    for way, message in found[0][name].items():
        assert re.match(WRONG[name][2], message), f"{way}: {message}"
