"""The tiny configs on which every family is compared with transformers, one usual and those with unusual values.

`ROWS`: model type → (keys of every config, {name: further keys}). Names say which key is unusual.
"""

from __future__ import annotations

import operator
from copy import deepcopy
from functools import reduce
from typing import Any

from huggingface.equal import LEAVE_OUT, TINY
from huggingface.more_decoders import MORE_ROWS

Keys = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"


def rope(**keys: Any) -> Keys:
    return {"head_dim": 8, "rope_parameters": {"rope_theta": 10_000.0, **keys}}


YARN = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
LLAMA3 = rope(
    rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
LINEAR = rope(rope_type="linear", factor=2.0)
DYNAMIC = rope(rope_type="dynamic", factor=2.0)

COMMON: dict[str, Keys] = {
    "usual": {},
    "tied": {"tie_word_embeddings": True},
    "one kv head": {"num_key_value_heads": 1},
    "as many kv heads": {"num_key_value_heads": 4},
    "eps": {"rms_norm_eps": 1e-2},
    "theta": rope(rope_type="default", rope_theta=123.0),
}

ROWS: dict[str, tuple[Keys, dict[str, Keys]]] = {
    "mixtral": (
        {"intermediate_size": 20, "num_local_experts": 6, "num_experts_per_tok": 2},
        {
            **COMMON,
            "head_dim": {"head_dim": 12},
            "window": {"sliding_window": 5},
            "one choice": {"num_experts_per_tok": 1},
            "all experts": {"num_experts_per_tok": 6},
            "gelu": {"hidden_act": "gelu"},
            "yarn": YARN,
            "llama3": LLAMA3,
            "linear": LINEAR,
            "dynamic": DYNAMIC,
        },
    ),
    "minimax_m2": (
        {"intermediate_size": 20, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8},
        {
            **{name: keys for name, keys in COMMON.items() if name != "tied"},
            "head_dim": {"head_dim": 12},
            "partial": rope(rope_type="default", partial_rotary_factor=0.5),
            "rotary dim": {"rotary_dim": 4, "head_dim": 8},
            "gelu": {"hidden_act": "gelu"},
        },
    ),
    "qwen2_moe": (
        {
            "intermediate_size": 24,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
            "num_experts": 6,
            "num_experts_per_tok": 2,
        },
        {
            **COMMON,
            "normalised": {"norm_topk_prob": True},
            "no biases": {"qkv_bias": False},
            "sparse step": {"decoder_sparse_step": 2},
            "dense layers": {"mlp_only_layers": [0, 2]},
            "windows": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "layer_types": None},
            "window pattern": {
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": [SLIDING, FULL, SLIDING],
            },
        },
    ),
    "qwen3_moe": (
        {
            "intermediate_size": 24,
            "moe_intermediate_size": 20,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "head_dim": 8,
        },
        {
            **COMMON,
            "head_dim": {"head_dim": 16},
            "normalised": {"norm_topk_prob": True},
            "biases": {"attention_bias": True},
            "sparse step": {"decoder_sparse_step": 2},
            "dense layers": {"mlp_only_layers": [1]},
            "window": {"use_sliding_window": True, "sliding_window": 5},
            "yarn": YARN,
        },
    ),
    "mellum": (
        {
            "intermediate_size": 24,
            "moe_intermediate_size": 20,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 5,
            "layer_types": [SLIDING, SLIDING, FULL],
            "mlp_layer_types": ["sparse"] * 3,
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": 5e5},
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {
            **{name: keys for name, keys in COMMON.items() if name != "theta"},
            "dense layers": {"mlp_layer_types": ["dense", "sparse", "dense"]},
            "not normalised": {"norm_topk_prob": False},
            "biases": {"attention_bias": True},
            "all full": {"layer_types": [FULL] * 3},
            "head_dim": {"head_dim": 16},
            "window": {"sliding_window": 3},
            "positions by default": {"rope_parameters": None},
        },
    ),
    "olmoe": (
        {"intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2},
        {
            **COMMON,
            "normalised": {"norm_topk_prob": True},
            "clip": {"clip_qkv": 0.3},
            "biases": {"attention_bias": True},
        },
    ),
    "flex_olmo": (
        {"intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2},
        {**COMMON, "normalised": {"norm_topk_prob": True}, "biases": {"attention_bias": True}},
    ),
}

LATENT: Keys = {
    "intermediate_size": 24, "moe_intermediate_size": 20, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 6, "num_key_value_heads": 4,
}  # fmt: skip
OF_LATENT: dict[str, Keys] = {
    "usual": {},
    "tied": {"tie_word_embeddings": True},
    "eps": {"rms_norm_eps": 1e-2},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}},
    "direct queries": {"q_lora_rank": None},
    "biases": {"attention_bias": True},
    "scale": {"routed_scaling_factor": 3.5},
    "all sparse": {"first_k_dense_replace": 0},
    "two shared": {"n_shared_experts": 2},
    "yarn, sharpened": {"rope_parameters": {
        "rope_theta": 100.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
        "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 8, "beta_slow": 1,
    }},
}  # fmt: skip
MISTRAL4_ROPE: Keys = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0, "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.0,
}  # fmt: skip
SCORED: Keys = {
    "intermediate_size": 24, "moe_intermediate_size": 20, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 8,
}  # fmt: skip
OF_SCORED: dict[str, Keys] = {
    "groups": {"n_group": 4, "topk_group": 2},
    "scale": {"routed_scaling_factor": 3.5},
    "not normalised": {"norm_topk_prob": False},
    "two shared": {"n_shared_experts": 2},
}
WINDOWS: Keys = {"layer_types": [SLIDING, SLIDING, FULL], "sliding_window": 5}
BIASES: dict[str, Keys] = {"biases": {"attention_bias": True}}
MULTIPLIED: Keys = {
    "embedding_multiplier": 3.0, "logits_scaling": 2.5, "residual_multiplier": 0.22, "attention_multiplier": 0.3,
}  # fmt: skip
GRANITE: Keys = {"intermediate_size": 20, "num_local_experts": 6, "num_experts_per_tok": 2, **MULTIPLIED}
OF_GRANITE: dict[str, Keys] = {**COMMON, **BIASES, "no multipliers": dict.fromkeys(MULTIPLIED, 1.0)}
DBRX: Keys = {
    "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "hidden_size": LEAVE_OUT,
    "num_attention_heads": LEAVE_OUT, "num_hidden_layers": LEAVE_OUT, "num_key_value_heads": LEAVE_OUT,
    "max_position_embeddings": LEAVE_OUT,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.3, "rope_theta": 5e5},
    "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 20, "moe_num_experts": 6, "moe_top_k": 2},
}  # fmt: skip


