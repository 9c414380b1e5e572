"""DeepSpeed's options that change what a gate computes, and the lines for them. `moe` has a loss of coefficient 1."""

from __future__ import annotations

from typing import Any

from oracles.foreign import deepspeed
from oracles.foreign.routing import Routing
from oracles.foreign.row import Given, Options, Row


def top1(**given: Any) -> Options:
    """k = 1 with these options, and `use_rts = False`."""
    return Options(deepspeed.top1, given)


def top2(**given: Any) -> Options:
    """k = 2 with these options, and `top2_2nd_expert_sampling = False`."""
    return Options(deepspeed.top2, given)


def topk(k: int, **given: Any) -> Options:
    """k > 2 with these options."""
    return Options(deepspeed.topk, {"k": k, **given})


def jittered(g: Given) -> Routing:
    """`noisy_gate_policy = Jitter`, of 0.01."""
    return deepspeed.top1(g.flat * (1 + 1e-2 * g.factors), drop_tokens=False)


GUMBEL = lambda g: deepspeed.gumbel(g.flat.shape, 1)  # noqa: E731
FEW = {"capacity_factor": 0.75}
FIRST = "group = rank; balance = [gshard_loss(1)]"
SWITCH = "group = rank; balance = [switch_loss(1)]"
TOP2 = "gate = topk(2, normalize = true)"

DEEPSPEED = [
    Row("deepspeed k 1, no drops", top1(drop_tokens=False), f"gate = switch; capacity = dynamic(); {SWITCH}"),
    Row(
        "deepspeed k 1, use_rts off",
        top1(**FEW),
        f"gate = switch; capacity = factor(0.75, eval = 1, min = 4); {SWITCH}",
        drops=True,
    ),
    Row(
        "deepspeed k 1 in evaluation: eval_capacity_factor",
        top1(capacity_factor=0.5),
        f"gate = switch; capacity = factor(1, eval = 0.5, min = 4); {SWITCH}",
        training=False,
        drops=True,
    ),
    Row(
        "deepspeed min_capacity",
        top1(capacity_factor=0.25, min_capacity=5),
        f"gate = switch; capacity = factor(0.25, min = 5); {SWITCH}",
        drops=True,
    ),
    Row(
        "deepspeed min_capacity left out",
        top1(capacity_factor=0.25),
        f"gate = switch; capacity = factor(0.25, min = 4); {SWITCH}",
        drops=True,
    ),
    Row(
        "deepspeed use_rts",
        top1(drawn=lambda g: g.queue, capacity_factor=0.75),
        f"gate = switch; capacity = factor(0.75, min = 4, order = random); {SWITCH}",
        needs="model",
        drops=True,
    ),
    Row(
        "deepspeed use_rts in evaluation",
        top1(drawn=lambda g: g.queue, capacity_factor=0.75),
        f"gate = switch; capacity = factor(0.75, min = 4, order = random); {SWITCH}",
        differs="weights",
        why="evaluation draws too",
        needs="model",
        training=False,
    ),
    Row(
        "deepspeed used_token",
        top1(used=lambda g: g.padded, capacity_factor=0.5),
        "gate = switch; group = rank; capacity = factor(0.5, min = 4)",
        needs="padding",
        drops=True,
    ),
    Row(
        "deepspeed loss with used_token",
        top1(used=lambda g: g.padded, drop_tokens=False),
        f"gate = switch; {SWITCH}",
        differs="loss",
        why="mean probabilities are of all tokens, padding too, and shares are of all tokens",
        needs="padding",
    ),
    Row(
        "deepspeed noisy_gate_policy RSample",
        top1(gumbel=GUMBEL, drop_tokens=False),
        f"gate = topk(1, noise = 1.28); {SWITCH}",
        differs="weights",
        why="Gumbel noise chooses the expert, and does not weigh it",
        needs="model",
    ),
    Row(
        "deepspeed noisy_gate_policy Jitter",
        jittered,
        f"gate = switch(jitter = 0.01); {SWITCH}",
        needs="model",
    ),
    Row("deepspeed k 2, no drops, no sampling", top2(drop_tokens=False), f"{TOP2}; capacity = dynamic(); {FIRST}"),
    Row(
        "deepspeed k 2, capacity that drops nothing",
        top2(capacity_factor=4.0),
        f"{TOP2}; capacity = factor(4, min = 4); {FIRST}",
    ),
    Row(
        "deepspeed k 2, no sampling",
        top2(**FEW),
        f"{TOP2}; capacity = factor(0.75, min = 4, renormalize = true); {FIRST}",
        drops=True,
    ),
    *(
        Row(
            f"deepspeed k 2, top2_2nd_expert_sampling, {gate}",
            top2(gumbel=GUMBEL, drop_tokens=False),
            f"gate = {gate}; {FIRST}",
            differs="weights",
            why="Gumbel noise draws the second expert among all others in proportion to its probability",
            needs="model",
        )
        for gate in ("topk(2, normalize = true)", "gshard")
    ),
    Row("deepspeed k 4, no drops", topk(4, drop_tokens=False), f"gate = topk(4, normalize = true); {SWITCH}"),
    Row(
        "deepspeed k 3, capacity that drops nothing",
        topk(3, capacity_factor=4.0),
        f"gate = topk(3, order = after); capacity = factor(4, min = 4); {SWITCH}",
    ),
    Row(
        "deepspeed k 3",
        topk(3, **FEW),
        # without `normalize`: an expert keeps its largest probabilities, before any is divided
        f"gate = topk(3); capacity = factor(0.75, min = 4, order = weight, renormalize = true); {SWITCH}",
        drops=True,
    ),
    Row(
        "deepspeed k 3, drop_policy position",
        topk(3, drop_policy="position", **FEW),
        (
            "gate = topk(3, normalize = true); "
            f"capacity = factor(0.75, min = 4, order = token, renormalize = true); {SWITCH}"
        ),
        drops=True,
    ),
    Row(
        "deepspeed capacity that a float rounds up",
        top1(capacity_factor=1.2),
        "gate = switch; group = rank; capacity = factor(1.2, min = 4)",
        differs="weights",
        why="50 / 4 * 1.2 is 15.000001 in fp32, so 16 places there; factors are exact here, so 15",
        batch=1,
        sequence=50,
        experts=4,
    ),
]
