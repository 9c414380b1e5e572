"""Configs as model pages have them: the keys that decide the model, spelt as there, and the same at a tiny size."""

from __future__ import annotations

from typing import Any

Keys = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"


def config(model_type: str, dim: int, layers: int, heads: int, kv: int | None, vocab: int, **keys: Any) -> Keys:
    """A config with the keys that nearly all have."""
    common = {
        "model_type": model_type, "hidden_size": dim, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "vocab_size": vocab, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True, "transformers_version": "4.40.0",
        "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
    }  # fmt: skip
    return {key: value for key, value in {**common, **keys}.items() if value != "left out"}


def yarn(factor: float, original: int, **keys: Any) -> Keys:
    return {"rope_scaling": {"type": "yarn", "factor": factor, "original_max_position_embeddings": original, **keys}}


def mixtral(dim: int, layers: int, heads: int, hidden: int, **keys: Any) -> Keys:
    return config(
        "mixtral", dim, layers, heads, 8, 32000, intermediate_size=hidden, num_local_experts=8, num_experts_per_tok=2,
        rope_theta=1e6, sliding_window=None, rms_norm_eps=1e-5, router_aux_loss_coef=0.02, output_router_logits=False,
        **keys,
    )  # fmt: skip


def qwen_moe(kind: str, dim: int, layers: int, heads: int, kv: int, experts: int, k: int, **keys: Any) -> Keys:
    usual: Keys = {
        "num_experts": experts, "num_experts_per_tok": k, "decoder_sparse_step": 1, "rope_theta": 1e6,
        "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": layers, "norm_topk_prob": False,
    }  # fmt: skip
    return config(kind, dim, layers, heads, kv, 151936, **{**usual, **keys})


def latent(kind: str, dim: int, layers: int, heads: int, vocab: int, experts: int, **keys: Any) -> Keys:
    """DeepSeek's attention."""
    usual: Keys = {
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": experts, "moe_layer_freq": 1, "ep_size": 1, "pretraining_tp": 1, "seq_aux": True,
        "aux_loss_alpha": 0.001, "attention_bias": False, "rope_theta": 10000,
    }  # fmt: skip
    return config(kind, dim, layers, heads, heads, vocab, **{**usual, **keys})


V2: Keys = {"scoring_func": "softmax", "norm_topk_prob": False, "first_k_dense_replace": 1, "n_shared_experts": 2}
V2_YARN = yarn(40, 4096, beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=0.707)
V3: Keys = {
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5, "intermediate_size": 18432, "moe_intermediate_size": 2048,
}  # fmt: skip
V3_YARN = yarn(40, 4096, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)
GLM: Keys = {
    "attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "n_shared_experts": 1, "num_experts_per_tok": 8, "rope_theta": 1000000,
    "rope_scaling": None, "rms_norm_eps": 1e-5, "num_nextn_predict_layers": 1,
}  # fmt: skip
OSS: Keys = {
    "num_experts_per_tok": 4, "experts_per_token": 4, "initial_context_length": 4096, "head_dim": 64,
    "attention_bias": True, "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5,
    "intermediate_size": 2880, "max_position_embeddings": 131072,
}  # fmt: skip
OSS_YARN: Keys = {"rope_scaling": {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
    "rope_type": "yarn", "truncate": False,
}}  # fmt: skip


