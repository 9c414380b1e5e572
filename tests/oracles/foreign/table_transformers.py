"""Keys of Hugging Face's configs that change what a router computes, and the lines for them.

The routers are transformers' own (5.23.0), with the identity as weights. tests/huggingface compares families whole;
here is what each key means.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from oracles.foreign.routing import Routing, mask_of, spread
from oracles.foreign.row import EXPERTS, Given, Row
from torch import Tensor

FAMILIES = {
    "afmoe": ("AfmoeConfig", "AfmoeTokenChoiceRouter", "num_experts"),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2TopkRouter", "n_routed_experts"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3TopkRouter", "n_routed_experts"),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeTopKRouter", "moe_num_experts"),
    "gpt_oss": ("GptOssConfig", "GptOssTopKRouter", "num_local_experts"),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeTopKRouter", "num_local_experts"),
    "lfm2_moe": ("Lfm2MoeConfig", "Lfm2MoeTopKRouter", "num_experts"),
    "llama4": ("Llama4TextConfig", "Llama4Router", "num_local_experts"),
    "longcat_flash": ("LongcatFlashConfig", "LongcatFlashTopkRouter", "n_routed_experts"),
    "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2TopKRouter", "num_local_experts"),
    "mixtral": ("MixtralConfig", "MixtralTopKRouter", "num_local_experts"),
    "nllb_moe": ("NllbMoeConfig", "NllbMoeTop2Router", "num_experts"),
    "olmoe": ("OlmoeConfig", "OlmoeTopKRouter", "num_experts"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeTopKRouter", "num_local_experts"),
    "switch_transformers": ("SwitchTransformersConfig", "SwitchTransformersTop1Router", "num_experts"),
}
"""The class of a family's config, that of its router, and the key for the number of experts."""

GIVEN_ITS_BIAS = ("afmoe", "lfm2_moe", "minimax_m2")
"""Families whose router takes the bias as an argument."""


def module(family: str, **keys: Any) -> Any:
    """A router of this family in float64, whose matrix is the identity."""
    config, router, experts = FAMILIES[family]
    models = f"transformers.models.{family}"
    configured = getattr(import_module(f"{models}.configuration_{family}"), config)
    made = getattr(import_module(f"{models}.modeling_{family}"), router)(
        configured(**{experts: EXPERTS, "hidden_size": EXPERTS, **keys})
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.eye(EXPERTS) if parameter.shape == (EXPERTS, EXPERTS) else torch.zeros(()))
    return made.double()


def router(family: str, k: int, *, biased: bool = False, **keys: Any) -> Callable[[Given], Routing]:
    """The family's router with these keys, and with the row's bias where it is `biased`."""

    def theirs(g: Given) -> Routing:
        made = module(family, num_experts_per_tok=k, **keys)
        for name, values in [*made.named_parameters(), *made.named_buffers()] if biased else []:
            if name.endswith("bias"):
                values.data.copy_(g.bias)
        given = [g.bias] if biased and family in GIVEN_ITS_BIAS else []
        _, weights, chosen = made(g.flat[None] if family == "afmoe" else g.flat, *given)
        return Routing(spread(weights.double(), chosen, EXPERTS))

    return theirs


def dbrx(p: float | None) -> Callable[[Given], Routing]:
    """DBRX of k = 2 with this `moe_normalize_expert_weights`."""

    def theirs(g: Given) -> Routing:
        config = import_module("transformers.models.dbrx.configuration_dbrx")
        ffn = config.DbrxFFNConfig(moe_num_experts=EXPERTS, moe_top_k=2, moe_normalize_expert_weights=p)
        block = import_module("transformers.models.dbrx.modeling_dbrx").DbrxFFN(
            config.DbrxConfig(
                d_model=EXPERTS, ffn_config={**ffn.to_dict(), "hidden_size": EXPERTS, "ffn_hidden_size": 4}
            )
        )
        weights, chosen = block.route_tokens_to_experts(g.flat)
        return Routing(spread(weights, chosen, EXPERTS))

    return theirs


