"""Gates that choose at random or by noise, and their balance terms: plans of random models are the unsharded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from random_specs import specs
from support.plans import moe_plan

from moec.driver import compile as compile_source
from moec.grammar.spec import Spec
from moec.runtime.verify.verification import verify

USUAL = ["[switch_loss(0.1), z_loss(0.01)]", "[]"]
WORDS: dict[str, dict[str, Any]] = {
    "gshard": {"gates": ["gshard"], "balances": USUAL, "counts": range(2, 13)},
    "noisy_topk": {"gates": ["noisy_topk({k})"], "balances": USUAL},
    "sparsemixer": {"gates": ["sparsemixer({k}, jitter = 0.3)", "sparsemixer({k}, jitter = 0.7)"], "balances": USUAL},
    "dselect_k": {
        "gates": ["dselect_k({k}, gamma = 0.05, entropy = 0.1)", "dselect_k({k})"],
        "balances": ["[]", "[switch_loss(0.1)]"],
        "counts": [2, 4, 8],
    },
    "gshard_loss": {"gates": ["topk({k})", "gshard"], "balances": ["[gshard_loss(0.1)]"], "counts": range(2, 13)},
    "importance_loss": {
        "gates": ["topk({k})", "gshard", "noisy_topk({k})"],
        "balances": ["[importance_loss(0.1)]", "[importance_loss(0.2), switch_loss(0.1)]"],
        "counts": range(2, 13),
    },
    "load_loss": {
        "gates": ["noisy_topk({k})"],
        "balances": ["[load_loss(0.1)]", "[load_loss(0.1), importance_loss(0.1)]"],
        "counts": range(5, 13),
    },
}
"""What `specs` draws from, for each word."""

FEW, MANY = 3, 25
every_word = pytest.mark.parametrize("word", WORDS)


def proven(examples: int, words: dict[str, Any], max_ranks: int, **options: Any) -> Callable[[], None]:
    """A test that verifies plans of so many random models, in float64 and in the model's dtype."""

    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow], **options)
    @given(specs(max_ranks=max_ranks, max_layers=3, **words))
    def test(spec: Spec) -> None:
        report = verify(compile_source(spec))
        assert report.ok, report

    return test


@every_word
def test_every_plan_equals_the_unsharded_model(word: str) -> None:
    proven(FEW, WORDS[word], 4, derandomize=True)()


@every_word
def test_tensor_and_expert_parallelism_together_change_nothing(word: str) -> None:
    drawn = {"gate": WORDS[word]["gates"][0].replace("{k}", "2"), "balance": WORDS[word]["balances"][0]}
    report = verify(moe_plan(ranks=4, tp=2, ep=2, beside="group = batch", depth=2, **drawn), float32=False)
    assert report.ok, report


@pytest.mark.parametrize("word", ["sparsemixer", "dselect_k", "load_loss"])
def test_a_wide_plan_is_verified_at_toy_widths(word: str) -> None:
    drawn = {"gate": WORDS[word]["gates"][0].replace("{k}", "2"), "balance": WORDS[word]["balances"][0]}
    report = verify(moe_plan(ep=2, experts=16, dim=64, expert="swiglu(64)", depth=2, **drawn), scale=True)
    assert report.ok, report
    assert any(width.name == "hidden" for width in report.widths)


@pytest.mark.slow
@every_word
def test_every_plan_equals_the_unsharded_model_at_length(word: str) -> None:
    proven(MANY, WORDS[word], 16)()
