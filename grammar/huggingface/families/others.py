"""Families of one architecture each: AFMoE, ERNIE-4.5, Hunyuan and Phi-3.5-MoE."""

from __future__ import annotations

import math
from typing import Any

from moec.grammar.huggingface.config import Config
from moec.grammar.huggingface.family import Family
from moec.grammar.huggingface.keys import kinds_by_positions
from moec.grammar.huggingface.parts import (
    FULL,
    SLIDING,
    attention_of,
    bias_of,
    decoder,
    depth_of,
    eps_of,
    gated,
    heads_of,
    kinds_of_attention,
    layers_of,
    positive,
    shared_of,
    window_of,
    windows_of,
)
from moec.grammar.huggingface.positions import rope_of
from moec.grammar.huggingface.usual_rules import Names, rules_by
from moec.grammar.spec import Experts, LayerNorm, Model, Moe, Online, SparseMixer, TopK

# ---- AFMoE (Arcee 2025) ----------------------------------------------------------------------------


def _afmoe(config: Config) -> Model:
    """Gated attention, positions in layers with windows only, norms around each part, sigmoid scores with a bias."""
    depth, step = depth_of(config), config.count("global_attn_every_n_layers", default=4)
    kinds = kinds_of_attention(config, depth, lambda n: FULL if (n + 1) % step == 0 else SLIDING)
    rope = rope_of(config, heads_of(config)[2])
    attentions = [
        attention_of(
            config,
            rope=rope if kind == SLIDING else None,
            bias=bias_of(config, "attention_bias"),
            qk_norm="head",
            output_gate="element",
            window=window,
        )
        for kind, window in zip(kinds, windows_of(config, kinds, default=1024), strict=True)
    ]
    config.inert("attention_dropout", 0)
    for key, value in (("score_func", "sigmoid"), ("route_norm", True), ("n_group", 1), ("topk_group", 1)):
        config.only(key, value)
    hidden, number = config.count("moe_intermediate_size"), shared_of(config, "num_shared_experts", 0)
    gate = TopK(
        k=config.count("num_experts_per_tok"),
        score="sigmoid",
        normalize=True,
        scale=positive(config, "route_scale", 1.0),
        bias=Online(),
    )
    body = Moe(
        experts=Experts(count=config.count("num_experts"), body=gated(config, hidden)),
        gate=gate,
        shared=gated(config, hidden * number) if number else None,
    )
    first = config.count("num_dense_layers", default=1, least=0)
    dense = gated(config, config.count("intermediate_size")) if first else None
    config.raw("intermediate_size")
    bodies: list[Any] = [dense if n < first else body for n in range(depth)]
    scale = math.sqrt(config.count("hidden_size")) if config.flag("mup_enabled", default=False) else 1.0
    return decoder(
        config,
        layers_of(attentions, bodies),
        eps=eps_of(config, 1e-5),
        norm_place="sandwich",
        embedding={"multiplier": scale},
    )


AFMOE_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "ffn_post_norm": "post_mlp_layernorm",
}

# ---- ERNIE-4.5 (Baidu 2025) ------------------------------------------------------------------------


def _ernie(config: Config) -> Model:
    """Softmax scores with a bias that chooses; neighbours turn together; sparse layers by interval."""
    depth, has_bias = depth_of(config), config.flag("use_bias", default=False)
    rope = rope_of(config, heads_of(config)[2], theta=5e5, interleaved=True)
    attention = attention_of(config, rope=rope, bias="all" if has_bias else "none")
    config.inert("attention_dropout", 0)
    config.only("moe_use_aux_free", True)
    if config.number("moe_norm_min", default=1e-12) > 1e-6:
        config.refuse("moe_norm_min", "moec divides the weights by their sum, however small it is")
    hidden = config.count("moe_intermediate_size")
    number = shared_of(config, "moe_num_shared_experts", 2)
    body = Moe(
        experts=Experts(count=config.count("moe_num_experts"), body=gated(config, hidden)),
        gate=TopK(k=config.count("moe_k", default=6), normalize=True, bias=Online()),
        shared=gated(config, hidden * number, bias=has_bias) if number else None,
    )
    every, first = (
        config.count("moe_layer_interval", default=1),
        config.count("moe_layer_start_index", default=1, least=0),
    )
    last = config.count("moe_layer_end_index", default=-1, least=-1)
    last = depth - 1 if last == -1 else last
    sparse = [(n + 1) % every == 0 and first <= n <= last for n in range(depth)]
    dense = None if all(sparse) else gated(config, config.count("intermediate_size"), bias=has_bias)
    config.raw("intermediate_size")
    bodies: list[Any] = [body if is_sparse else dense for is_sparse in sparse]
    head = {"logits_bias": has_bias}
    return decoder(config, layers_of([attention] * depth, bodies), eps=eps_of(config, 1e-5), tied=True, embedding=head)


def _ernie_keys(model: Model) -> dict[str, Any]:
    sparse = [number for number, layer in enumerate(model.layers) if layer.moe is not None] or [model.depth]
    step = sparse[1] - sparse[0] if len(sparse) > 1 else 1
    return {
        "moe_layer_interval": step, "moe_layer_start_index": sparse[0], "moe_layer_end_index": sparse[-1],
    }  # fmt: skip