def dbrx_of(part: str, **keys: Any) -> Keys:
    return {part: {**DBRX[part], **keys}}


ROWS |= {
    "deepseek_v2": (
        {**LATENT, "topk_method": "greedy"},
        {**OF_LATENT, "groups": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}},
    ),
    "deepseek_v3": (
        {**LATENT, "n_group": 4, "topk_group": 2},
        {
            **OF_LATENT,
            "one group": {"n_group": 1, "topk_group": 1},
            "not normalised": {"norm_topk_prob": False},
            "turning halves": {"rope_interleave": False},
        },
    ),
    "mistral4": (
        {**LATENT, "n_group": 4, "topk_group": 2, "rope_parameters": MISTRAL4_ROPE},
        {
            **{name: keys for name, keys in OF_LATENT.items() if name not in ("theta", "yarn, sharpened")},
            "theta": {"rope_parameters": {**MISTRAL4_ROPE, "rope_theta": 7.0}},
            "yarn, sharpened": {
                "rope_parameters": {**MISTRAL4_ROPE, **OF_LATENT["yarn, sharpened"]["rope_parameters"]}
            },
            "positions by default": {"rope_parameters": None},
            "one group": {"n_group": 1, "topk_group": 1},
            "not normalised": {"norm_topk_prob": False},
            "turning halves": {"rope_interleave": False},
        },
    ),
    "glm4_moe": (
        SCORED,
        {
            **COMMON, **OF_SCORED, **BIASES,
            "qk norm": {"use_qk_norm": True},
            "partial": rope(rope_type="default", partial_rotary_factor=0.25),
            "whole": rope(rope_type="default", partial_rotary_factor=1.0),
            "all sparse": {"first_k_dense_replace": 0},
            "head_dim": {"head_dim": 12},
        },
    ),
    "glm4_moe_lite": (
        {**LATENT, "first_k_dense_replace": LEAVE_OUT, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        {
            **{name: keys for name, keys in OF_LATENT.items() if name != "all sparse"},
            "all sparse": {"mlp_layer_types": ["sparse"] * 3},
            "turning halves": {"rope_interleave": False},
            "groups": {"n_group": 4, "topk_group": 2},
            "not normalised": {"norm_topk_prob": False},
        },
    ),
    "dots1": ({**SCORED, "head_dim": LEAVE_OUT}, {
        **COMMON, **OF_SCORED, **BIASES, "windows": WINDOWS,
        "windows from a layer on": {"layer_types": None, "sliding_window": 5, "max_window_layers": 2},
        "all sparse": {"first_k_dense_replace": 0},
    }),
    "solar_open": ({**SCORED, "first_k_dense_replace": LEAVE_OUT}, {
        **COMMON, **OF_SCORED, **BIASES, "head_dim": {"head_dim": 12},
    }),
    "exaone_moe": (
        {
            **{key: value for key, value in SCORED.items() if key not in ("n_routed_experts", "n_shared_experts")},
            "num_experts": 8, "num_shared_experts": 1, "head_dim": LEAVE_OUT, **WINDOWS,
        },
        {
            **COMMON,
            "groups": OF_SCORED["groups"], "scale": OF_SCORED["scale"], "not normalised": OF_SCORED["not normalised"],
            "no windows": {"layer_types": [FULL] * 3},
            "two shared": {"num_shared_experts": 2},
            "pattern of layers": {"mlp_layer_types": ["sparse", "dense", "sparse"]},
            "layers by default": {"layer_types": None, "num_hidden_layers": 5},
            "every second": {"layer_types": None, "sliding_window_pattern": 2},
            "all sparse": {"first_k_dense_replace": 0},
        },
    ),
    "gpt_oss": (
        {
            "intermediate_size": 20, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8, **WINDOWS,
            **rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, truncate=False),
        },
        {
            **COMMON,
            "no biases": {"attention_bias": False},
            "limit": {"swiglu_limit": 0.4, "swiglu_alpha": 1.1},
            "alternating": {"layer_types": None},
            "head_dim": {"head_dim": 12},
            "window": {"sliding_window": 3},
            "all full": {"layer_types": [FULL] * 3},
        },
    ),
    "granitemoe": (GRANITE, OF_GRANITE),
    "granitemoeshared": (
        {**GRANITE, "shared_intermediate_size": 12}, {**OF_GRANITE, "none shared": {"shared_intermediate_size": 0}},
    ),
    "granitemoehybrid": (
        {
            **GRANITE, "shared_intermediate_size": 12, "layer_types": [FULL] * 3, "position_embedding_type": "rope",
            "mamba_n_heads": 4, "mamba_d_head": 16,
        },
        {**OF_GRANITE, "no positions": {"position_embedding_type": None}, "dense": {"num_local_experts": 0}},
    ),
    "granitemoe_swa": (
        {**GRANITE, "shared_intermediate_size": 12, **WINDOWS, "layer_rope_theta": [1e4, 50.0, 0.0]},
        {
            **{name: keys for name, keys in OF_GRANITE.items() if name != "theta"},
            "none shared": {"shared_intermediate_size": 0},
            "one theta": {"layer_rope_theta": [77.0] * 3},
            "layers by default": {"layer_types": None, "layer_rope_theta": None},
            "window": {"sliding_window": 3},
        },
    ),
    "afmoe": (
        {
            "intermediate_size": 24, "moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2,
            "num_dense_layers": 1, "num_shared_experts": 1, "head_dim": 8, **WINDOWS,
        },
        {
            **COMMON, **BIASES,
            "all sparse": {"num_dense_layers": 0},
            "two shared": {"num_shared_experts": 2},
            "mup": {"mup_enabled": True},
            "scale": {"route_scale": 2.5},
            "head_dim": {"head_dim": 12},
            "every second": {"layer_types": None, "global_attn_every_n_layers": 2},
        },
    ),
    "dbrx": (
        DBRX,
        {
            "usual": {},
            "one kv head": dbrx_of("attn_config", kv_n_heads=1),
            "as many kv heads": dbrx_of("attn_config", kv_n_heads=4),
            "clip": dbrx_of("attn_config", clip_qkv=8.0),
            "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}},
            "not normalised": dbrx_of("ffn_config", moe_normalize_expert_weights=None),
        },
    ),
    "ernie4_5_moe": (
        {
            "intermediate_size": 24, "moe_intermediate_size": 20, "moe_num_experts": 6, "moe_k": 2,
            "moe_num_shared_experts": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 2,
        },
        {
            **COMMON,
            "biases": {"use_bias": True},
            "none shared": {"moe_num_shared_experts": 0},
            "interval": {"moe_layer_interval": 2, "moe_layer_start_index": 0},
            "some layers": {"moe_layer_start_index": 0, "moe_layer_end_index": 1},
        },
    ),
    "hunyuan_v1_moe": (
        {"intermediate_size": 20, "num_experts": 6, "moe_topk": 2, "head_dim": 8},
        {
            **COMMON, **BIASES,
            "head_dim": {"head_dim": 12},
            "alpha": rope(rope_type="dynamic", alpha=1000.0, factor=1.0),
        },
    ),
    "phimoe": (
        {"intermediate_size": 20, "num_local_experts": 6, "num_experts_per_tok": 2},
        {
            **COMMON, **BIASES,
            "bias of logits": {"lm_head_bias": True},
            "window": {"sliding_window": 5},
            "jitter": {"router_jitter_noise": 0.3},
        },
    ),
}  # fmt: skip