def gpt_oss(layers: int, experts: int, **keys: Any) -> Keys:
    kinds = [SLIDING, FULL] * (layers // 2)
    return config("gpt_oss", 2880, layers, 64, 8, 201088, **{
        **OSS, "num_local_experts": experts, "layer_types": kinds, **OSS_YARN, **keys,
    })  # fmt: skip


PUBLISHED: dict[str, Keys] = {
    "Mixtral-8x7B": mixtral(4096, 32, 32, 14336),
    "Mixtral-8x22B": mixtral(6144, 56, 48, 16384, max_position_embeddings=65536),
    "Mixtral, theta left out": {k: v for k, v in mixtral(4096, 32, 32, 14336).items() if k != "rope_theta"},
    "Mixtral of 5.x": {
        **{k: v for k, v in mixtral(4096, 32, 32, 14336).items() if k not in ("rope_theta", "torch_dtype")},
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "head_dim": None,
    },
    "Qwen1.5-MoE-A2.7B": qwen_moe(
        "qwen2_moe", 2048, 24, 16, 16, 60, 4, intermediate_size=5632, moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632, max_window_layers=21,
    ),
    "Qwen2-57B-A14B": qwen_moe(
        "qwen2_moe", 3584, 28, 28, 4, 64, 8, intermediate_size=18944, moe_intermediate_size=2560,
        shared_expert_intermediate_size=20480, mlp_only_layers=[], qkv_bias=True,
    ),
    "Qwen3-30B-A3B": qwen_moe(
        "qwen3_moe", 2048, 48, 32, 4, 128, 8, head_dim=128, intermediate_size=6144, moe_intermediate_size=768,
        norm_topk_prob=True, mlp_only_layers=[], sliding_window=None, rope_scaling=None, attention_bias=False,
    ),
    "Qwen3-235B-A22B": qwen_moe(
        "qwen3_moe", 4096, 94, 64, 4, 128, 8, head_dim=128, intermediate_size=12288, moe_intermediate_size=1536,
        norm_topk_prob=True, mlp_only_layers=[], sliding_window=None, rope_theta=5e6, attention_bias=False,
    ),
    "Qwen3-Coder-480B-A35B": qwen_moe(
        "qwen3_moe", 6144, 62, 96, 8, 160, 8, head_dim=128, intermediate_size=8192, moe_intermediate_size=2560,
        norm_topk_prob=True, rope_theta=10000000, shared_expert_intermediate_size=0, qkv_bias=False,
    ),
    "Qwen3-30B of yarn": qwen_moe(
        "qwen3_moe", 2048, 48, 32, 4, 128, 8, head_dim=128, intermediate_size=6144, moe_intermediate_size=768,
        norm_topk_prob=True, **yarn(4.0, 32768),
    ),
    "OLMoE-1B-7B": config(
        "olmoe", 2048, 16, 16, 16, 50304, intermediate_size=1024, num_experts=64, num_experts_per_tok=8, clip_qkv=None,
        norm_topk_prob=False, rope_theta=10000.0, rope_scaling=None, rms_norm_eps=1e-5, max_position_embeddings=4096,
    ),
    "FlexOlmo-7x7B": config(
        "flex_olmo", 4096, 32, 32, 32, 100352, intermediate_size=11008, num_experts=7, num_experts_per_tok=5,
        norm_topk_prob=False, rope_theta=500000, rope_scaling=None, attention_bias=False,
    ),
    "DeepSeek-V2": latent("deepseek_v2", 5120, 60, 128, 102400, 160, **{
        **V2, **V2_YARN, "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3,
        "num_experts_per_tok": 6, "routed_scaling_factor": 16.0, "intermediate_size": 12288,
        "moe_intermediate_size": 1536, "max_position_embeddings": 163840,
    }),
    "DeepSeek-V2-Lite": latent("deepseek_v2", 2048, 27, 16, 102400, 64, **{
        **V2, **V2_YARN, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6,
        "routed_scaling_factor": 1.0, "intermediate_size": 10944, "moe_intermediate_size": 1408, "q_lora_rank": None,
        "max_position_embeddings": 163840,
    }),
    "Moxin-like V2 without yarn": latent("deepseek_v2", 2048, 12, 16, 32000, 64, **{
        **V2, "topk_method": "greedy", "num_experts_per_tok": 6, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "rope_scaling": None,
    }),
    "DeepSeek-V3": latent("deepseek_v3", 7168, 61, 128, 129280, 256, **{
        **V3, **V3_YARN, "max_position_embeddings": 163840, "num_nextn_predict_layers": 1,
    }),
    "Moonlight-16B-A3B": latent("deepseek_v3", 2048, 27, 16, 163840, 64, **{
        **V3, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6, "routed_scaling_factor": 2.446,
        "n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": None, "intermediate_size": 11264,
        "moe_intermediate_size": 1408, "rope_theta": 50000.0, "max_position_embeddings": 8192,
        "num_nextn_predict_layers": 0,
    }),
    "Kimi-K2 as deepseek_v3": latent("deepseek_v3", 7168, 61, 64, 163840, 384, **{
        **V3, **yarn(32.0, 4096, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0), "n_group": 1,
        "topk_group": 1, "routed_scaling_factor": 2.827, "first_k_dense_replace": 1, "rope_theta": 50000.0,
        "max_position_embeddings": 131072, "num_nextn_predict_layers": 0,
    }),
    "GigaChat-20B-A3B, of V3": latent("deepseek_v3", 2048, 28, 16, 128256, 64, **{
        **V3, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4, "q_lora_rank": None,
        "first_k_dense_replace": 1, "rope_theta": 100000, "rope_scaling": None, "moe_intermediate_size": 1280,
    }),
    "Mistral Small 4": latent(
        "mistral4", 4096, 36, 32, 131072, 128, q_lora_rank=1024, kv_lora_rank=256, qk_nope_head_dim=64,
        intermediate_size=12288, moe_intermediate_size=2048, n_shared_experts=1, num_experts_per_tok=4,
        first_k_dense_replace=0, n_group=1, topk_group=1, max_position_embeddings=8192, rope_theta="left out",
        rope_parameters={
            "type": "yarn", "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 8192, "max_position_embeddings": 8192,
            "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.1,
        },
    ),
    "GLM-4.5": config("glm4_moe", 5120, 92, 96, 8, 151552, **{
        **GLM, "use_qk_norm": True, "n_routed_experts": 160, "routed_scaling_factor": 2.5, "intermediate_size": 12288,
        "moe_intermediate_size": 1536, "first_k_dense_replace": 3, "max_position_embeddings": 131072,
    }),
    "GLM-4.5-Air": config("glm4_moe", 4096, 46, 96, 8, 151552, **{
        **GLM, "use_qk_norm": False, "n_routed_experts": 128, "routed_scaling_factor": 1.0,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "max_position_embeddings": 131072,
    }),
    "GLM-4.5-Air, part left out": config("glm4_moe", 4096, 46, 96, 8, 151552, **{
        **GLM, "partial_rotary_factor": "left out", "use_qk_norm": False, "n_routed_experts": 128,
        "routed_scaling_factor": 1.0, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    }),
    "INTELLECT-3": config("glm4_moe", 4096, 46, 96, 8, 151552, **{
        **GLM, "rope_scaling": "left out", "n_routed_experts": 128, "routed_scaling_factor": 1.0,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_nextn_predict_layers": "left out",
    }),
    "GLM-4.7-Flash": latent(
        "glm4_moe_lite", 2048, 47, 20, 154880, 64, q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256,
        intermediate_size=10240, moe_intermediate_size=1536, num_experts_per_tok=4, n_shared_experts=1, n_group=1,
        topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.8, topk_method="noaux_tc", rope_theta=1000000,
        rms_norm_eps=1e-5, num_nextn_predict_layers=1, first_k_dense_replace=1, partial_rotary_factor=1.0,
    ),
    "dots.llm1": config(
        "dots1", 4096, 62, 32, 32, 152064, intermediate_size=10944, moe_intermediate_size=1408, n_routed_experts=128,
        n_shared_experts=2, num_experts_per_tok=6, n_group=1, topk_group=1, norm_topk_prob=True, moe_layer_freq=1,
        routed_scaling_factor=2.5, scoring_func="noaux_tc", first_k_dense_replace=1, rope_theta=10000000,
        rope_scaling=None, sliding_window=None, max_window_layers=62, attention_bias=False, rms_norm_eps=1e-5,
    ),
    "Solar-Open-100B": config(
        "solar_open", 4096, 48, 64, 8, 196608, head_dim=128, moe_intermediate_size=1280, intermediate_size=10240,
        n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8, n_group=1, topk_group=1, norm_topk_prob=True,
        routed_scaling_factor=1.0, first_k_dense_replace=0, rope_theta=1000000, rms_norm_eps=1e-5,
        partial_rotary_factor=1.0, use_qk_norm=False, attention_bias=False, **yarn(2.0, 65536),
    ),
    "K-EXAONE-236B": config(
        "exaone_moe", 6144, 48, 64, 8, 153600, head_dim=128, intermediate_size=18432, moe_intermediate_size=2048,
        num_experts=128, num_shared_experts=1, num_experts_per_tok=8, n_group=1, topk_group=1, norm_topk_prob=True,
        routed_scaling_factor=2.5, first_k_dense_replace=1, sliding_window=128, sliding_window_pattern="LLLG",
        layer_types=[SLIDING, SLIDING, SLIDING, FULL] * 12, rope_theta=1000000, rope_scaling=None,
        scoring_func="sigmoid", topk_method="noaux_tc", num_nextn_predict_layers=1, rms_norm_eps=1e-5,
    ),
    "gpt-oss-20b": gpt_oss(24, 32),
    "gpt-oss-120b": gpt_oss(36, 128),
    "gpt-oss, scaling left out": gpt_oss(24, 32, rope_scaling="left out"),
    "gpt-oss, null scaling": gpt_oss(24, 32, rope_scaling=None),
    "gpt-oss of 5.x": gpt_oss(24, 32, rope_scaling="left out", rope_theta="left out", rope_parameters={
        **OSS_YARN["rope_scaling"], "rope_theta": 150000.0,
    }),
    "gpt-oss, layers left out": gpt_oss(24, 32, layer_types="left out"),
}  # fmt: skip
