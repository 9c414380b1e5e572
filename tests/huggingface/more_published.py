"""More configs as in published.py, of families with one or two models each, and all of them at a tiny size."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from huggingface.published import FULL, PUBLISHED, SLIDING, Keys, config

GRANITE: Keys = {
    "attention_bias": False, "rope_theta": 10000, "rope_scaling": None, "tie_word_embeddings": True,
    "router_aux_loss_coef": 0.001,
}  # fmt: skip
ERNIE: Keys = {
    "use_bias": False, "rope_theta": 500000, "moe_capacity": [64, 64, 64], "moe_gate": "topk", "rms_norm_eps": 1e-5,
    "moe_layer_interval": 1, "moe_use_aux_free": True, "num_nextn_predict_layers": 1, "moe_layer_start_index": 1,
}  # fmt: skip
LLAMA3: Keys = {"rope_scaling": {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}}  # fmt: skip


EVERY: dict[str, Keys] = {
    **PUBLISHED,
    "Granite-3.0-1B-A400M": config("granitemoe", 1024, 24, 16, 8, 49155, **{
        **GRANITE, "intermediate_size": 512, "num_local_experts": 32, "num_experts_per_tok": 8,
        "embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.015625,
    }),
    "Granite-3.0-3B-A800M": config("granitemoe", 1536, 32, 24, 8, 49155, **{
        **GRANITE, "intermediate_size": 512, "num_local_experts": 40, "num_experts_per_tok": 8,
        "embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.015625, "rope_theta": 10000000.0, "max_position_embeddings": 131072,
    }),
    "PowerMoE-3B": config("granitemoe", 1536, 32, 24, 8, 49152, **{
        **GRANITE, "intermediate_size": 512, "num_local_experts": 40, "num_experts_per_tok": 8,
        "embedding_multiplier": 12, "logits_scaling": 6, "residual_multiplier": 0.22, "attention_multiplier": 0.015625,
    }),
    "Granite, shared": config("granitemoeshared", 1536, 32, 24, 8, 49152, **{
        **GRANITE, "intermediate_size": 512, "num_local_experts": 40, "num_experts_per_tok": 8,
        "shared_intermediate_size": 1024, "attention_multiplier": 0.015625,
    }),
    "Granite-4.0-micro": config("granitemoehybrid", 2560, 40, 40, 8, 100352, **{
        **GRANITE, "intermediate_size": 8192, "shared_intermediate_size": 8192, "num_local_experts": 0,
        "num_experts_per_tok": 0, "layer_types": ["attention"] * 40, "position_embedding_type": "rope",
        "attention_multiplier": 0.015625, "embedding_multiplier": 12, "logits_scaling": 10,
        "residual_multiplier": 0.22, "rope_theta": 10000000, "mamba_n_heads": 64, "mamba_d_head": 80,
        "mamba_expand": 2, "rms_norm_eps": 1e-5,
    }),
    "Trinity-Mini": config(
        "afmoe", 2048, 32, 32, 4, 200192, head_dim=128, intermediate_size=6144, moe_intermediate_size=1024,
        num_experts=128, num_experts_per_tok=8, num_shared_experts=1, num_dense_layers=2, n_group=1, topk_group=1,
        score_func="sigmoid", route_norm=True, route_scale=2.826, mup_enabled=True, sliding_window=2048,
        global_attn_every_n_layers=4, load_balance_coeff=0.001, rope_theta=10000, rope_scaling=None, rms_norm_eps=1e-5,
        layer_types=[SLIDING, SLIDING, SLIDING, FULL] * 8, num_expert_groups=1, num_limited_groups=1,
    ),
    "DBRX": {
        "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768,
        "vocab_size": 100352, "torch_dtype": "bfloat16", "resid_pdrop": 0.0, "emb_pdrop": 0.0,
        "tie_word_embeddings": False, "rope_theta": 500000,
        "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500000},
        "ffn_config": {
            "ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4, "moe_loss_weight": 0.05,
            "moe_jitter_eps": 0.01,
        },
    },
    "ERNIE-4.5-21B-A3B": config("ernie4_5_moe", 2560, 28, 20, 4, 103424, **{
        **ERNIE, "moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2, "moe_layer_end_index": 29,
        "intermediate_size": 12288, "moe_intermediate_size": 1536, "tie_word_embeddings": True,
    }),
    "ERNIE-4.5-300B-A47B": config("ernie4_5_moe", 8192, 54, 64, 8, 103424, **{
        **ERNIE, "moe_num_experts": 64, "moe_k": 8, "moe_num_shared_experts": 0, "moe_layer_start_index": 3,
        "moe_layer_end_index": 53, "intermediate_size": 28672, "moe_intermediate_size": 3584,
    }),
    "ERNIE, by the usual name": config("ernie4_5_moe", 2560, 28, 20, 4, 103424, **{
        **ERNIE, "num_experts": 64, "num_experts_per_tok": 8, "moe_num_shared_experts": 2, "moe_layer_end_index": -1,
        "intermediate_size": 12288, "moe_intermediate_size": 1536,
    }),
    "Hunyuan-A13B": config(
        "hunyuan_v1_moe", 4096, 32, 32, 8, 128167, head_dim=128, intermediate_size=3072, num_experts=64,
        moe_topk=[8] * 32, moe_intermediate_size=[3072] * 32, num_shared_expert=[1] * 32, use_qk_norm=True,
        use_mixed_mlp_moe=True, use_cla=False, rope_theta=10000.0, attention_bias=False, rms_norm_eps=1e-5,
        rope_scaling={"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
                      "mscale_all_dim": 1.0, "type": "dynamic"}, moe_layer_num_skipped=0, moe_drop_tokens=False,
    ),
    "Hunyuan, by the usual name": config(
        "hunyuan_v1_moe", 4096, 32, 32, 8, 128167, head_dim=128, intermediate_size=3072, num_experts=64,
        num_experts_per_tok=8, use_qk_norm=True, rope_theta=10000.0, attention_bias=False, rms_norm_eps=1e-5,
    ),
    "Hunyuan 3": config(
        "hy_v3", 4096, 80, 64, 8, 120832, head_dim=128, intermediate_size=13312, moe_intermediate_size=1536,
        num_experts=192, num_experts_per_tok=8, num_shared_experts=1, router_scaling_factor=2.826,
        first_k_dense_replace=1, rms_norm_eps=1e-5, enable_moe_fp32_combine=False, num_nextn_predict_layers=1,
        rope_parameters={"rope_theta": 11158840.0, "rope_type": "default"},
    ),
    "Phi-3.5-MoE": config(
        "phimoe", 4096, 32, 32, 8, 32064, intermediate_size=6400, num_local_experts=16, num_experts_per_tok=2,
        rope_theta=10000.0, attention_bias=True, lm_head_bias=True, sliding_window=131072, rms_norm_eps=1e-5,
        max_position_embeddings=131072, router_jitter_noise=0.01, input_jitter_noise=0.01, hidden_dropout=0.0,
    ),
    "Phi-tiny-MoE": config(
        "phimoe", 4096, 32, 16, 4, 32064, intermediate_size=448, num_local_experts=16, num_experts_per_tok=2,
        rope_theta=10000.0, attention_bias=True, lm_head_bias=True, sliding_window=2047, rms_norm_eps=1e-5,
        max_position_embeddings=4096, head_dim=128,
    ),
    "MiniMax-M2": config(
        "minimax_m2", 3072, 62, 48, 8, 200064, head_dim=128, intermediate_size=1536, num_local_experts=256,
        num_experts_per_tok=8, rotary_dim=64, rope_theta=5000000, use_qk_norm=True, qk_norm_type="per_layer",
        scoring_func="sigmoid", use_routing_bias=True, shared_intermediate_size=0, attn_type_list=[1] * 62,
        use_mtp=True, num_mtp_modules=3, mtp_transformer_layers=1, router_jitter_noise=0.0,
    ),
    "MiMo-V2-Flash, values as keys": config(
        "mimo_v2_flash", 4096, 48, 64, 4, 152576, head_dim=192, v_head_dim=192, attention_value_scale=1.0,
        intermediate_size=16384, moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=None,
        num_experts_per_tok=8, routed_scaling_factor=None, scoring_func="sigmoid", topk_method="noaux_tc",
        norm_topk_prob=True, n_group=1, topk_group=1, rope_theta=5000000, swa_rope_theta=10000,
        partial_rotary_factor=0.334, sliding_window=128, sliding_window_size=128, attention_bias=False,
        rms_norm_eps=1e-5,
    ),
    "Flint": config(
        "flint", 2048, 24, 16, 4, 128256, head_dim=128, intermediate_size=8192, moe_intermediate_size=1024,
        shared_expert_intermediate_size=1024, num_experts=64, num_experts_per_tok=6, decoder_sparse_step=1,
        norm_topk_prob=True, sliding_window=513, rope_theta=10000.0,
    ),
    "Mellum 2": config(
        "mellum", 2304, 32, 32, 4, 98304, head_dim=128, intermediate_size=7168, moe_intermediate_size=896,
        num_experts=64, num_experts_per_tok=8, norm_topk_prob=True, sliding_window=1024,
        layer_types=[SLIDING, SLIDING, SLIDING, FULL] * 8, num_mtp_layers=1,
        rope_parameters={
            FULL: {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 16.0,
                   "original_max_position_embeddings": 8192, "beta_fast": 32.0, "beta_slow": 1.0,
                   "attention_factor": 1.2772588722239782},
            SLIDING: {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "Aria's text model": config(
        "aria_text", 2560, 28, 20, 20, 100352, intermediate_size=1664, moe_num_experts=64, moe_topk=6,
        moe_num_shared_experts=2, rope_theta=5000000, rope_scaling=None, max_position_embeddings=65536,
    ),
    "Jamba, attention alone": config(
        "jamba", 4096, 4, 32, 8, 65536, intermediate_size=14336, num_experts=16, num_experts_per_tok=2,
        attn_layer_period=1, attn_layer_offset=0, expert_layer_period=2, expert_layer_offset=1, mamba_d_conv=4,
        mamba_d_state=16, mamba_dt_rank=256, mamba_expand=2, use_mamba_kernels=True, num_logits_to_keep=1,
    ),
    "LFM2-8B-A1B, attention alone": config(
        "lfm2_moe", 2048, 6, 32, 8, 65536, intermediate_size=7168, moe_intermediate_size=1792, num_experts=32,
        num_experts_per_tok=4, num_dense_layers=2, layer_types=[FULL] * 6, norm_topk_prob=True, use_expert_bias=True,
        routed_scaling_factor=1.0, rope_theta=1000000.0, norm_eps=1e-5, conv_L_cache=3, conv_bias=False,
        tie_word_embeddings="left out", tie_embedding=True, rms_norm_eps="left out",
    ),
    "Command A+, added shared experts": config(
        "cohere2_moe", 4096, 32, 64, 8, 256000, head_dim=128, intermediate_size=2048, num_experts=128,
        num_experts_per_tok=8, num_shared_experts=1, shared_expert_combination_strategy="sum", logit_scale=0.25,
        first_k_dense_replace=1, prefix_dense_intermediate_size=12288, expert_selection_fn="sigmoid",
        sliding_window=4096, sliding_window_pattern=4, layer_norm_eps=1e-5, rms_norm_eps=None, rope_theta=50000.0,
        tie_word_embeddings=True,
    ),
    "Llama-2-7B": config(
        "llama", 4096, 32, 32, 32, 32000, intermediate_size=11008, rms_norm_eps=1e-5, max_position_embeddings=4096,
        pretraining_tp=1, rope_scaling=None,
    ),
    "Llama-3.1-8B": config(
        "llama", 4096, 32, 32, 8, 128256, intermediate_size=14336, rms_norm_eps=1e-5, rope_theta=500000.0,
        attention_bias=False, mlp_bias=False, max_position_embeddings=131072, **LLAMA3,
    ),
    "Llama, heads left out": config("llama", 2048, 16, 16, None, 32000, intermediate_size=5632, rope_theta=10000.0),
    "Mistral-7B-v0.1": config(
        "mistral", 4096, 32, 32, 8, 32000, intermediate_size=14336, sliding_window=4096, rope_theta=10000.0,
        rms_norm_eps=1e-5,
    ),
    "Mistral-Nemo": config(
        "mistral", 5120, 40, 32, 8, 131072, intermediate_size=14336, head_dim=128, sliding_window=None,
        rope_theta=1000000.0, rms_norm_eps=1e-5, max_position_embeddings=131072,
    ),
    "Qwen2.5-7B": config(
        "qwen2", 3584, 28, 28, 4, 152064, intermediate_size=18944, rope_theta=1000000.0, sliding_window=131072,
        use_sliding_window=False, max_window_layers=28, max_position_embeddings=131072,
    ),
    "Qwen2.5-0.5B": config(
        "qwen2", 896, 24, 14, 2, 151936, intermediate_size=4864, rope_theta=1000000.0, sliding_window=32768,
        use_sliding_window=False, max_window_layers=24, tie_word_embeddings=True,
    ),
    "Qwen3-8B": config(
        "qwen3", 4096, 36, 32, 8, 151936, head_dim=128, intermediate_size=12288, attention_bias=False,
        rope_theta=1000000, rope_scaling=None, sliding_window=None, use_sliding_window=False, max_window_layers=36,
        max_position_embeddings=40960,
    ),
}  # fmt: skip

SMALL: Keys = {
    "vocab_size": 64, "hidden_size": 32, "d_model": 32, "num_attention_heads": 4, "n_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "v_head_dim": 6, "num_hidden_layers": 4, "n_layers": 4,
    "intermediate_size": 24, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28,
    "shared_intermediate_size": 28, "prefix_dense_intermediate_size": 28, "ffn_hidden_size": 20, "kv_n_heads": 2,
    "num_local_experts": 16, "num_experts": 16, "n_routed_experts": 16, "moe_num_experts": 16, "kv_lora_rank": 8,
    "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "rotary_dim": 4, "sliding_window": 5,
    "sliding_window_size": 5, "max_position_embeddings": 64, "max_seq_len": 64, "mamba_n_heads": 4, "mamba_d_head": 16,
    "original_max_position_embeddings": 32, "initial_context_length": 32, "num_dense_layers": 1,
}  # fmt: skip


def shrunk(values: Keys) -> Keys:
    """The config with small numbers in place of large ones; its spellings, factors and bases stay."""
    layers = values.get("num_hidden_layers", values.get("n_layers", 0))

    def small(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {inner: small(inner, each) for inner, each in value.items()}
        if isinstance(value, list) and len(value) == layers:
            return [small(key, each) for each in value[:4]]
        if key == "moe_layer_end_index":
            return min(value, 3)
        return SMALL[key] if key in SMALL and type(value) is int and value > 1 else value

    found = {key: small(key, value) for key, value in deepcopy(values).items()}
    if values["num_attention_heads" if "n_heads" not in values else "n_heads"] == values.get("num_key_value_heads"):
        found["num_key_value_heads"] = 4
    if values.get("v_head_dim") == values.get("head_dim") is not None:
        found["v_head_dim"] = found["head_dim"]
    found |= {"torch_dtype": None, "pad_token_id": 0}  # a sum in bf16 depends on its order
    if values["model_type"] == "hunyuan_v1_moe" and "moe_intermediate_size" in found:
        found["moe_intermediate_size"] = [found["intermediate_size"]] * 4
    return found