DENSE: Keys = {"intermediate_size": 24, "head_dim": 8}
QWEN_WINDOWS: dict[str, Keys] = {
    "windows": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "layer_types": None},
    "window pattern": {"use_sliding_window": True, "sliding_window": 5, "layer_types": [SLIDING, FULL, SLIDING]},
}
ROWS |= {
    "llama": (
        DENSE,
        {
            **COMMON, **BIASES,
            "biases of feed-forwards": {"mlp_bias": True}, "head_dim": {"head_dim": 12}, "llama3": LLAMA3, "yarn": YARN,
        },
    ),
    "mistral": (DENSE, {**COMMON, "no window": {"sliding_window": None}, "window": {"sliding_window": 5}}),
    "qwen2": ({"intermediate_size": 24}, {**COMMON, **QWEN_WINDOWS}),
    "qwen3": (DENSE, {**COMMON, **BIASES, **QWEN_WINDOWS, "head_dim": {"head_dim": 12}}),
}  # fmt: skip
ROWS |= MORE_ROWS

CASES = [(model_type, name) for model_type, (_, variants) in ROWS.items() for name in variants]


def config_of(model_type: str, name: str = "usual") -> Keys:
    """The keys of a case."""
    keys, variants = ROWS[model_type]
    return deepcopy({**keys, **variants[name]})


