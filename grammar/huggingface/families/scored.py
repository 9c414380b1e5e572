"""Hunyuan 3, Flint and MiMo-V2-Flash: sigmoid scores, norms of queries and keys or sinks, and windows."""

from __future__ import annotations

from typing import Any

from moec.grammar.huggingface.config import Config
from moec.grammar.huggingface.families.deepseek import PREDICTED, biased_gate
from moec.grammar.huggingface.families.qwen import sparse_by_step
from moec.grammar.huggingface.family import Family
from moec.grammar.huggingface.keys import kinds_by_positions, parameters_of
from moec.grammar.huggingface.parts import (
    FULL,
    SLIDING,
    attention_of,
    bias_of,
    decoder,
    depth_of,
    eps_of,
    gated,
    grouped,
    heads_of,
    kinds_of_attention,
    layers_of,
    positive,
    shared_of,
    sparse_layers,
    windows_of,
)
from moec.grammar.huggingface.positions import rope_of
from moec.grammar.huggingface.usual_rules import Names, rules_by
from moec.grammar.spec import Experts, Gqa, Model, Moe, Online, TopK

# ---- Hunyuan 3 (Tencent 2026) ----------------------------------------------------------------------


def _hunyuan3(config: Config) -> Model:
    """Biases in dense feed-forwards and the shared expert, none in the others."""
    depth, biased = depth_of(config), config.flag("mlp_bias", default=False)
    attention = attention_of(
        config,
        rope=rope_of(config, heads_of(config)[2], theta=11_158_840.0),
        bias=bias_of(config, "attention_bias"),
        qk_norm="head",
    )
    config.inert("attention_dropout", 0)
    config.raw("enable_moe_fp32_combine")
    hidden, wide = config.count("moe_intermediate_size"), config.count("intermediate_size")
    number = shared_of(config, "num_shared_experts", 1)
    gate = TopK(
        k=config.count("num_experts_per_tok"),
        score="sigmoid",
        normalize=True,
        scale=positive(config, "router_scaling_factor", 2.826),
        bias=Online(),
    )
    body = Moe(
        experts=Experts(count=config.count("num_experts"), body=gated(config, hidden)),
        gate=gate,
        shared=gated(config, hidden * number or wide, bias=biased),  # their code takes 0 for left out
    )
    dense = gated(config, wide, bias=biased)
    bodies = [body if is_sparse else dense for is_sparse in sparse_layers(config, depth, 1)]
    return decoder(config, layers_of([attention] * depth, bodies), eps=eps_of(config, 1e-5))


def _hunyuan3_keys(model: Model) -> dict[str, Any]:
    moes = [layer.moe for layer in model.layers if layer.moe is not None]
    wide = next((getattr(layer.ffn, "hidden", None) for layer in model.layers if layer.ffn is not None), None)
    if not moes:
        return {"mlp_bias": getattr(model.layers[0].ffn, "bias", False)}
    shared, gate, hidden = moes[0].shared, moes[0].gate, getattr(moes[0].parts[0].body, "hidden", None)
    width = getattr(shared, "hidden", None)
    if wide is None and width and hidden and width % hidden:
        wide = width
    number = 0 if width is not None and width == wide else None
    return {
        "mlp_bias": getattr(shared, "bias", False),
        "router_scaling_factor": getattr(gate, "scale", 1.0),
        "intermediate_size": wide or hidden,
        **({} if number is None else {"num_shared_experts": number}),
    }


# ---- Flint -----------------------------------------------------------------------------------------


def _flint(config: Config) -> Model:
    """Sinks in every layer, positions in those with windows."""
    depth = depth_of(config)
    kinds = kinds_of_attention(config, depth, lambda n: FULL if n < 2 or n % 4 == 1 or n == depth - 1 else SLIDING)
    rope, bias = rope_of(config, heads_of(config)[2]), bias_of(config, "attention_bias")
    attentions = [
        attention_of(
            config, rope=rope if kind == SLIDING else None, bias=bias, qk_norm="head", sinks=True, window=window
        )
        for kind, window in zip(kinds, windows_of(config, kinds, default=513), strict=True)
    ]
    config.inert("attention_dropout", 0)
    shared = shared_of(config, "shared_expert_intermediate_size", 1024)
    gate = TopK(
        k=config.count("num_experts_per_tok"), score="sigmoid", normalize=config.flag("norm_topk_prob", default=True)
    )
    body = Moe(
        experts=Experts(count=config.count("num_experts"), body=gated(config, config.count("moe_intermediate_size"))),
        gate=gate,
        shared=gated(config, shared) if shared else None,
    )
    dense = gated(config, config.count("intermediate_size"))
    bodies = [body if is_sparse else dense for is_sparse in sparse_by_step(config, depth, dense=(0, 1))]
    return decoder(config, layers_of(attentions, bodies), eps=eps_of(config, 1e-6))


def _dense_width(model: Model) -> dict[str, Any]:
    """`intermediate_size`, which these configs have even where no layer is dense."""
    widths = [getattr(layer.ffn, "hidden", None) for layer in model.layers if layer.ffn is not None]
    bodies = [layer.moe.parts[0].body for layer in model.layers if layer.moe is not None]
    return {"intermediate_size": widths[0] if widths else getattr(bodies[0], "hidden", None)}


