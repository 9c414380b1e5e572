"""Faults that gates and capacities of other trainers had, tried in every gate, balance term and kind of expert.

A test has the name of its fault and says where it was. Each runs the unsharded model; `moec verify`
compares plans with it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.combinations import diagonals
from support.plans import moe_spec, moe_text
from torch import Tensor

from moec.grammar import load_text
from moec.runtime.host.reference import reference
from moec.runtime.model.module import PlanModule

USUAL = "[switch_loss(0.1), gshard_loss(0.1), importance_loss(0.1), sequence_loss(0.1), device_loss(0.1, groups = 2)"
ALL = f"{USUAL}, z_loss(0.1)]"
BY_EXPERT = USUAL.replace(" gshard_loss(0.1),", "")
"""Of gates that list a token's choices by expert: they have no first ones."""
GATES: dict[str, str] = {
    "topk(2)": ALL,
    "topk(2, score = sigmoid, normalize = true, scale = 2.5)": ALL,
    "topk(2, order = after)": ALL,
    "topk(2, groups = 4, keep_groups = 2)": ALL,
    "topk(2, groups = 4, keep_groups = 2, group_score = max)": ALL,
    "topk(2, bias = online(0.01))": ALL,
    "switch": ALL,
    "gshard": ALL,
    "noisy_topk(2)": f"{USUAL}, load_loss(0.1), z_loss(0.1)]",
    "sparsemixer(2)": ALL,
    "expert_choice(2)": f"{BY_EXPERT}, z_loss(0.1)]",
    "base": ALL,
    "batch_priority(2)": ALL,
    "attention_router(2)": ALL,
    "dense": ALL,
    "dselect_k(2)": f"{BY_EXPERT}]",
    "soft": "[]",
    "smear": "[]",
}
"""Every gate with a router, and every balance term that fits it."""

TOKENS, LABELS = torch.randint(32, (2, 8, 8), generator=torch.Generator().manual_seed(5))
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
ROUTER, EMBEDDING = "layers.1.moe.gate.weight", "embedding.weight"


def built(
    gate: str, *, balance: str = "[]", beside: str = "", experts: str = "8 * swiglu(16)", **options: Any
) -> PlanModule:
    """One dense layer and one mixture in float64, with weights so large that experts differ and are chosen unevenly."""
    how = {"ranks": 1, "ep": 1, "depth": 2, "gate": gate, "balance": balance, "beside": beside, **options}
    text = moe_text(**how).replace("8 * swiglu(16)", experts)
    model = reference(load_text(text, name="tiny.moe").unwrap(), seed=1, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.dim() > 1 else 1)
    return model


def run(model: PlanModule, *batch: Tensor, **beside: Tensor) -> Any:
    """The output with the random numbers of one step, whatever was computed before."""
    model.set(step=1)
    return model(*batch, **beside)


def counts_of(model: PlanModule) -> list[int]:
    """Rows of each expert; none of `smear`, which merges them."""
    return [count for counts in model.expert_counts.values() for count in counts.tolist()]


# ---- gates --------------------------------------------------------------------------------------------------

SHIFTED = [gate for gate in GATES if "attention" not in gate and "dselect" not in gate]
"""Gates whose logits are the router's product with the token."""


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gate", SHIFTED)
def test_the_search_for_the_largest_score_does_not_start_at_0(gate: str, training: bool) -> None:
    """te#2009: where all scores were negative, a search that began at 0 found none. am#1559: raw logits in the loss.

    A coordinate that is 1 in every token adds the same number to all logits of a token, which no softmax sees.
    """
    if training and "sparsemixer" in gate:
        return  # its candidates are those near the best as a part of the best: a shift adds some
    balance = GATES[gate].replace(", z_loss(0.1)", "")
    model = built(gate, balance=balance, model="norm = layer_norm()").train(training)
    norm, router = (f"layers.1.ffn_norm.{name}" for name in ("weight", "bias")), model.get_parameter(ROUTER)
    weight, bias = (model.get_parameter(name) for name in norm)
    found = []
    for shift in (30.0, -30.0):
        with torch.no_grad():
            weight[0], bias[0], router[:, 0] = 0.0, 1.0, shift
        output = run(model, TOKENS)
        found.append((counts_of(model), output.logits, output.aux_loss))
    positive, negative = found
    assert negative[0] == positive[0]
    if not any(word in gate for word in ("sigmoid", "base", "sparsemixer")):
        torch.testing.assert_close(negative[1:], positive[1:], **CLOSE)
    assert negative[2] is None or negative[2] >= 0


TIED = [gate for gate in GATES if gate not in ("expert_choice(2)", "base", "dense", "dselect_k(2)", "soft", "smear")]
"""Gates of which each token takes its best experts."""


@pytest.mark.parametrize("gate", TIED)
def test_ties_in_narrow_scores_do_not_fall_as_they_like(gate: str) -> None:
    """am#2201, vllm#52679: scores that are equal in bf16 were in any order. A router of zeros makes all equal."""
    model = reference(moe_spec(ranks=1, ep=1, depth=2, gate=gate, dtype="bf16", balance="[]"), seed=1).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".gate." in name:
                parameter.zero_()
    run(model, TOKENS)
    second = 0 if gate == "switch" else 64
    assert counts_of(model) == [64, second, *[0] * 6]