def switch(g: Given) -> Routing:
    """Switch with `expert_capacity = 3`: the places of each sequence."""
    mask, weights, _ = module("switch_transformers", expert_capacity=3).eval()(g.logits)
    return Routing((mask * weights).flatten(0, 1).double())


def nllb(*, training: bool = True, **keys: Any) -> Callable[[Given], Routing]:
    """NLLB-MoE with `expert_capacity = 9`, in training."""

    def theirs(g: Given) -> Routing:
        made = module("nllb_moe", expert_capacity=9, **keys).train(training)
        return Routing(made.route_tokens(g.flat, torch.float64)[1])

    return theirs


def llama4(g: Given) -> Routing:
    """Llama 4 multiplies what goes *into* experts: those that give unit vectors have the weight 1."""
    scores, _ = module("llama4", num_experts_per_tok=2)(g.flat)
    return Routing(mask_of(scores.topk(2, -1).indices, EXPERTS).double())


def balanced(layers: Callable[[Tensor], tuple[Tensor, ...]], *, padded: bool = False) -> Callable[[Given], Routing]:
    """Mixtral's router of k = 2, and its loss over `layers` with `router_aux_loss_coef = 1`."""

    def theirs(g: Given) -> Routing:
        loss = import_module("transformers.models.mixtral.modeling_mixtral").load_balancing_loss_func
        found = loss(layers(g.flat), EXPERTS, 2, g.real if padded else None)
        return Routing(router("mixtral", 2)(g).weights, found.double())

    return theirs


NORMAL = "gate = topk(2, normalize = true)"
SCORED = "score = sigmoid, normalize = true, bias = online(1e-3)"
GROUPS = {"n_group": 4, "topk_group": 2}
V2 = {**GROUPS, "num_attention_heads": 1}
KEEP = "groups = 4, keep_groups = 2"
NINE = "group = batch; capacity = factor(1e-6, min = 9)"