TAKE_AWAY = {
    "dense", "all full", "no windows", "none shared", "no positions", "all sparse", "no multipliers", "no biases",
    "values not scaled", "without biases",
}  # fmt: skip
"""Variants without something that others change; they are not in a family's first mix."""
APART = (
    ("deepseek_v2", "scale"), ("exaone_moe", "layers by default"), ("hy_v3", "none shared"),
    ("mimo_v2_flash", "positions by default"), ("qwen3_moe", "dense layers"),
)  # fmt: skip
"""Variants that with others give a config that the class refuses, no experts at all, or logits far above 1."""


def mixes_of(model_type: str) -> dict[str, Keys]:
    """The usual config, and few others with every variant in one of them: as many together as change other keys."""
    keys, variants = ROWS[model_type]
    alone = ["usual", *(name for of, name in APART if of == model_type)]
    mixes: list[list[str]] = [[]]
    for name in sorted(variants.keys() - alone, key=lambda name: (name in TAKE_AWAY, [*variants].index(name))):
        others = mixes[name in TAKE_AWAY :]
        mix = next((mix for mix in others if not any(variants[name].keys() & variants[each] for each in mix)), None)
        if mix is None:
            mixes.append(mix := [])
        mix.append(name)
    every = [*([name] for name in alone), *mixes]
    return {", ".join(mix): deepcopy(reduce(operator.or_, map(variants.get, mix), keys)) for mix in every}


def usual(model_type: str, **changes: Any) -> Keys:
    """The usual config of a row, as a dict of a `config.json`."""
    values = {**TINY, **config_of(model_type), **changes, "model_type": model_type}
    return {
        key: deepcopy(value)
        for key, value in values.items()
        if value != LEAVE_OUT and not key.endswith("_implementation")
    }
