"""Random models with options of gates: every plan equals the unsharded model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_specs import specs
from support.combinations import some
from support.examples import examples
from support.plans import moe_plan
from support.verified import require_equal

from moec.grammar.spec import Experts, Layer, Spec, TopK

V3 = "score = sigmoid, normalize = true, scale = 2.5, bias = online(0.01)"
BALANCES = {"sequence_loss": ["[sequence_loss(0.3)]", "[sequence_loss(0.1), switch_loss(0.1)]"]}
BALANCES["device_loss"] = ["[device_loss(0.3, groups = 1)]", "[device_loss(0.1, groups = 1), z_loss(0.01)]"]
BALANCES["fractions"] = [f"[switch_loss(0.3, fractions = scores){more}]" for more in ("", ", z_loss(0.01)")]
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
    "fractions": [f"topk({{k}}, {V3})", "topk({k}, bias = online(0.01), noise = 0.3)"],
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


@examples(5, 200)
@given(st.sampled_from(sorted(WORDS)).flatmap(drawn))
def test_plans_with_options_of_gates_equal_the_unsharded_model(spec: Spec) -> None:
    require_equal(spec, float32=False)


DEGREES: list[dict[str, Any]] = [
    {"ep": 4, "zero": 1},
    {"ep": 2, "tp": 2, "model": "embedding = tokens(padding = 3)"},
    {"ep": 2, "tp": 4, "ranks": 8, "sequence_parallel": False, "recompute": "layer"},
    {"ep": 4, "tp": 2, "dtype": "bf16", "microbatches": 2, "zero": 3, "recompute": "experts"},
]


def layers() -> list[str]:
    """A layer for each gate, with the balance terms of its word."""
    found = []
    for word, gates in WORDS.items():
        balance = BALANCES.get(word, EVERY_TERM[-1:])[0].replace("groups = 1", "groups = 4")
        found += [f"moe {{ gate = {gate.replace('{k}', '2')}; balance = {balance} }}" for gate in gates]
    return found


@pytest.mark.parametrize("place", some(range(4), fast=(1, 2)))
def test_plans_with_tp_and_ep_equal_the_unsharded_model(place: int) -> None:
    """Every other gate is a layer of one plan, the others are layers of the next."""
    require_equal(moe_plan(layers=layers()[place % 2 :: 2], **DEGREES[place]))


@pytest.mark.slow
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_plans_equal_the_unsharded_model_in_their_own_dtype_too(degrees: dict[str, Any]) -> None:
    require_equal(moe_plan(layers=layers(), **degrees))