TRANSFORMERS = [
    Row("mixtral num_experts_per_tok", router("mixtral", 2), NORMAL),
    Row("qwen3_moe norm_topk_prob left out", router("qwen3_moe", 3), "gate = topk(3)"),
    Row("qwen3_moe norm_topk_prob", router("qwen3_moe", 2, norm_topk_prob=True), NORMAL),
    Row("olmoe norm_topk_prob left out", router("olmoe", 3), "gate = topk(3)"),
    Row("granitemoe num_experts_per_tok", router("granitemoe", 2), "gate = topk(2, order = after)"),
    Row(
        "gpt_oss num_experts_per_tok",
        router("gpt_oss", 2, biased=True),
        "gate = topk(2, order = after, bias = learned)",
    ),
    Row(
        "deepseek_v2 topk_method greedy",
        router("deepseek_v2", 3, topk_method="greedy", routed_scaling_factor=16.0, **V2),
        "gate = topk(3, scale = 16)",
    ),
    Row(
        "deepseek_v2 topk_method group_limited_greedy",
        router("deepseek_v2", 3, topk_method="group_limited_greedy", routed_scaling_factor=1.0, **V2),
        f"gate = topk(3, {KEEP}, group_score = max)",
    ),
    Row(
        "deepseek_v3 norm_topk_prob",
        router("deepseek_v3", 3, biased=True, norm_topk_prob=True, routed_scaling_factor=2.5, **GROUPS),
        f"gate = topk(3, {SCORED}, scale = 2.5, {KEEP})",
        needs="bias",
    ),
    Row(
        "deepseek_v3 norm_topk_prob off",
        router("deepseek_v3", 3, biased=True, norm_topk_prob=False, routed_scaling_factor=2.5, **GROUPS),
        f"gate = topk(3, {SCORED.replace('true', 'false')}, scale = 2.5, {KEEP})",
        needs="bias",
    ),
    Row(
        "ernie4_5_moe moe_k",
        router("ernie4_5_moe", 2, biased=True),
        "gate = topk(2, normalize = true, bias = online(1e-3))",
        needs="bias",
    ),
    Row("minimax_m2 scoring", router("minimax_m2", 2, biased=True), f"gate = topk(2, {SCORED})", needs="bias"),
    Row(
        "afmoe route_scale",
        router("afmoe", 2, biased=True, route_scale=2.8),
        f"gate = topk(2, {SCORED}, scale = 2.8)",
        needs="bias",
    ),
    Row(
        "lfm2_moe use_expert_bias, norm_topk_prob",
        router("lfm2_moe", 2, biased=True, use_expert_bias=True, norm_topk_prob=True),
        f"gate = topk(2, {SCORED})",
        needs="bias",
    ),
    Row(
        "lfm2_moe use_expert_bias off",
        router("lfm2_moe", 2, use_expert_bias=False, norm_topk_prob=False),
        "gate = topk(2, score = sigmoid)",
    ),
    Row(
        "longcat_flash routed_scaling_factor",
        router("longcat_flash", 2, biased=True, moe_topk=2, zero_expert_num=0, routed_scaling_factor=6.0),
        "gate = topk(2, scale = 6, bias = online(1e-3))",
        needs="bias",
    ),
    Row("dbrx moe_normalize_expert_weights left out", dbrx(None), "gate = topk(2)"),
    Row("dbrx moe_normalize_expert_weights 1", dbrx(1.0), NORMAL),
    Row(
        "dbrx moe_normalize_expert_weights 2",
        dbrx(2.0),
        NORMAL,
        differs="weights",
        why="weights are divided by the root of the sum of their squares",
    ),
    Row("switch_transformers expert_capacity", switch, "gate = switch; capacity = factor(1e-6, min = 3)", drops=True),
    Row(
        "nllb_moe normalize_router_prob_before_dropping",
        nllb(normalize_router_prob_before_dropping=True),
        f"{NORMAL}; {NINE}",
        drops=True,
    ),
    Row(
        "nllb_moe batch_prioritized_routing",
        nllb(normalize_router_prob_before_dropping=True, batch_prioritized_routing=True),
        f"{NORMAL}; {NINE.replace(')', ', order = priority)')}",
        drops=True,
    ),
    Row(
        "nllb_moe normalize_router_prob_before_dropping left out",
        nllb(),
        f"{NORMAL}; {NINE.replace(')', ', renormalize = true)')}",
        drops=True,
    ),
    Row(
        "nllb_moe moe_eval_capacity_token_fraction",
        nllb(training=False, moe_eval_capacity_token_fraction=0.125),
        f"{NORMAL}; group = batch; capacity = factor(1, eval = 0.5, renormalize = true)",
        training=False,
        drops=True,
    ),
    Row(
        "llama4 num_experts_per_tok",
        llama4,
        "gate = topk(2, score = sigmoid)",
        differs="weights",
        why="scores multiply what goes into experts",
    ),
    Row(
        "router_aux_loss_coef, one layer",
        balanced(lambda logits: (logits,)),
        f"{NORMAL}; group = batch; balance = [switch_loss(2)]",
    ),
    Row(
        "router_aux_loss_coef, one layer, attention_mask",
        balanced(lambda logits: (logits,), padded=True),
        f"{NORMAL}; group = batch; balance = [switch_loss(2)]",
        needs="padding",
    ),
    Row(
        "router_aux_loss_coef, two layers",
        balanced(lambda logits: (logits, logits.roll(1, 1))),  # each of the two has the same term by itself
        f"{NORMAL}; group = batch; balance = [switch_loss(2)]",
        differs="loss",
        why="fractions and probabilities are over the tokens of all layers together, not a mean of layers' terms",
    ),
]