def _flint_keys(model: Model) -> dict[str, Any]:
    return {**_dense_width(model), **kinds_by_positions(model)}


# ---- MiMo-V2-Flash (Xiaomi 2025) -------------------------------------------------------------------


def _mimo(config: Config) -> Model:
    """Layers with windows have sinks and twice the key and value heads."""
    depth = depth_of(config)
    kinds = kinds_of_attention(config, depth, lambda n: FULL if n == 0 or (n + 1) % 6 == 0 else SLIDING)
    heads, kv_heads, width = heads_of(config)
    if config.count("v_head_dim", default=width) != width:
        config.refuse("v_head_dim", f"moec's values are as wide as keys (`head_dim`, {width})")
    scaled = config.number("attention_value_scale", default=1.0)
    if scaled != 1:
        config.refuse("attention_value_scale", "moec has no factor on values: only 1")
    if SLIDING in kinds and heads % (2 * kv_heads):
        config.refuse("num_key_value_heads", f"layers with windows have twice as many, and these do not divide {heads}")
        kv_heads = heads // 2 or 1
    bias = bias_of(config, "attention_bias", word="qkv")
    ropes = {kind: _mimo_rope(config, width, kind) for kind in set(kinds)}
    if config.has("sliding_window_size"):
        window = config.count("sliding_window_size") + 1
        config.raw("sliding_window")
        windows: list[int | None] = [window if kind == SLIDING else None for kind in kinds]
    else:
        windows = windows_of(config, kinds, default=129)
    attentions = [
        grouped(
            heads,
            2 * kv_heads if kind == SLIDING else kv_heads,
            width,
            config.count("hidden_size"),
            rope=ropes[kind],
            bias=bias,
            sinks=kind == SLIDING,
            window=window,
        )
        for kind, window in zip(kinds, windows, strict=True)
    ]
    config.inert("attention_dropout", 0)
    count = config.count("n_routed_experts")
    experts = Experts(count=count, body=gated(config, config.count("moe_intermediate_size")))
    body = Moe(experts=experts, gate=biased_gate(config, count))
    dense = gated(config, config.count("intermediate_size"))
    bodies = [body if is_sparse else dense for is_sparse in sparse_layers(config, depth, 1)]
    return decoder(config, layers_of(attentions, bodies), eps=eps_of(config, 1e-5))


def _mimo_rope(config: Config, width: int, kind: str) -> Any:
    return rope_of(
        config, width, kind=kind, theta=5e6 if kind == FULL else 1e4, fraction=0.334, partial=True, outside=False
    )


def _mimo_keys(model: Model) -> dict[str, Any]:
    attention = model.layers[0].attention
    kv_heads = attention.kv_heads if isinstance(attention, Gqa) else attention.heads
    kinds = [SLIDING if layer.attention.sinks else FULL for layer in model.layers]
    windows = [layer.attention.window for layer in model.layers]
    width = getattr(attention, "head_dim", None) or model.dim // attention.heads
    by_kind = {}
    for layer, kind in zip(model.layers, kinds, strict=True):
        if layer.attention.rope is not None:
            keys = parameters_of(layer.attention.rope, width, model.context)
            by_kind[kind] = {**keys, "partial_rotary_factor": layer.attention.rope.fraction}
    either = next(iter(by_kind.values()), None)
    return {
        **_dense_width(model),
        "num_key_value_heads": kv_heads if kinds[0] == FULL else (kv_heads or 2) // 2,
        "layer_types": kinds,
        "sliding_window": next(filter(None, windows), model.context),
        "v_head_dim": width,
        "attention_value_scale": 1.0,
        "rope_parameters": {kind: by_kind.get(kind, either) for kind in (FULL, SLIDING)},
    }


FAMILIES = (
    Family(
        "hy_v3",
        "HYV3ForCausalLM",
        _hunyuan3,
        rules_by(
            Names(router="router.gate.weight", bias="expert_bias", shared="mlp.shared_mlp."),
            Names(bias="e_score_correction_bias"),
        ),
        _hunyuan3_keys,
        defaults={"num_key_value_heads": 8, "head_dim": 128},
        aliases={"num_local_experts": "num_experts"},
        ignored=PREDICTED,
        extra_layers=True,
    ),
    Family(
        "flint",
        "FlintForCausalLM",
        _flint,
        rules_by(Names(shared="mlp.shared_expert.", sinks="softmax_offset"), Names(shared="mlp.shared_expert.")),
        _flint_keys,
        fp32=("routers", "sinks"),
        defaults={"num_key_value_heads": 4, "head_dim": 128},
    ),
    Family(
        "mimo_v2_flash",
        "MiMoV2FlashForCausalLM",
        _mimo,
        rules_by(Names(sinks="attention_sink_bias"), Names()),
        _mimo_keys,
        defaults={"num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "attention_value_scale": 0.707},
        aliases={"num_local_experts": "n_routed_experts"},
        ignored=PREDICTED,
        skipped=(r"model\.mtp\..*",),
    ),
)
