"""Megatron-LM's options that change what a router computes, and the lines for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oracles.foreign import megatron
from oracles.foreign.routing import Routing
from oracles.foreign.row import Given, Options, Row


def options(topk: int, **given: Any) -> Options:
    """`TopKRouter` with these options, in its config's names without their beginnings."""
    return Options(megatron.route, {"topk": topk, **given})


def biased(topk: int, **given: Any) -> Options:
    """As `options`, with `moe_router_enable_expert_bias` in some step: biases are those of the row."""
    return options(topk, expert_bias=lambda g: g.bias, score_function="sigmoid", **given)


def sequence_first(topk: int, **given: Any) -> Callable[[Given], Routing]:
    """A batch in Megatron's layout, [sequence, batch]: places are taken in that order."""

    def theirs(g: Given) -> Routing:
        batch, sequence, experts = g.logits.shape
        found = megatron.route(g.logits.transpose(0, 1).flatten(0, 1), topk, **given).weights
        return Routing(found.view(sequence, batch, experts).transpose(0, 1).flatten(0, 1))

    return theirs


def bf16_logits(g: Given) -> Routing:
    """Without `moe_router_dtype` logits and scores have the dtype of the input."""
    return Routing(megatron.route(g.flat.bfloat16(), 2).weights.double())


FEWER = "group = rank; capacity = factor(0.75)"
BY_WEIGHT, BY_TOKEN = FEWER.replace(")", ", order = weight)"), FEWER.replace(")", ", order = token)")
PRE = {"pre_softmax": True}
SIGMOID = {"score_function": "sigmoid"}
GROUPS = {"num_groups": 4, "group_topk": 2}
KEEP = "groups = 4, keep_groups = 2"
ONE = {"capacity_factor": 0.75, "pre_softmax": True}
AUX, ALL = ({"load_balancing": f"{name}aux_loss"} for name in ("", "global_"))
SEQ = {"load_balancing": "seq_aux_loss", "sequences": lambda g: len(g.logits)}
REAL = {"real": lambda g: g.padded}
SWITCH = "group = rank; balance = [switch_loss(1)]"
SCORES = "group = rank; balance = [switch_loss(1, fractions = scores)]"

