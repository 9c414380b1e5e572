"""Families with layers other than attention: Jamba (arXiv 2403.19887) and LFM2 (Liquid AI 2025).

Only models that consist of attention layers are imported; moec has no words for states and convolutions.
"""

from __future__ import annotations

from typing import Any

from moec.grammar.huggingface.config import Config
from moec.grammar.huggingface.family import Family
from moec.grammar.huggingface.parts import (
    attention_of,
    decoder,
    depth_of,
    eps_of,
    gated,
    heads_of,
    kinds_of_attention,
    layers_of,
    positive,
)
from moec.grammar.huggingface.positions import rope_of
from moec.grammar.huggingface.usual_rules import Names, rules_by
from moec.grammar.spec import Experts, Model, Moe, Online, TopK
from moec.grammar.spec.experts import SwiGLU

# ---- Jamba -----------------------------------------------------------------------------------------


def _jamba(config: Config) -> Model:
    """Attention without positions."""
    depth = depth_of(config)
    period, offset = config.count("attn_layer_period", default=8), config.count("attn_layer_offset", default=4, least=0)
    if any(number % period != offset for number in range(depth)):
        config.refuse("attn_layer_period", "the layers between those of attention are of Mamba")
    for key in config.values:
        if key.startswith(("mamba_", "use_mamba")) or key == "use_associative_scan":
            config.raw(key)
    attention = attention_of(config, rope=None)
    config.inert("attention_dropout", 0)
    hidden, count = config.count("intermediate_size"), config.count("num_experts", default=16)
    body = Moe(
        experts=Experts(count=count, body=gated(config, hidden)),
        gate=TopK(k=config.count("num_experts_per_tok", default=2)),
    )
    every, first = (
        config.count("expert_layer_period", default=2),
        config.count("expert_layer_offset", default=1, least=0),
    )
    dense = gated(config, hidden)
    bodies = [body if number % every == first and count > 1 else dense for number in range(depth)]
    return decoder(config, layers_of([attention] * depth, bodies), eps=eps_of(config, 1e-6))


def _jamba_keys(model: Model) -> dict[str, Any]:
    sparse = [number for number, layer in enumerate(model.layers) if layer.moe is not None]
    every = sparse[1] - sparse[0] if len(sparse) > 1 else model.depth
    return {
        "attn_layer_period": 1,
        "attn_layer_offset": 0,
        "expert_layer_period": every,
        "expert_layer_offset": sparse[0] if sparse else 0,
        **({} if sparse else {"num_experts": 1, "num_local_experts": 1, "num_experts_per_tok": 1}),
    }


# ---- LFM2 ------------------------------------------------------------------------------------------


def _lfm2(config: Config) -> Model:
    depth = depth_of(config)
    if not config.has("layer_types"):
        config.refuse("layer_types", "transformers needs it")
    kinds_of_attention(config, depth)
    attention = attention_of(config, rope=rope_of(config, heads_of(config)[2], theta=1e6), qk_norm="head")
    config.raw("conv_bias", "conv_L_cache")
    biased = config.flag("use_expert_bias", default=True)
    gate = TopK(
        k=config.count("num_experts_per_tok", default=4),
        score="sigmoid",
        normalize=config.flag("norm_topk_prob", default=True),
        scale=positive(config, "routed_scaling_factor", 1.0),
        bias=Online() if biased else "none",
    )
    expert = SwiGLU(hidden=config.count("moe_intermediate_size"))
    body = Moe(experts=Experts(count=config.count("num_experts", default=32), body=expert), gate=gate)
    first = config.count("num_dense_layers", default=2, least=0)
    dense = SwiGLU(hidden=config.count("intermediate_size"))
    bodies = [dense if number < first else body for number in range(depth)]
    tied = config.flag("tie_embedding", default=True)
    return decoder(config, layers_of([attention] * depth, bodies), eps=eps_of(config, 1e-5, "norm_eps"), tied=tied)


def _lfm2_keys(model: Model) -> dict[str, Any]:
    moes = [layer.moe for layer in model.layers if layer.moe is not None]
    dense = [layer.ffn for layer in model.layers if layer.ffn is not None]
    gate = moes[0].gate if moes else None
    widths = [getattr(body, "hidden", None) for body in (*dense, *(moe.parts[0].body for moe in moes))]
    return {
        "norm_eps": model.norm.eps,
        "use_expert_bias": isinstance(getattr(gate, "bias", None), Online),
        "intermediate_size": widths[0],
    }


LFM2 = Names(
    norm="model.embedding_norm.weight",
    norms={"attention_norm": "operator_norm", "ffn_norm": "ffn_norm"},
    out="out_proj",
    q_norm="q_layernorm",
    k_norm="k_layernorm",
    ffn="feed_forward.",
    dense=("w1", "w3", "w2"),
    moe="feed_forward.",
    bias="expert_bias",
    expert=("w1", "w3", "w2"),
)
JAMBA = Names(
    norm="model.final_layernorm.weight",
    norms={"attention_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"},
    ffn="feed_forward.",
    moe="feed_forward.",
    router="router.weight",
)

FAMILIES = (
    Family(
        "jamba",
        "JambaForCausalLM",
        _jamba,
        rules_by(JAMBA),
        _jamba_keys,
        ignored=frozenset(("layers_block_type", "layer_types", "layers_num_experts", "num_logits_to_keep")),
        defaults={"num_key_value_heads": 8},
        aliases={"num_local_experts": "num_experts"},
    ),
    Family("lfm2_moe", "Lfm2MoeForCausalLM", _lfm2, rules_by(LFM2), _lfm2_keys, defaults={"num_key_value_heads": 8}),
)
