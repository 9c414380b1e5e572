"""Dense decoders, from which mixtures are upcycled: Llama, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from typing import Any

from moec.grammar.huggingface.config import Config
from moec.grammar.huggingface.family import Family
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
    window_of,
    windows_of,
)
from moec.grammar.huggingface.positions import rope_of
from moec.grammar.huggingface.usual_rules import Names, rules_by
from moec.grammar.spec import Model


def _decoder(config: Config, windows: list[int | None], eps: float, **attention: Any) -> Model:
    """Layers that differ in their windows alone."""
    rope = rope_of(config, heads_of(config)[2])
    attentions = [attention_of(config, rope=rope, window=window, **attention) for window in windows]
    config.inert("attention_dropout", 0)
    ffn = gated(config, config.count("intermediate_size"), bias=config.flag("mlp_bias", default=False))
    return decoder(config, layers_of(attentions, [ffn] * len(windows)), eps=eps_of(config, eps))


def _llama(config: Config) -> Model:
    return _decoder(config, [None] * depth_of(config), 1e-6, bias=bias_of(config, "attention_bias"))


def _mistral(config: Config) -> Model:
    config.only("mlp_bias", False)
    return _decoder(config, [window_of(config)] * depth_of(config), 1e-6)


def _windows(config: Config) -> list[int | None]:
    """Windows in the layers from `max_window_layers` on, if `use_sliding_window` says so."""
    depth = depth_of(config)
    config.only("mlp_bias", False)
    if not config.flag("use_sliding_window", default=False):
        config.raw("sliding_window", "max_window_layers", "layer_types")
        return [None] * depth
    first = config.count("max_window_layers", default=28, least=0)
    kinds = kinds_of_attention(config, depth, lambda number: SLIDING if number >= first else FULL)
    return windows_of(config, kinds, default=4096)


def _qwen2(config: Config) -> Model:
    return _decoder(config, _windows(config), 1e-6, bias="qkv")


def _qwen3(config: Config) -> Model:
    return _decoder(config, _windows(config), 1e-6, bias=bias_of(config, "attention_bias"), qk_norm="head")


def _keys(model: Model) -> dict[str, Any]:
    return {"mlp_bias": getattr(model.layers[0].ffn, "bias", False)}


RULES = rules_by(Names())
FAMILIES = (
    Family("llama", "LlamaForCausalLM", _llama, RULES, _keys),
    Family("mistral", "MistralForCausalLM", _mistral, RULES, _keys, defaults={"num_key_value_heads": 8}),
    Family("qwen2", "Qwen2ForCausalLM", _qwen2, RULES, _keys, defaults={"num_key_value_heads": 32}),
    Family("qwen3", "Qwen3ForCausalLM", _qwen3, RULES, _keys, defaults={"num_key_value_heads": 32, "head_dim": 128}),
)