def test_ties_in_a_mixture_of_mixtures_go_to_the_lower_experts() -> None:
    """am#2201, vllm#52679: the first two inner experts of the first two outer ones."""
    text = moe_text(ranks=1, ep=1, depth=2, balance="[]")
    inner = 'layer "inner" { moe { experts = 8 * gelu(4); gate = topk(2) } }'
    spec = load_text(text.replace("8 * swiglu(16)", '8 * mixture("inner")') + inner, name="tiny.moe").unwrap()
    model = reference(spec, seed=1).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".gate." in name:
                parameter.zero_()
    run(model, TOKENS)
    assert {pair: count for pair, count in enumerate(counts_of(model)) if count} == dict.fromkeys((0, 1, 8, 9), 64)


# ---- balance terms ------------------------------------------------------------------------------------------

CAPACITIES = ["capacity = factor(0.5)", "capacity = dynamic(max = 0.5)"]
QUEUES = ["capacity = factor(0.5, order = random)", "capacity = factor(0.5, order = priority); overflow = pad"]
REROUTED = "capacity = factor(0.5); overflow = reroute"


def with_capacities() -> list[Any]:
    """Every gate with each of them; in `make test` with one of the first four, and with the last one."""
    found = []
    for place, gate in enumerate(GATES):
        if gate.split("(")[0] in ("expert_choice", "base", "soft", "smear"):
            continue
        fitting = [c for c in (*CAPACITIES, *QUEUES) if "priority" not in gate or "random" not in c]
        slow = {each for each in fitting if each != fitting[place % len(fitting)]}
        if gate in ("topk(2)", "switch", "batch_priority(2)", "topk(2, bias = online(0.01))"):
            fitting.append(REROUTED)
        found += [pytest.param(gate, each, marks=pytest.mark.slow if each in slow else ()) for each in fitting]
    return found


@pytest.mark.parametrize(("gate", "capacity"), with_capacities())
def test_no_term_is_computed_from_what_a_capacity_makes_of_the_choices(gate: str, capacity: str) -> None:
    """mg#1617: from a padded routing map every expert had as many choices, and the loss was 1 for any router."""
    dropless = built(gate, balance=GATES[gate])
    dropping = built(gate, balance=GATES[gate], beside=capacity)
    expected, found = (run(model, TOKENS, LABELS) for model in (dropless, dropping))
    assert counts_of(dropping) != counts_of(dropless)
    torch.testing.assert_close(found.aux_loss, expected.aux_loss, **CLOSE)
    gradients = [
        torch.autograd.grad(out.aux_loss, model.get_parameter(name))
        for out, model, name in ((found, dropping, EMBEDDING), (expected, dropless, EMBEDDING))
    ]
    torch.testing.assert_close(*gradients, **CLOSE)


@pytest.mark.parametrize("gate", GATES)
def test_padding_tokens_do_not_count(gate: str) -> None:
    """mg#2142, br#5470: padding raised the load of the experts that it chose."""
    model = built(gate, balance=GATES[gate], model="embedding = tokens(padding = 0)")
    tokens, labels = TOKENS.clamp_min(1), LABELS.clone()
    tokens[:, 5:], labels[:, 5:] = 0, -100
    found, alone = run(model, tokens, labels), run(model, tokens[:, :5], labels[:, :5])
    torch.testing.assert_close(found.aux_loss, alone.aux_loss, **CLOSE)
    torch.testing.assert_close(found.loss, alone.loss, **CLOSE)


# ---- capacities ---------------------------------------------------------------------------------------------


ROOMY = (
    "factor(100)",
    "factor(100, order = random)",
    "factor(100, order = priority)",
    "factor(100); overflow = pad",
    "factor(100); overflow = reroute",
    "factor(0.01, min = 999)",
    "dynamic(max = 100)",
)


@pytest.mark.parametrize(("capacity", "group"), diagonals(ROOMY, ["sequence", "batch"]))
def test_more_places_than_tokens_do_not_fail(capacity: str, group: str) -> None:
    """ds#8155: the best so many of fewer tokens were asked for."""
    dropless = built("topk(2)", balance=ALL, beside=f"group = {group}")
    roomy = built("topk(2)", balance=ALL, beside=f"capacity = {capacity}; group = {group}")
    expected, found = (run(model, TOKENS, LABELS) for model in (dropless, roomy))
    torch.testing.assert_close(found.logits, expected.logits, **CLOSE)
    torch.testing.assert_close(found.loss, expected.loss, **CLOSE)
    assert counts_of(roomy) == counts_of(dropless)


# ---- experts ------------------------------------------------------------------------------------------------

EXPERTS = {
    "gelu": "8 * gelu(16, bias = true)",
    "swiglu": "8 * swiglu(16, clamp = 7.0, alpha = 1.702, bias = true)",
    "linear": "8 * linear(bias = true)",
    "lora": "8 * lora(4, alpha = 8)",
    "conv": "8 * conv(8, kernel = 2)",
    "sizes": "[4 * gelu(8), 4 * swiglu(16)]",
}


@pytest.mark.parametrize("none", [False, True])
@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_without_rows_have_gradients_of_zeros(kind: str, none: bool) -> None:
    """am#2995: without rows only expert 0 had a gradient, and the optimizer states of ranks diverged."""
    model = built("topk(2)", experts=EXPERTS[kind], optimizer="adamw(); replay = true")
    routes = torch.full((8, 8, 1, 2), -1)
    routes[..., 0] = -1 if none else 0
    run(model, TOKENS, LABELS, routes=routes).loss.backward()
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            assert parameter.grad is not None, name
            used = 0 if none or "experts.1." in name else 1
            assert (parameter.grad[used:] == 0).all(), name
            assert not used or kind == "lora" or (parameter.grad[0] != 0).any(), name
