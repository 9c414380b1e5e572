"""Options of Tutel, FastMoE and torchtitan that change what a gate computes, and the lines for them."""

from __future__ import annotations

from typing import Any

import torch
from oracles.foreign import fastmoe, torchtitan, tutel
from oracles.foreign.routing import Routing
from oracles.foreign.row import NOISE, Given, Options, Row
from torch import Tensor


def tutels(k: int, capacity_factor: float = 0.0, **given: Any) -> Options:
    """Tutel's gate with these options; the factor 0 drops nothing."""
    return Options(tutel.route, {"k": k, "capacity_factor": capacity_factor, **given})


def titans(top_k: int, **given: Any) -> Options:
    """torchtitan's router with these options."""
    return Options(torchtitan.route, {"top_k": top_k, **given})


def cosine(g: Given) -> Routing:
    """Tutel's `cosine_top` with a projection that keeps the token."""
    eye = torch.eye(g.flat.shape[-1], dtype=torch.float64)
    return tutel.route(tutel.cosine_logits(g.flat, eye, eye, torch.tensor([2.0]).log()), 2, capacity_factor=0.0)


def uniform(g: Given) -> Tensor:
    """Numbers of a generator in [0, 1), one for each logit."""
    return torch.rand(g.flat.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


NOISY = {"gate_noise": 4.0, "normal": lambda g: g.normal}
FIRST = "group = rank; balance = [gshard_loss(1)]"
TOP2 = "gate = topk(2, normalize = true)"
FEW = "group = rank; capacity = factor(0.75)"

TUTEL = [
    Row("tutel k 1", tutels(1), f"gate = switch; capacity = dynamic(); {FIRST}"),
    Row("tutel k 2", tutels(2), f"{TOP2}; capacity = dynamic(); {FIRST}"),
    Row("tutel k 4", tutels(4), f"gate = topk(4, order = after); {FIRST}"),
    Row("tutel normalize_gate off", tutels(2, normalize_gate=False), f"gate = topk(2); {FIRST}"),
    Row("tutel capacity_factor 0.5", tutels(2, 0.5), f"{TOP2}; {FEW.replace('0.75', '0.5')}", drops=True),
    Row("tutel capacity_factor, k 1", tutels(1, 0.5), f"gate = switch; {FEW.replace('0.75', '0.5')}", drops=True),
    Row(
        "tutel capacity_factor below 0",
        tutels(2, -0.5),
        f"{TOP2}; group = rank; capacity = dynamic(max = 0.5); balance = [gshard_loss(1)]",
        drops=True,
    ),
    Row(
        "tutel capacity_factor, rounded down",
        tutels(2, 0.75),
        f"{TOP2}; {FEW}",
        differs="weights",
        why="rounded down before it is multiplied by k: 2 * int(0.75 * 6) is 8, ceil(0.75 * 2 * 6) is 9",
    ),
    Row(
        "tutel capacity_factor, experts that do not divide the tokens",
        tutels(1, 1.5),
        "gate = switch; group = rank; capacity = factor(1.5)",
        differs="weights",
        why="an expert's tokens are rounded up before the factor applies: int(1.5 * 2) is 3, ceil(1.5 * 9 / 8) is 2",
        batch=1,
        sequence=9,
    ),
    Row(
        "tutel batch_prioritized_routing",
        tutels(2, 0.5, batch_prioritized_routing=True),
        f"{TOP2}; group = rank; capacity = factor(0.5, order = priority); balance = [gshard_loss(1)]",
        drops=True,
    ),
    Row(
        "tutel gate_noise",
        tutels(2, **NOISY),
        f"gate = topk(2, normalize = true, noise = 0.5); {FIRST}",
        needs="model",
    ),
    Row(
        "tutel is_gshard_loss off",
        tutels(2, is_gshard_loss=False, **NOISY),
        # all experts' softmax; load compares it with logits; variances have Bessel's correction: 1 / 2 * 8 / 7
        (
            "gate = topk(2, normalize = true, noise = 0.5); group = rank; "
            "balance = [importance_loss(4 / 7, of = all), load_loss(4 / 7, of = probabilities)]"
        ),
        needs="model",
    ),
    Row(
        "tutel is_postscore off",
        tutels(2, is_postscore=False),
        TOP2,
        differs="weights",
        why="weights multiply what goes into experts",
    ),
    Row("tutel cosine_top", cosine, TOP2, differs="weights", why="no gate takes cosines"),
]

FASTMOE = [
    Row(
        "fastmoe naive",
        lambda g: fastmoe.naive(g.flat + g.bias, 2),
        "gate = topk(2, order = after, bias = learned)",
    ),
    Row("fastmoe naive, gate_bias off", lambda g: fastmoe.naive(g.flat, 3), "gate = topk(3, order = after)"),
    Row(
        "fastmoe noisy in evaluation",
        lambda g: fastmoe.noisy(g.flat, NOISE * g.flat, 2, None),
        "gate = noisy_topk(2)",
        needs="model",
        training=False,
    ),
    Row(
        "fastmoe noisy, but for its epsilon",
        lambda g: fastmoe.noisy(g.flat, NOISE * g.flat, 2, g.normal, epsilon=0.0),
        "gate = noisy_topk(2); group = rank; balance = [importance_loss(8 / 7), load_loss(8 / 7)]",
        needs="model",
    ),
    Row(
        "fastmoe noisy",
        lambda g: fastmoe.noisy(g.flat, NOISE * g.flat, 2, g.normal),
        "gate = noisy_topk(2); group = rank; balance = [importance_loss(8 / 7), load_loss(8 / 7)]",
        differs="weights",
        why="the standard deviation of the noise has 0.01 added to it",
        needs="model",
    ),
    Row(
        "fastmoe gshard without random_routing, no drops",
        lambda g: fastmoe.gshard(g.flat, 8.0, drawn=None),
        f"gate = topk(2, order = after); {FIRST}",
    ),
    Row(
        "fastmoe gshard, no drops",
        lambda g: fastmoe.gshard(g.flat, 8.0, drawn=g.coin),
        f"gate = gshard; {FIRST}",
        needs="model",
        drops=True,
    ),
    Row(
        "fastmoe gshard in evaluation",
        lambda g: fastmoe.gshard(g.flat, 8.0, drawn=g.coin),
        f"gate = gshard; {FIRST}",
        differs="weights",
        why="evaluation draws too",
        needs="model",
        training=False,
    ),
    Row(
        "fastmoe gshard, capacity",
        lambda g: fastmoe.gshard(g.flat, 0.75, drawn=None),
        f"gate = topk(2, order = after); {FEW.replace(')', ', order = token)')}; balance = [gshard_loss(1)]",
        drops=True,
    ),
    Row(
        "fastmoe switch in evaluation, no drops",
        lambda g: fastmoe.switch(g.flat, 8.0),
        "gate = switch; group = rank; balance = [switch_loss(1)]",
        training=False,
    ),
    Row(
        "fastmoe switch, capacity",
        lambda g: Routing(fastmoe.switch(g.flat, 0.75).weights),
        f"gate = switch; {FEW}",
        training=False,
        drops=True,
    ),
    Row(
        "fastmoe loss of switch, capacity",
        lambda g: fastmoe.switch(g.flat, 0.75),
        f"gate = switch; {FEW}; balance = [switch_loss(1)]",
        differs="loss",
        why="shares are of kept tokens, and sums over all tokens are divided by the number of kept ones",
        training=False,
    ),
    Row(
        "fastmoe switch in training",
        lambda g: fastmoe.switch(g.flat, 8.0, noise=0.9 + 0.2 * uniform(g)),
        "gate = topk(1, noise = 0.06)",
        differs="weights",
        why="a uniform number of 1 ± switch_eps is added to each logit",
        needs="model",
    ),
]

TORCHTITAN = [
    Row("torchtitan top_k 1, no bias", titans(1), "gate = topk(1, score = sigmoid)"),
    Row("torchtitan top_k 3, no bias", titans(3), "gate = topk(3, score = sigmoid)"),
    Row(
        "torchtitan load_balance_coeff, on by default",
        titans(3, expert_bias=lambda g: g.bias),
        "gate = topk(3, score = sigmoid, bias = online(1e-3))",
        needs="bias",
    ),
    Row(
        "torchtitan route_norm, route_scale",
        titans(3, route_norm=True, route_scale=2.5),
        "gate = topk(3, score = sigmoid, normalize = true, scale = 2.5)",
    ),
    Row("torchtitan softmax", titans(2, score_func="softmax"), "gate = topk(2)"),
    Row(
        "torchtitan softmax, route_norm",
        titans(2, score_func="softmax", route_norm=True),
        "gate = topk(2, normalize = true)",
    ),
    Row(
        "torchtitan top_k 1, route_scale",
        titans(1, route_scale=2.5),
        "gate = topk(1, score = sigmoid, scale = 2.5)",
    ),
    Row(
        "torchtitan groups",
        titans(3, num_expert_groups=4, num_limited_groups=2),
        "gate = topk(3, score = sigmoid, groups = 4, keep_groups = 2)",
    ),
    Row(
        "torchtitan groups and bias",
        titans(3, expert_bias=lambda g: g.bias, num_expert_groups=4, num_limited_groups=2, route_norm=True),
        "gate = topk(3, score = sigmoid, normalize = true, groups = 4, keep_groups = 2, bias = online(1e-3))",
        needs="bias",
    ),
    Row(
        "torchtitan gpt-oss",
        lambda g: torchtitan.route(g.flat + g.bias, 2, score_func="softmax", route_norm=True),
        "gate = topk(2, order = after, bias = learned)",
    ),
]
