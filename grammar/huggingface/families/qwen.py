"""Qwen2-MoE, Qwen3-MoE (arXiv 2505.09388) and Mellum; OLMoE (arXiv 2409.02060) and FlexOlmo (arXiv 2507.07024)."""

from __future__ import annotations

from typing import Any

from moec.grammar.huggingface.config import Config
from moec.grammar.huggingface.family import Family
from moec.grammar.huggingface.keys import parameters_of
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
    mixed,
    sparse_layers,
    window_of,
    windows_of,
)
from moec.grammar.huggingface.positions import rope_of
from moec.grammar.huggingface.usual_rules import Names, rules_by
from moec.grammar.spec import Experts, Model, Moe, TopK


def gate_of(config: Config, **options: Any) -> TopK:
    """Softmax over all experts, of which the best are kept."""
    normalize = config.flag("norm_topk_prob", default=False)
    return TopK(k=config.count("num_experts_per_tok"), normalize=normalize, **options)


def experts_of(config: Config, hidden: str, key: str = "num_experts") -> Experts:
    return Experts(count=config.count(key), body=gated(config, config.count(hidden)))


def sparse_by_step(config: Config, depth: int, dense: tuple[int, ...] = ()) -> list[bool]:
    """Every `decoder_sparse_step`-th layer, but for those of `mlp_only_layers`, by default `dense`."""
    step, stated = config.count("decoder_sparse_step", default=1), config.numbers("mlp_only_layers")
    dense = dense if stated is None else tuple(int(number) for number in stated)
    return [(number + 1) % step == 0 and number not in dense for number in range(depth)]


def _windows(config: Config, depth: int) -> list[int | None]:
    """Windows, if `use_sliding_window` says so: by default in every second layer below `max_window_layers`."""
    if not config.flag("use_sliding_window", default=False):
        config.raw("sliding_window", "max_window_layers", "layer_types")
        return [None] * depth
    first = config.count("max_window_layers", default=28, least=0)
    kinds = kinds_of_attention(config, depth, lambda n: SLIDING if n % 2 == 0 and n < first else FULL)
    return windows_of(config, kinds)


def _qwen2(config: Config) -> Model:
    depth = depth_of(config)
    rope = rope_of(config, heads_of(config)[2])
    bias = bias_of(config, "qkv_bias", default=True, word="qkv")
    attentions = [attention_of(config, rope=rope, bias=bias, window=window) for window in _windows(config, depth)]
    config.inert("attention_dropout", 0)
    sparse = sparse_by_step(config, depth)
    shared = gated(config, config.count("shared_expert_intermediate_size"), gated=True)
    body = Moe(experts=experts_of(config, "moe_intermediate_size"), gate=gate_of(config), shared=shared)
    return mixed(config, attentions, sparse, body, 1e-6)


def _qwen3(config: Config) -> Model:
    depth = depth_of(config)
    rope, bias = rope_of(config, heads_of(config)[2]), bias_of(config, "attention_bias")
    window = None
    if config.flag("use_sliding_window", default=False):
        window = window_of(config)
    config.raw("sliding_window", "max_window_layers")
    attention = attention_of(config, rope=rope, bias=bias, qk_norm="head", window=window)
    config.inert("attention_dropout", 0)
    body = Moe(experts=experts_of(config, "moe_intermediate_size", "num_local_experts"), gate=gate_of(config))
    return mixed(config, [attention] * depth, sparse_by_step(config, depth), body, 1e-6)


def _mellum(config: Config) -> Model:
    """Positions of two kinds, one for layers with windows and one for those without."""
    depth = depth_of(config)
    bias, width = bias_of(config, "attention_bias"), heads_of(config)[2]
    kinds = kinds_of_attention(config, depth)
    ropes = {kind: rope_of(config, width, kind=kind) for kind in set(kinds)}
    attentions = [
        attention_of(config, rope=ropes[kind], bias=bias, qk_norm="head", window=window)
        for kind, window in zip(kinds, windows_of(config, kinds), strict=True)
    ]
    config.inert("attention_dropout", 0)
    body = Moe(experts=experts_of(config, "moe_intermediate_size", "num_local_experts"), gate=gate_of(config))
    return mixed(config, attentions, sparse_layers(config, depth), body, 1e-6)


