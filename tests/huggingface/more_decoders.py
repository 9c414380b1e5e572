"""Configs of decoders as in decoders.py: Hunyuan 3, Flint and MiMo-V2-Flash."""

from __future__ import annotations

from typing import Any

Keys = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"


def rope(**keys: Any) -> Keys:
    return {"head_dim": 8, "rope_parameters": {"rope_theta": 10_000.0, **keys}}


COMMON: dict[str, Keys] = {
    "usual": {},
    "tied": {"tie_word_embeddings": True},
    "one kv head": {"num_key_value_heads": 1},
    "as many kv heads": {"num_key_value_heads": 4},
    "eps": {"rms_norm_eps": 1e-2},
    "theta": rope(rope_type="default", rope_theta=123.0),
}
BIASES: dict[str, Keys] = {"biases": {"attention_bias": True}}
GELU: dict[str, Keys] = {"gelu": {"hidden_act": "gelu"}}
WINDOWS: Keys = {"layer_types": [SLIDING, SLIDING, FULL], "sliding_window": 5}
MIMO_ROPE: Keys = {
    FULL: {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 99.0, "partial_rotary_factor": 0.25},
}

MORE_ROWS: dict[str, tuple[Keys, dict[str, Keys]]] = {
    "hy_v3": (
        {
            "intermediate_size": 24, "moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2,
            "num_shared_experts": 1, "head_dim": 8,
        },
        {
            **COMMON, **BIASES, **GELU,
            "biases of feed-forwards": {"mlp_bias": True},
            "scale": {"router_scaling_factor": 0.7},
            "two shared": {"num_shared_experts": 2},
            "none shared": {"num_shared_experts": 0},
            "head_dim": {"head_dim": 12},
            "all sparse": {"mlp_layer_types": ["sparse"] * 3},
            "pattern of layers": {"mlp_layer_types": ["sparse", "dense", "sparse"]},
            "sum in bf16": {"enable_moe_fp32_combine": False},
        },
    ),
    "flint": (
        {
            "intermediate_size": 24, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28,
            "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 8, "mlp_only_layers": [0], **WINDOWS,
        },
        {
            **COMMON, **BIASES, **GELU,
            "not normalised": {"norm_topk_prob": False},
            "all sparse": {"mlp_only_layers": []},
            "dense by default": {"mlp_only_layers": None},
            "sparse step": {"mlp_only_layers": [], "decoder_sparse_step": 2},
            "layers by default": {"layer_types": None, "num_hidden_layers": 5},
            "all full": {"layer_types": [FULL] * 3},
            "head_dim": {"head_dim": 12},
        },
    ),
    "mimo_v2_flash": (
        {
            "intermediate_size": 24, "moe_intermediate_size": 20, "n_routed_experts": 8, "num_experts_per_tok": 2,
            "head_dim": 8, "v_head_dim": 8, "attention_value_scale": 1.0, "rope_parameters": MIMO_ROPE, **WINDOWS,
        },
        {
            **{name: keys for name, keys in COMMON.items() if name not in ("theta", "as many kv heads")}, **BIASES,
            **GELU,
            "groups": {"n_group": 4, "topk_group": 2},
            "scale": {"routed_scaling_factor": 3.5},
            "scale left out": {"routed_scaling_factor": None},
            "not normalised": {"norm_topk_prob": False},
            "values not scaled": {"attention_value_scale": None},
            "head_dim": {"head_dim": 16, "v_head_dim": 16},
            "layers by default": {"layer_types": None, "mlp_layer_types": None},
            "old window": {"sliding_window_size": 6},
            "positions by default": {"rope_parameters": None},
            "pattern of layers": {"mlp_layer_types": ["sparse", "dense", "sparse"]},
            "all full": {"layer_types": [FULL] * 3},
            "all full, as many kv heads": {"layer_types": [FULL] * 3, "num_key_value_heads": 4},
        },
    ),
    "aria_text": (
        {"intermediate_size": 20, "moe_num_experts": 6, "moe_topk": 2, "moe_num_shared_experts": 1},
        {
            **COMMON, **BIASES, **GELU,
            "biases of shared experts": {"mlp_bias": True},
            "two shared": {"moe_num_shared_experts": 2},
            "head_dim": {"head_dim": 12},
        },
    ),
    "cohere2_moe": (
        {
            "intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 8, "logit_scale": 0.3,
            "mlp_layer_types": ["dense", "sparse", "sparse"], **WINDOWS,
        },
        {
            **{name: keys for name, keys in COMMON.items() if name != "theta"}, **BIASES, **GELU,
            "theta": {"rope_theta": 123.0},
            "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "layer norm's eps": {"layer_norm_eps": 1e-2},
            "sigmoid": {"expert_selection_fn": "sigmoid"},
            "sigmoid, not normalised": {"expert_selection_fn": "sigmoid", "norm_topk_prob": False},
            "shared": {"num_shared_experts": 2, "shared_expert_combination_strategy": "sum"},
            "width of dense layers": {"prefix_dense_intermediate_size": 36},
            "dense without windows": {"layer_types": [FULL, SLIDING, FULL]},
            "dense without positions": {
                "layer_types": [FULL, SLIDING, FULL], "prefix_dense_sliding_window_pattern": 2
            },
            "head_dim": {"head_dim": 12},
            "layers by default": {
                "layer_types": None, "mlp_layer_types": None, "first_k_dense_replace": 2, "sliding_window_pattern": 3,
                "prefix_dense_sliding_window_pattern": 2, "num_hidden_layers": 7,
            },
        },
    ),
    "jamba": (
        {
            "intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2, "attn_layer_period": 1,
            "attn_layer_offset": 0, "expert_layer_period": 2, "expert_layer_offset": 1,
        },
        {
            **{name: keys for name, keys in COMMON.items() if name != "theta"}, **GELU,
            "head_dim": {"head_dim": 12},
            "sparse ends": {"expert_layer_offset": 0},
            "all sparse": {"expert_layer_period": 1, "expert_layer_offset": 0},
            "one sparse": {"expert_layer_period": 5, "expert_layer_offset": 2},
            "dense": {"num_experts": 1, "num_experts_per_tok": 1},
        },
    ),
    "lfm2_moe": (
        {
            "intermediate_size": 24, "moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2,
            "layer_types": [FULL] * 3, "num_dense_layers": 1,
        },
        {
            **{name: keys for name, keys in COMMON.items() if name != "eps"},
            "eps": {"norm_eps": 1e-2},
            "all sparse": {"num_dense_layers": 0},
            "without biases": {"use_expert_bias": False},
            "not normalised": {"norm_topk_prob": False},
            "scale": {"routed_scaling_factor": 2.5},
        },
    ),
}  # fmt: skip