# ---- Hunyuan (Tencent 2025) ------------------------------------------------------------------------


def _hunyuan(config: Config) -> Model:
    """Norms of queries and keys after their positions, and a shared expert as wide as the others."""
    depth = depth_of(config)
    rope = rope_of(config, heads_of(config)[2], by_alpha=True)
    attention = attention_of(
        config, rope=rope, bias=bias_of(config, "attention_bias"), qk_norm="head", qk_norm_place="after_rope"
    )
    config.inert("attention_dropout", 0)
    for key, value in (("use_cla", False), ("use_mla", False), ("use_qk_norm", True), ("use_mixed_mlp_moe", True)):
        config.only(key, value)
    config.only("num_shared_expert", 1, [1] * depth)
    hidden = config.count("intermediate_size")
    config.only("moe_intermediate_size", hidden, [hidden] * depth)
    count, k = (_one_for_all(config, key, depth) for key in ("num_experts", "moe_topk"))
    moe = Moe(
        experts=Experts(count=count, body=gated(config, hidden)),
        gate=TopK(k=k, normalize=True),
        shared=gated(config, hidden),
    )
    return decoder(config, layers_of([attention] * depth, [moe] * depth), eps=eps_of(config, 1e-5))


def _one_for_all(config: Config, key: str, depth: int) -> int:
    """A number, or a list with the same number for each layer."""
    value = config.raw(key)
    if isinstance(value, list | tuple):
        numbers = config.numbers(key, length=depth) or (1.0,)
        if len(set(numbers)) > 1:
            config.refuse(key, "layers differ in it, and moec's reader has one number for all")
        return int(numbers[0])
    return config.count(key)


# ---- Phi-3.5-MoE (Microsoft 2024, arXiv 2404.14219) ------------------------------------------------


def _phi(config: Config) -> Model:
    """Sparsemixer as the gate, norms with biases, a bias of the logits."""
    depth, eps = depth_of(config), eps_of(config, 1e-5)
    attention = attention_of(
        config,
        rope=rope_of(config, heads_of(config)[2], theta=1e6),
        bias=bias_of(config, "attention_bias"),
        window=window_of(config),
    )
    config.inert("attention_dropout", 0)
    config.inert("hidden_dropout", 0)
    config.inert("input_jitter_noise", 0)
    config.only("num_experts_per_tok", 2)
    jitter = config.number("router_jitter_noise", default=0.01)
    experts = Experts(count=config.count("num_local_experts"), body=gated(config, config.count("intermediate_size")))
    moe = Moe(experts=experts, gate=SparseMixer(jitter=jitter))
    return decoder(
        config,
        layers_of([attention] * depth, [moe] * depth),
        eps=eps,
        norm=LayerNorm(eps=eps),
        embedding={"logits_bias": config.flag("lm_head_bias", default=False)},
    )


def _phi_keys(model: Model) -> dict[str, Any]:
    gates = [layer.moe.gate for layer in model.layers if layer.moe is not None]
    return {"router_jitter_noise": getattr(gates[0], "jitter", None)} if gates else {}


FAMILIES = (
    Family(
        "afmoe",
        "AfmoeForCausalLM",
        _afmoe,
        rules_by(Names(norms=AFMOE_NORMS, router="router.gate.weight", bias="expert_bias")),
        lambda model: {"mup_enabled": getattr(model.embedding, "multiplier", 1.0) != 1.0, **kinds_by_positions(model)},
        ignored=frozenset(("load_balance_coeff", "num_expert_groups", "num_limited_groups", "rope_scaling")),
        defaults={"head_dim": 128, "num_shared_experts": 2},
    ),
    Family(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        _ernie,
        rules_by(
            Names(bias="moe_statics.e_score_correction_bias", bias_form="1 e"),
            Names(bias="gate.moe_statics.e_score_correction_bias", bias_form="1 e"),
        ),
        _ernie_keys,
        ignored=frozenset(("num_nextn_predict_layers", "moe_capacity", "moe_gate", "compression_ratio")),
        skipped=(r"model\.mtp_.*",),
        defaults={"num_key_value_heads": 4},
        aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        fp32=("routers",),
    ),
    Family(
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        _hunyuan,
        rules_by(
            Names(router="gate.wg.weight", shared="mlp.shared_mlp.", q_norm="query_layernorm", k_norm="key_layernorm")
        ),
        ignored=frozenset(
            ("eod_token_id", "moe_drop_tokens", "moe_random_routing_dropped_token", "moe_layer_num_skipped")
        ),
        aliases={"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
        fp32=("routers",),
    ),
    Family(
        "phimoe",
        "PhimoeForCausalLM",
        _phi,
        rules_by(Names(moe="block_sparse_moe.", expert=("w1", "w3", "w2")), Names(moe="mlp.", router="router.weight")),
        _phi_keys,
        defaults={"num_key_value_heads": 8},
    ),
)