def _olmoe(config: Config) -> Model:
    depth = depth_of(config)
    clip = config.number("clip_qkv", default=0.0) or None
    attention = attention_of(
        config,
        rope=rope_of(config, heads_of(config)[2]),
        bias=bias_of(config, "attention_bias"),
        qk_norm="projection",
        clip=clip,
    )
    config.inert("attention_dropout", 0)
    body = Moe(experts=experts_of(config, "intermediate_size"), gate=gate_of(config))
    return decoder(config, layers_of([attention] * depth, [body] * depth), eps=eps_of(config, 1e-5))


def _flex_olmo(config: Config) -> Model:
    """Norms after attention and mixture, none before them (OLMo 2)."""
    depth = depth_of(config)
    rope = rope_of(config, heads_of(config)[2], theta=5e5)
    attention = attention_of(config, rope=rope, bias=bias_of(config, "attention_bias"), qk_norm="projection")
    config.inert("attention_dropout", 0)
    body = Moe(experts=experts_of(config, "intermediate_size"), gate=gate_of(config))
    layers = layers_of([attention] * depth, [body] * depth)
    return decoder(config, layers, eps=eps_of(config, 1e-6), norm_place="res_post")


def _mellum_keys(model: Model) -> dict[str, Any]:
    """`rope_parameters` for both kinds of layers, also where the model has one kind."""
    by_kind: dict[str, Any] = {}
    windows = [layer.attention.window for layer in model.layers]
    kinds = [FULL if window is None else SLIDING for window in windows]
    ropes = [layer.attention.rope for layer in model.layers]
    if not any(windows):  # windows as long as the context hide nothing: positions alone tell the kinds apart
        kinds = [FULL if rope == ropes[0] else SLIDING for rope in ropes]
    for layer, rope, kind in zip(model.layers, ropes, kinds, strict=True):
        if rope is not None:
            width = getattr(layer.attention, "head_dim", None) or model.dim // layer.attention.heads
            by_kind[kind] = parameters_of(rope, width, model.context)
    if not by_kind:
        return {}
    return {
        "layer_types": kinds,
        "sliding_window": next(filter(None, windows), model.context),
        "rope_parameters": {kind: by_kind.get(kind, next(iter(by_kind.values()))) for kind in (FULL, SLIDING)},
    }


LOCAL, EXPERTS = {"num_experts": "num_local_experts"}, {"num_local_experts": "num_experts"}
SHARED = Names(shared="mlp.shared_expert.")
POST_NORMS = {"attention_post_norm": "post_attention_layernorm", "ffn_post_norm": "post_feedforward_layernorm"}

FAMILIES = (
    Family("qwen2_moe", "Qwen2MoeForCausalLM", _qwen2, rules_by(SHARED), defaults={"num_key_value_heads": 16}),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _qwen3,
        rules_by(Names()),
        defaults={"num_key_value_heads": 4},
        aliases=LOCAL,
    ),
    Family(
        "mellum",
        "MellumForCausalLM",
        _mellum,
        rules_by(Names()),
        _mellum_keys,
        ignored=frozenset(("num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types", "num_mtp_layers")),
        skipped=(r"mtp\..*", r"model\.mtp.*"),
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 128,
            "norm_topk_prob": True,
            "rope_parameters": {FULL: {"rope_theta": 5e5}, SLIDING: {"rope_theta": 1e4}},
        },
        aliases={**LOCAL, "num_mtp_layers": "num_nextn_predict_layers"},
    ),
    Family("olmoe", "OlmoeForCausalLM", _olmoe, rules_by(Names()), aliases=EXPERTS),
    Family("flex_olmo", "FlexOlmoForCausalLM", _flex_olmo, rules_by(Names(norms=POST_NORMS)), aliases=EXPERTS),
)
