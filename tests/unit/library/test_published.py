"""The library's parameter counts: the published ones, those of transformers' models, and those of SmartMoE's logs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from support.published_counts import PUBLISHED, as_published, counts_of, last_digit
from support.tables import each_row

from moec.driver import run_passes, to_spec
from moec.grammar.resolve.library import library_names
from moec.passes.cost.parameter_counts import count_parameters


def test_every_whole_model_has_a_published_count() -> None:
    names = set(library_names("models"))
    parts = {name for name in names if "swin" in name or name.startswith("smartmoe")}
    assert names - parts - set(PUBLISHED) == {"v_moe_b16_every2"}
    assert set(PUBLISHED) <= names


@each_row("name", PUBLISHED)
def test_counts_are_the_published_ones(name: str) -> None:
    """To the last published digit, whether it was rounded or cut off."""
    published = PUBLISHED[name]
    total, active = as_published(name)
    number, step = last_digit(published.total, published.digits)
    assert abs(total - number) < step, f"{total:,} is not {published.total}"
    if published.active:
        number, step = last_digit(published.active, published.active_digits)
        assert abs(active - number) < step, f"{active:,} is not {published.active}"


# ---- transformers --------------------------------------------------------------------------------------

LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral_8x7b": (
        "MixtralConfig",
        {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8},
    ),
    "mixtral_8x22b": (
        "MixtralConfig",
        {"vocab_size": 32000, "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56}
        | {"num_attention_heads": 48, "num_key_value_heads": 8, "num_local_experts": 8},
    ),
    "qwen1_5_moe_a2_7b": (
        "Qwen2MoeConfig",
        {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16}
        | {"num_key_value_heads": 16, "num_experts": 60, "moe_intermediate_size": 1408}
        | {"shared_expert_intermediate_size": 5632, "qkv_bias": True},
    ),
    "qwen2_57b_a14b": (
        "Qwen2MoeConfig",
        {"vocab_size": 151936, "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28}
        | {"num_key_value_heads": 4, "num_experts": 64, "moe_intermediate_size": 2560}
        | {"shared_expert_intermediate_size": 20480, "qkv_bias": True},
    ),
    "qwen3_30b_a3b": (
        "Qwen3MoeConfig",
        {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32}
        | {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "moe_intermediate_size": 768},
    ),
    "qwen3_235b_a22b": (
        "Qwen3MoeConfig",
        {"vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64}
        | {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "moe_intermediate_size": 1536},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        LATENT
        | {"vocab_size": 102400, "hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 60}
        | {"num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "n_routed_experts": 160}
        | {"moe_intermediate_size": 1536, "n_shared_experts": 2, "first_k_dense_replace": 1},
    ),
    "deepseek_v2_lite": (
        "DeepseekV2Config",
        LATENT
        | {"vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27}
        | {"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "n_routed_experts": 64}
        | {"moe_intermediate_size": 1408, "n_shared_experts": 2, "first_k_dense_replace": 1},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        LATENT
        | {"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61}
        | {"num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "n_routed_experts": 256}
        | {"moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3},
    ),
    "kimi_k2": (
        "DeepseekV3Config",
        LATENT
        | {"vocab_size": 163840, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61}
        | {"num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "n_routed_experts": 384}
        | {"moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1},
    ),
    "glm_4_5": (
        "Glm4MoeConfig",
        {"vocab_size": 151552, "hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 92}
        | {"num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True}
        | {"moe_intermediate_size": 1536, "n_routed_experts": 160, "n_shared_experts": 1}
        | {"first_k_dense_replace": 3, "use_qk_norm": True},
    ),
    "glm_4_5_air": (
        "Glm4MoeConfig",
        {"vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46}
        | {"num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True}
        | {"moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1}
        | {"first_k_dense_replace": 1, "use_qk_norm": False},
    ),
    "olmoe_1b_7b": (
        "OlmoeConfig",
        {"vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16}
        | {"num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64},
    ),
    "granite_3_1b_a400m": (
        "GraniteMoeConfig",
        {"vocab_size": 49152, "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 24}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "num_local_experts": 32}
        | {"tie_word_embeddings": True},
    ),
    "granite_3_3b_a800m": (
        "GraniteMoeConfig",
        {"vocab_size": 49152, "hidden_size": 1536, "intermediate_size": 512, "num_hidden_layers": 32}
        | {"num_attention_heads": 24, "num_key_value_heads": 8, "num_local_experts": 40}
        | {"tie_word_embeddings": True},
    ),
    "gpt_oss_20b": (
        "GptOssConfig",
        {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32},
    ),
    "gpt_oss_120b": (
        "GptOssConfig",
        {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128},
    ),
    "dbrx": (
        "DbrxConfig",
        {"vocab_size": 100352, "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768}
        | {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 500000.0}}
        | {"ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}},
    ),
    "ernie_4_5_21b_a3b": (
        "Ernie4_5_MoeConfig",
        {"vocab_size": 103424, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28}
        | {"num_attention_heads": 20, "num_key_value_heads": 4, "moe_num_experts": 64, "moe_intermediate_size": 1536}
        | {"moe_num_shared_experts": 2, "moe_layer_start_index": 1, "tie_word_embeddings": True},
    ),
    "dots1": (
        "Dots1Config",
        {"vocab_size": 152064, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 62}
        | {"num_attention_heads": 32, "num_key_value_heads": 32, "moe_intermediate_size": 1408}
        | {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    ),
    "hunyuan_a13b": (
        "HunYuanMoEV1Config",
        {"vocab_size": 128167, "hidden_size": 4096, "intermediate_size": 3072, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 64}
        | {"moe_topk": 8, "tie_word_embeddings": True},
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {"vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62}
        | {"num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 256},
    ),
}
"""Published values of config.json, as far as they decide shapes."""


@pytest.mark.parametrize("name", CONFIGS)
def test_totals_are_those_of_transformers(name: str) -> None:
    kind, values = CONFIGS[name]
    config = getattr(transformers, kind)(**values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    elements = {key: p.numel() for key, p in model.named_parameters() if "e_score_correction_bias" not in key}
    assert counts_of(name).whole.total == sum(elements.values())


# ---- SmartMoE's logs -----------------------------------------------------------------------------------

RANKS = {
    "smartmoe_gpt_16l_1536_64e": (8, [419168512, 340328704, 340328704, 417598720], 50304 * 1536),
    "smartmoe_gpt_16l_2560_16e": (8, [761159808, 758543488], 50304 * 2560),
    "smartmoe_gpt_16l_2560_32e": (8, [656220288, 524820608, 524820608, 653603968], 50304 * 2560),
    "smartmoe_gpt_8l_2048_32e": (32, [374264064], 0),
}
"""Ranks of expert parallelism, the logged parameters of a rank of each pipeline stage, and those of the head's copy of
the embedding, which the last of several stages has."""


@pytest.mark.parametrize("name", RANKS)
def test_a_rank_has_the_parameters_that_the_log_says(name: str) -> None:
    ep, stages, copy = RANKS[name]
    cluster = f'cluster "v100" {{ device = cpu; level "gpu" {{ size = {ep} }} }}'
    spec = to_spec(f'use "models/{name}"\n{cluster}\nparallel {{ ep = {ep} }}\n')
    counts = count_parameters(run_passes(spec).program, spec)
    assert counts.whole.per_rank == sum(stages) - copy