MEGATRON = [
    Row("megatron topk 2", options(2), "gate = topk(2, order = after)"),
    Row("megatron topk 6", options(6), "gate = topk(6, normalize = true)"),
    Row(
        "megatron topk 2, scaling factor", options(2, scaling_factor=2.5), "gate = topk(2, order = after, scale = 2.5)"
    ),
    Row("megatron topk 1, pre softmax", options(1, **PRE), "gate = switch"),
    Row("megatron topk 3, pre softmax", options(3, **PRE), "gate = topk(3)"),
    Row("megatron pre softmax, scaling factor", options(3, scaling_factor=16, **PRE), "gate = topk(3, scale = 16)"),
    Row("megatron sigmoid, topk 1", options(1, **SIGMOID), "gate = topk(1, score = sigmoid)"),
    Row("megatron sigmoid, topk 4", options(4, **SIGMOID), "gate = topk(4, score = sigmoid, normalize = true)"),
    Row(
        "megatron sigmoid, scaling factor",
        options(4, scaling_factor=2.5, **SIGMOID),
        "gate = topk(4, score = sigmoid, normalize = true, scale = 2.5)",
    ),
    Row(
        "megatron sigmoid, topk 1, scaling factor",
        options(1, scaling_factor=2.5, **SIGMOID),
        "gate = topk(1, score = sigmoid, scale = 2.5)",
    ),
    Row(
        "megatron expert bias",
        biased(3, scaling_factor=2.5),
        "gate = topk(3, score = sigmoid, normalize = true, scale = 2.5, bias = online(1e-3))",
        needs="bias",
    ),
    Row(
        "megatron router with a bias (add_bias_linear)",
        lambda g: megatron.route(g.flat + g.bias, 2),
        "gate = topk(2, order = after, bias = learned)",
    ),
    # groups: the sum of a group's topk // group_topk best
    Row("megatron groups by two, pre softmax", options(4, **GROUPS, **PRE), f"gate = topk(4, {KEEP})"),
    Row("megatron groups by two logits", options(4, **GROUPS), f"gate = topk(4, order = after, {KEEP})"),
    Row(
        "megatron groups by one, pre softmax",
        options(2, **GROUPS, **PRE),
        f"gate = topk(2, {KEEP}, group_score = max)",
    ),
    Row(
        "megatron groups by one logit",
        options(3, **GROUPS),
        f"gate = topk(3, order = after, {KEEP}, group_score = max)",
    ),
    Row(
        "megatron groups, sigmoid and bias",
        biased(4, **GROUPS),
        f"gate = topk(4, score = sigmoid, normalize = true, bias = online(1e-3), {KEEP})",
        needs="bias",
    ),
    Row(
        "megatron groups by three",
        options(3, num_groups=2, group_topk=1, **PRE),
        "gate = topk(3, groups = 2, keep_groups = 1)",
        differs="weights",
        why="a group counts its topk // group_topk best experts, here its two best or its best alone",
    ),
    # losses, with a coefficient of 1
    Row("megatron aux_loss", options(2, **AUX), f"gate = topk(2, order = after); {SWITCH}"),
    Row("megatron aux_loss, pre softmax", options(3, **PRE, **AUX), f"gate = topk(3); {SWITCH}"),
    Row(
        "megatron aux_loss, sigmoid",
        options(2, **SIGMOID, **AUX),
        f"gate = topk(2, score = sigmoid, normalize = true); {SWITCH}",
    ),
    Row(
        "megatron seq_aux_loss",
        options(2, **SEQ),
        "gate = topk(2, order = after); balance = [sequence_loss(1)]",
    ),
    Row(
        "megatron seq_aux_loss, groups and bias",
        biased(4, **GROUPS, **SEQ),
        f"gate = topk(4, score = sigmoid, normalize = true, bias = online(1e-3), {KEEP}); balance = [sequence_loss(1)]",
        needs="bias",
    ),
    Row(
        "megatron seq_aux_loss, groups, other than switch_loss",
        options(4, **GROUPS, **PRE, **SEQ),
        f"gate = topk(4, {KEEP}); balance = [switch_loss(1)]",
        differs="loss",
        why="the fractions are of the plain top k, without groups: sequence_loss is equal",
    ),
    Row(
        "megatron aux_loss, groups",
        options(4, **GROUPS, **PRE, **AUX),
        f"gate = topk(4, {KEEP}); {SCORES}",
    ),
    Row(
        "megatron aux_loss, bias",
        biased(3, **AUX),
        f"gate = topk(3, score = sigmoid, normalize = true, bias = online(1e-3)); {SCORES}",
        needs="bias",
    ),
    Row(
        "megatron global_aux_loss, first micro-batch",
        options(2, **ALL),
        "gate = topk(2, order = after); group = batch; balance = [switch_loss(1)]",
    ),
    Row(
        "megatron global_aux_loss, groups",
        options(4, **GROUPS, **PRE, **ALL),
        f"gate = topk(4, {KEEP}); {SCORES.replace('rank', 'batch')}",
    ),
    Row(
        "megatron global_aux_loss, later micro-batches",
        lambda g: Routing(
            megatron.route(g.flat, 2).weights, megatron.global_aux_loss(g.flat, [2 * g.flat.roll(1, 1)], 2)
        ),
        "gate = topk(2, order = after); group = batch; balance = [switch_loss(1)]",
        differs="loss",
        why="the fractions are means over the micro-batches of a step so far",
    ),
    Row("megatron z loss", options(2, z=1e-2), "gate = topk(2, order = after); balance = [z_loss(1e-2)]"),
    Row(
        "megatron z loss and aux_loss",
        options(2, z=1e-2, **AUX),
        "gate = topk(2, order = after); group = rank; balance = [switch_loss(1), z_loss(1e-2)]",
    ),
    Row(
        "megatron aux_loss with padding",
        options(2, **AUX, **REAL),
        f"gate = topk(2, order = after); {SWITCH}",
        needs="padding",
    ),
    Row(
        "megatron z loss with padding",
        options(2, z=1, **REAL),
        "gate = topk(2, order = after); group = rank; balance = [z_loss(1)]",
        needs="padding",
    ),
    Row(
        "megatron seq_aux_loss with padding",
        options(2, **SEQ, **REAL),
        "gate = topk(2, order = after); balance = [sequence_loss(1)]",
        differs="loss",
        why="each sequence is divided by the square of the mean number of real tokens, not by its own",
        needs="padding",
    ),
    # capacity
    Row(
        "megatron capacity that drops nothing",
        options(2, capacity_factor=8.0),
        "gate = topk(2, order = after); group = rank; capacity = factor(8)",
    ),
    Row(
        "megatron drop policy probs, topk 1",
        options(1, **ONE),
        f"gate = switch; {FEWER.replace(')', ', order = priority)')}",
        drops=True,
    ),
    Row(
        "megatron drop policy probs",
        options(2, capacity_factor=0.75),
        f"gate = topk(2, order = after); {BY_WEIGHT}",
        drops=True,
    ),
    Row(
        "megatron drop policy probs, sigmoid",
        options(3, capacity_factor=0.75, **SIGMOID),
        f"gate = topk(3, score = sigmoid, normalize = true); {BY_WEIGHT}",
        drops=True,
    ),
    Row(
        "megatron drop policy probs, padded to capacity",
        options(3, capacity_factor=0.75, **PRE),
        f"gate = topk(3); {BY_WEIGHT}; overflow = pad",
        drops=True,
    ),
    Row(
        "megatron drop policy position, topk 1",
        options(1, drop_policy="position", **ONE),
        f"gate = switch; {FEWER}",
        drops=True,
    ),
    Row(
        "megatron drop policy position",
        options(2, capacity_factor=0.75, drop_policy="position"),
        f"gate = topk(2, order = after); {BY_TOKEN}",
        batch=1,
        drops=True,
    ),
    Row(
        "megatron drop policy position, batch",
        sequence_first(1, drop_policy="position", **ONE),
        f"gate = switch; {FEWER}",
        differs="weights",
        why="tokens are laid out [sequence, batch], and take places in that order",
    ),
    Row(
        "megatron capacity that a float rounds up",
        options(1, pre_softmax=True, capacity_factor=1.1),
        "gate = switch; group = rank; capacity = factor(1.1, order = priority)",
        differs="weights",
        why="200 / 4 * 1.1 is 55.00000000000001 in Python's floats, so 56 places there; factors are exact here, so 55",
        batch=1,
        sequence=200,
        experts=4,
    ),
    # what chooses
    Row(
        "megatron sinkhorn in evaluation, topk 1",
        options(1, load_balancing="sinkhorn", training=False),
        "gate = topk(1, score = sigmoid)",
        training=False,
    ),
    Row(
        "megatron sinkhorn in evaluation, topk 2",
        options(2, load_balancing="sinkhorn", training=False),
        "gate = topk(2)",
        training=False,
    ),
    *(
        Row(
            f"megatron sinkhorn, {gate}",
            options(k, load_balancing="sinkhorn"),
            f"gate = {gate}",
            differs="weights",
            why="no gate balances by Sinkhorn's iteration",
        )
        for gate, k in (("topk(1, score = sigmoid)", 1), ("base", 1), ("topk(2)", 2))
    ),
    Row(
        "megatron input jitter",
        lambda g: megatron.route(g.flat * (1 + 0.3 * g.factors), 2),
        "gate = topk(2, order = after, jitter = 0.3)",
        needs="model",
    ),
    Row(
        "megatron input jitter in evaluation",
        lambda g: megatron.route(g.flat * (1 + 0.3 * g.factors), 2),
        "gate = topk(2, order = after, jitter = 0.3)",
        differs="weights",
        why="evaluation jitters too",
        needs="model",
        training=False,
    ),
    Row(
        "megatron router dtype fp32",
        lambda g: Routing(megatron.route(g.flat.float(), 2).weights.double()),
        "gate = topk(2, order = after)",
    ),
    Row(
        "megatron router dtype left out, bf16",
        bf16_logits,
        "gate = topk(2, order = after)",
        needs="bf16",
    ),
]
