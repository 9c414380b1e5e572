"""Random models with options of gates: every plan equals the unsharded model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_specs import specs
from support.plans import moe_plan

from moec.driver import compile as compile_source
from moec.grammar.spec import Experts, Layer, Spec, TopK
from moec.runtime.verify.verification import verify

V3 = "score = sigmoid, normalize = true, scale = 2.5, bias = online(0.01)"
BALANCES = {"sequence_loss": ["[sequence_loss(0.3)]", "[sequence_loss(0.1), switch_loss(0.1)]"]}
BALANCES["device_loss"] = ["[device_loss(0.3, groups = 1)]", "[device_loss(0.1, groups = 1), z_loss(0.01)]"]
EVERY_TERM = ["[]", "[switch_loss(0.1)]", "[switch_loss(0.1), z_loss(0.01)]"]

WORDS: dict[str, Sequence[str]] = {
    "scale": ["topk({k}, scale = 2.5)", "topk({k}, score = sigmoid, normalize = true, scale = 0.3)"],
    "groups": ["topk({k}, groups = 4, keep_groups = 2)", "topk({k}, groups = 4, keep_groups = 3, group_score = max)"],
    "learned bias": ["topk({k}, order = after, bias = learned)", "topk({k}, score = sigmoid, bias = learned)"],
    "noise": ["topk({k}, noise = 0.5)", "topk({k}, score = sigmoid, noise = 2, jitter = 0.2, scale = 2)"],
    "dense": ["dense"],
    "attention router": ["attention_router({k})"],
    "sequence_loss": ["topk({k})", f"topk({{k}}, {V3})", "topk({k}, score = sigmoid, noise = 0.3)", "switch"],
    "device_loss": ["topk({k})", "topk({k}, score = sigmoid)"],
}
"""Gates by the word that they show."""
UNGROUPED = ["topk({k})", "topk({k}, score = sigmoid, group_score = max)"]
"""Gates that get groups afterwards, which must divide the experts that were drawn for their layer."""


@st.composite
def drawn(draw: st.DrawFn, word: str) -> Spec:
    gates = UNGROUPED if word == "groups" else WORDS[word]
    spec = draw(specs(max_ranks=8, max_layers=3, gates=gates, balances=BALANCES.get(word, EVERY_TERM)))
    if word not in ("groups", "device_loss"):
        return spec
    change = with_groups if word == "groups" else with_devices
    layers = tuple(change(draw, layer) for layer in spec.model.layers)
    return spec.replace(model=spec.model.replace(layers=layers))


def with_groups(draw: st.DrawFn, layer: Layer) -> Layer:
    """Groups that divide the layer's experts, of which some are kept."""
    if layer.moe is None:
        return layer
    gate, experts = layer.moe.gate, layer.moe.experts
    assert isinstance(gate, TopK)
    assert isinstance(experts, Experts)
    groups = draw(st.sampled_from([d for d in range(1, experts.count + 1) if experts.count % d == 0]))
    least = -(-gate.k // (experts.count // groups))
    changed = gate.replace(groups=groups, keep_groups=draw(st.integers(least, groups)))
    return layer.replace(moe=layer.moe.replace(gate=changed))


def with_devices(draw: st.DrawFn, layer: Layer) -> Layer:
    """Groups of a device loss that divide the layer's experts."""
    if layer.moe is None:
        return layer
    first, *rest = layer.moe.balance
    count = layer.moe.num_experts
    groups = draw(st.sampled_from([d for d in range(1, count + 1) if count % d == 0]))
    return layer.replace(moe=layer.moe.replace(balance=(first.replace(groups=groups), *rest)))


def examples(number: int) -> settings:
    return settings(
        max_examples=number, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
    )


def require_verified(word: str, number: int) -> None:
    @examples(number)
    @given(drawn(word))
    def check(spec: Spec) -> None:
        report = verify(compile_source(spec), float32=False)
        assert report.ok, report

    check()


@pytest.mark.parametrize("word", WORDS)
def test_plans_with_options_of_gates_equal_the_unsharded_model(word: str) -> None:
    require_verified(word, 3)


@pytest.mark.slow
@pytest.mark.parametrize("word", WORDS)
def test_many_plans_with_options_of_gates_equal_the_unsharded_model(word: str) -> None:
    require_verified(word, 25)


DEGREES: list[dict[str, Any]] = [
    {"ep": 4, "zero": 1},
    {"ep": 2, "tp": 2, "model": "embedding = tokens(padding = 3)"},
    {"ep": 2, "tp": 4, "ranks": 8, "sequence_parallel": False, "recompute": "layer"},
    {"ep": 4, "tp": 2, "dtype": "bf16", "microbatches": 2, "zero": 3, "recompute": "experts"},
]


def balance(word: str) -> dict[str, str]:
    """The balance terms of a word that is one."""
    return {"balance": BALANCES[word][0].replace("groups = 1", "groups = 4")} if word in BALANCES else {}


@pytest.mark.parametrize("word", WORDS)
def test_plans_with_tp_and_ep_equal_the_unsharded_model(word: str) -> None:
    for gate, degrees in zip(itertools.cycle(WORDS[word]), DEGREES[1:3], strict=False):
        report = verify(moe_plan(gate=gate.replace("{k}", "2"), **balance(word), **degrees), float32=False)
        assert report.ok, (gate, degrees, report)


@pytest.mark.slow
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_plans_equal_the_unsharded_model_in_their_own_dtype_too(word: str, degrees: dict[str, Any]) -> None:
    for gate in WORDS[word]:
        report = verify(moe_plan(gate=gate.replace("{k}", "2"), **balance(word), **degrees))
        assert report.ok, (gate, report)
