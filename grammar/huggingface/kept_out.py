"""MoE decoders of transformers 5.23 that moec does not import, each with the config key or module that keeps it out.

`KEPT_OUT` has those of which no config is imported, `PARTLY` says for which configs a family of `families/` is
imported. The reasons were read from each `modeling_*.py`. tests/huggingface/test_page.py compares the lists with the
installed transformers, and writes them to docs/huggingface.md; MOE0901 shows them.
"""

from __future__ import annotations

CENTRED = "its norms multiply by 1 + weight"
INDEXED = "a learned index chooses the tokens that each token sees"
STREAMS = "several residual streams with learned mixing (hyper-connections)"

KEPT_OUT: dict[str, str] = {
    "axk1": "a norm follows the mixtures alone (`post_mlp_layernorm`), not attention and dense layers",
    "axk2": f"{INDEXED} (`index_topk`), and a small network scales the norms (`gated_norm_rank`)",
    "bailing_hybrid": "`layer_types`: linear attention (Kimi Delta Attention)",
    "beam": "each addition scales the residual stream by its depth, and gates of attention have a bias (`gate_bias`)",
    "deepseek_ocr2_text": "grouped attention with DeepSeek-V2's router in a model of images; no reader is written",
    "deepseek_v32": f"{INDEXED} (`index_topk`)",
    "deepseek_v4": f"{STREAMS}, and attention to compressed tokens (`compress_rates`)",
    "diffusion_gemma_text": "it denoises blocks of tokens, and its routers scale experts (`per_expert_scale`)",
    "doge": "a learned mask of attention (`dt_proj`); product keys choose experts of one hidden dimension (CDMoE)",
    "dots3_note_text": f"a norm of the shared key, factors on latent vectors (`q_lora_scale`), and {INDEXED}",
    "ernie4_5_vl_moe_text": "images have a mixture of their own in every sparse layer (`vision_moe`)",
    "gemma4_text": "a dense path beside each mixture, both with norms, and factors of experts (`per_expert_scale`)",
    "glm5_next_text": f"linear attention, {STREAMS}, and {INDEXED} (`index_topk`)",
    "glm_moe_dsa": f"{INDEXED} (`index_topk`)",
    "hy_v4": f"{STREAMS}, and {INDEXED} (`index_topk`)",
    "inkling2_text": "short convolutions of keys and values, relative positions, and attention over earlier layers",
    "inkling_text": "short convolutions of keys and values, relative positions, and shared experts with weights",
    "jetmoe": "a bias is added to each mixture's result, those of attention heads included (`bias`)",
    "kimi_linear": "`layer_types`: linear attention (Kimi Delta Attention)",
    "kolibri1": "the bias that chooses experts is added to the router's logits; moec adds it to the scores",
    "laguna": "attention is multiplied by a softplus of a projection (`gating`); moec's `output_gate` is a sigmoid",
    "llama4_text": "a router's weights multiply what goes into experts; attention in chunks (`attention_chunk_size`)",
    "longcat_flash": "experts without parameters (`zero_expert_num`), and mixtures beside two layers of attention",
    "minimax": "`layer_types`: linear attention; and the residual stream is what a norm gives, not what it takes",
    "minimax_m3_vl_text": f"{CENTRED}, and {INDEXED} (`index_topk_blocks`)",
    "mistral_large4_text": f"{INDEXED} (`index_topk`), and layers share latent vectors (`kv_source_layers`)",
    "muse_spark_text": "experts work on narrower vectors (`moe_hidden_size`), and gates scale the residual stream",
    "nemotron_h": "a layer is one part, of attention, Mamba or experts (`layers_block_type`); Mamba has no word",
    "nllb-moe": "an encoder and a decoder with cross attention; moec has decoders alone",
    "openai_privacy_filter": "it sees tokens on both sides and classifies them; it is no language model",
    "qwen3_5_moe_text": f"{CENTRED}; `layer_types`: linear attention (GatedDeltaNet)",
    "qwen3_next": f"{CENTRED}; `layer_types`: linear attention (GatedDeltaNet)",
    "qwen3_omni_moe_talker_text": "it makes speech of another model's vectors (`thinker_hidden_size`), and no text",
    "qwen3_omni_moe_text": "Qwen3's decoder in a model of speech and images; no reader is written",
    "qwen4_exp_text": f"{CENTRED}, linear attention, {STREAMS}, and embeddings of token n-grams",
    "step3p5": f"{CENTRED}, and limits come after the activation (`swiglu_limits`)",
    "switch_transformers": "an encoder and a decoder with cross attention; moec has decoders alone",
    "unlimited_ocr_text": "tokens see all of the prompt and a window of the answer (`reference_sliding_attention`)",
    "zaya": "attention with convolutions (CCA), and each router reads the router of the layer before",
}
"""`model_type` → what has no word in moec, in one sentence."""

AROUND_KEPT_OUT: dict[str, str] = {
    "deepseek_ocr2": "deepseek_ocr2_text",
    "diffusion_gemma": "diffusion_gemma_text",
    "dots3_note": "dots3_note_text",
    "ernie4_5_vl_moe": "ernie4_5_vl_moe_text",
    "gemma4": "gemma4_text",
    "glm5_next": "glm5_next_text",
    "inkling2": "inkling2_text",
    "inkling_mm_model": "inkling_text",
    "llama4": "llama4_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "mistral_large4": "mistral_large4_text",
    "muse_spark": "muse_spark_text",
    "nemo_speechlm": "nemotron_h",
    "nemotron_h_omni": "nemotron_h",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_omni_moe": "qwen3_omni_moe_text",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text",
    "qwen4_exp": "qwen4_exp_text",
    "step3p7": "step3p5",
    "unlimited_ocr": "unlimited_ocr_text",
}
"""`model_type` of a model around one of these decoders → the decoder's, where a config does not say it."""

PARTLY: dict[str, str] = {
    "cohere2_moe": "no shared experts, or those that are added (`shared_expert_combination_strategy` is `sum`)",
    "granitemoehybrid": "layers of attention alone (`layer_types`); Mamba layers have no word",
    "jamba": "layers of attention alone (`attn_layer_period` is 1); Mamba layers have no word",
    "lfm2_moe": "layers of attention alone (`layer_types`); short convolutions have no word",
    "mimo_v2_flash": "values as wide as keys (`v_head_dim`) that are not scaled (`attention_value_scale` is 1)",
    "mistral4": "the context that was trained (`original_max_position_embeddings`), from which on queries are scaled",
}
"""`model_type` of a family → the configs that are imported, where that is not all of them."""
