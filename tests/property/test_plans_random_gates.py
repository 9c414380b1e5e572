"""Gates that choose at random or by noise, and their balance terms: plans of random models are the unsharded model."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from random_specs import specs
from support.examples import examples
from support.plans import moe_plan
from support.verified import require_equal

from moec.grammar.spec import Spec

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
        "balances": [
            "[importance_loss(0.1)]",
            "[importance_loss(0.1, of = all)]",
            "[importance_loss(0.2), switch_loss(0.1)]",
        ],
        "counts": range(2, 13),
    },
    "load_loss": {
        "gates": ["noisy_topk({k})"],
        "balances": ["[load_loss(0.1)]", "[load_loss(0.1), importance_loss(0.1)]"],
        "counts": range(5, 13),
    },
}
"""What `specs` draws from, for each word."""


@examples(5, 175)
@given(st.sampled_from(sorted(WORDS)).flatmap(lambda word: specs(max_ranks=16, max_layers=3, **WORDS[word])))
def test_every_plan_equals_the_unsharded_model(spec: Spec) -> None:
    require_equal(spec)


def moe_of(word: str) -> dict[str, str]:
    """Its first gate and balance."""
    return {"gate": WORDS[word]["gates"][0].replace("{k}", "2"), "balance": WORDS[word]["balances"][0]}


def test_tensor_and_expert_parallelism_together_change_nothing() -> None:
    """A layer of each word in one plan."""
    layers = ["moe {{ gate = {gate}; balance = {balance} }}".format(**moe_of(word)) for word in WORDS]
    require_equal(moe_plan(ranks=4, tp=2, ep=2, beside="group = batch", layers=layers))


def test_a_wide_plan_is_verified_at_toy_widths() -> None:
    words = ("sparsemixer", "dselect_k", "load_loss")
    layers = ["moe {{ gate = {gate}; balance = {balance} }}".format(**moe_of(word)) for word in words]
    report = require_equal(moe_plan(ep=2, experts=16, dim=64, expert="swiglu(64)", layers=layers), scale=True)
    assert any(width.name == "hidden" for width in report.widths)
