"""Replayed routes under a capacity: which choices a step drops, what −1 changes, and what the language warns of."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.plans import moe_spec, moe_text
from torch import Tensor

from moec.grammar import load_text
from moec.runtime.host.reference import reference

REPLAY = "adamw(lr = 1e-3); replay = true"
EXPERTS, K = 4, 2
TOKENS = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(5))
PLACES = math.ceil(0.5 * K * TOKENS.shape[1] / EXPERTS)


def model(seed: int, capacity: str, *, gate: str = f"topk({K})", overflow: str = "drop") -> Any:
    beside = f"capacity = {capacity}; overflow = {overflow}"
    spec = moe_spec(ranks=1, ep=1, experts=EXPERTS, optimizer=REPLAY, gate=gate, balance="[]", beside=beside)
    found = reference(spec, seed=seed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in found.parameters():  # larger than initial ones: experts then differ
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return found


def without_dropped(routes: Tensor) -> Tensor:
    """Routes `[batch, sequence, mixtures, k]` with −1 for each choice that finds its expert full.

    All first choices of a sequence queue before all second ones, each in the order of tokens (GShard, arXiv 2006.16668,
    algorithm 1).
    """
    kept = routes.clone()
    for sequence in kept:
        for mixture in range(kept.shape[2]):
            taken = [0] * EXPERTS
            for choice in range(K):
                for token in range(len(sequence)):
                    expert = int(sequence[token, mixture, choice])
                    taken[expert] += 1
                    if taken[expert] > PLACES:
                        sequence[token, mixture, choice] = -1
    return kept


def of_rollout() -> Tensor:
    routes: Tensor = model(1, "factor(0.5)").eval()(TOKENS).routes
    assert (without_dropped(routes) == -1).any()
    return routes


def test_other_weights_drop_the_choices_that_the_rollout_dropped() -> None:
    """Without `normalize` a choice of −1 leaves the other weights as they are, and is so the same as a dropped one."""
    routes = of_rollout()
    step = model(2, "factor(0.5)")(TOKENS, routes=routes).logits
    known = model(2, "factor(8)")(TOKENS, routes=without_dropped(routes)).logits
    torch.testing.assert_close(step, known, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(step, model(2, "factor(8)")(TOKENS, routes=routes).logits)


def test_a_dropped_choice_keeps_its_part_in_normalize_and_none_has_no_part() -> None:
    routes, gate = of_rollout(), f"topk({K}, normalize = true)"
    step = model(2, "factor(0.5)", gate=gate)(TOKENS, routes=routes).logits
    of_none = model(2, "factor(8)", gate=gate)(TOKENS, routes=without_dropped(routes)).logits
    assert (step - of_none).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("capacity", "overflow", "same"),
    [
        ("factor(0.5)", "drop", True),
        ("factor(0.5, order = priority)", "drop", False),
        ("factor(0.5, order = token)", "drop", True),
        ("factor(1)", "reroute", False),
    ],
)
def test_another_router_decides_again_by_priority_and_by_reroutes(capacity: str, overflow: str, same: bool) -> None:
    """The normalized weight of one choice is 1, so that a router acts on given choices through the capacity alone."""
    step = model(1, capacity, gate="topk(1, normalize = true)", overflow=overflow).eval()
    rollout = step(TOKENS)
    with torch.no_grad():
        for name, parameter in step.named_parameters():
            if "gate" in name:
                parameter.neg_()
    given = step(TOKENS, routes=rollout.routes)
    assert torch.equal(given.routes, rollout.routes)
    assert torch.allclose(given.logits, rollout.logits, rtol=1e-10, atol=1e-10) == same


@pytest.mark.parametrize(
    ("beside", "warned"),
    [
        ("capacity = factor(1.0); overflow = reroute", ["reroute"]),
        ("capacity = factor(1.0, order = priority)", ["priority"]),
        ("capacity = dynamic(max = 1.0, order = random)", ["random"]),
        ("capacity = factor(1.0, order = weight)", ["weight"]),
        ("capacity = factor(1.0, order = token)", []),
        ("capacity = factor(1.0, eval = 2.0)", ["2.0"]),
        ("capacity = factor(1.0, eval = 1.0)", []),
        ("capacity = factor(1.0); overflow = pad", []),
        ("capacity = dynamic(max = 1.0)", []),
        ("", []),
    ],
)
def test_a_capacity_that_drops_other_choices_of_a_step_is_warned_of(beside: str, warned: list[str]) -> None:
    for optimizer, expected in ((REPLAY, warned), ("adamw(lr = 1e-3)", [])):
        text = moe_text(optimizer=optimizer, beside=beside)
        loaded = load_text(text, name="a.moe")
        found = [d for d in loaded.diagnostics if d.code == "MOE0373"]
        assert [text[d.span.start : d.span.end] for d in found if d.span] == expected
        assert all(d.severity == "warning" for d in found)
