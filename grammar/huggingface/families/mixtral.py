"""Mixtral (Mistral AI, arXiv 2401.04088) and MiniMax-M2."""

from __future__ import annotations

from dataclasses import replace

from moec.grammar.huggingface.config import Config
from moec.grammar.huggingface.family import Family
from moec.grammar.huggingface.parts import (
    attention_of,
    decoder,
    depth_of,
    eps_of,
    gated,
    heads_of,
    layers_of,
    window_of,
)
from moec.grammar.huggingface.positions import rope_of
from moec.grammar.huggingface.usual_rules import Names, rules_by
from moec.grammar.spec import Experts, Model, Moe, Online, TopK

BIAS = "e_score_correction_bias"
NAMES = Names(moe="block_sparse_moe.", expert=("w1", "w3", "w2"))


def _mixtral(config: Config) -> Model:
    depth, window = depth_of(config), window_of(config)
    _, _, width = heads_of(config)
    attention = attention_of(config, rope=rope_of(config, width, theta=1e6), window=window)
    config.inert("router_jitter_noise", 0)
    config.inert("attention_dropout", 0)
    experts = Experts(count=config.count("num_local_experts"), body=gated(config, config.count("intermediate_size")))
    moe = Moe(experts=experts, gate=TopK(k=config.count("num_experts_per_tok", default=2), normalize=True))
    return decoder(config, layers_of([attention] * depth, [moe] * depth), eps=eps_of(config, 1e-5))


def _minimax_m2(config: Config) -> Model:
    """Sigmoid scores with a bias that chooses; norms over all heads; rotary positions on a part of each head."""
    depth = depth_of(config)
    _, _, width = heads_of(config)
    stated = config.count("rotary_dim", default=width)
    config.only("use_qk_norm", True, why="transformers always norms queries and keys in this architecture")
    config.only("qk_norm_type", "per_layer")
    rope = rope_of(config, width, theta=5e6, fraction=stated / width, partial=True)
    attention = attention_of(config, rope=rope, qk_norm="projection")
    config.only("attn_type_list", [1] * depth)
    config.only("scoring_func", "sigmoid")
    config.only("use_routing_bias", True)
    config.only("shared_intermediate_size", 0)
    config.inert("router_jitter_noise", 0)
    config.inert("attention_dropout", 0)
    experts = Experts(count=config.count("num_local_experts"), body=gated(config, config.count("intermediate_size")))
    gate = TopK(k=config.count("num_experts_per_tok", default=8), score="sigmoid", normalize=True, bias=Online())
    layers = layers_of([attention] * depth, [Moe(experts=experts, gate=gate)] * depth)
    return decoder(config, layers, eps=eps_of(config, 1e-6))


LOCAL = {"num_experts": "num_local_experts"}
FAMILIES = (
    Family(
        "mixtral",
        "MixtralForCausalLM",
        _mixtral,
        rules_by(NAMES, Names()),
        defaults={"num_key_value_heads": 8},
        aliases=LOCAL,
    ),
    Family(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        _minimax_m2,
        rules_by(replace(NAMES, bias=BIAS), Names(bias=BIAS)),
        ignored=frozenset(("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "output_router_logits")),
        skipped=(r"model\.mtp_.*",),
        defaults={"num_key_value_heads": 8, "head_dim": 128},
        aliases=LOCAL,
    ),
)
