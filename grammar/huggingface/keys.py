"""A model as config keys: the keys of all families, from which a family's reader picks its own."""

from __future__ import annotations

from math import log
from typing import Any

from moec.grammar.huggingface.parts import FULL, SLIDING
from moec.grammar.spec import (
    DType,
    Experts,
    Gqa,
    Linear,
    Llama3,
    LongRope,
    Mha,
    Mla,
    Model,
    Moe,
    Ntk,
    Online,
    Rope,
    TopK,
    Yarn,
)
from moec.grammar.spec.experts import GeGLU, SwiGLU

DTYPES = {DType.FP32: "float32", DType.BF16: "bfloat16", DType.FP16: "float16"}

NULLABLE = frozenset(("q_lora_rank",))
"""Keys whose null has another meaning than a missing key, which means the architecture's default."""


def keys_of(model: Model) -> dict[str, Any]:
    """The keys of a model with the meaning that they have in most families. A key that its parts do not have is None or
    left out; where layers differ in what a key says of all, it is that of the first layer, and reading it again shows
    it."""
    moes = [layer.moe for layer in model.layers if layer.moe is not None]
    dense = [layer.ffn for layer in model.layers if layer.ffn is not None]
    keys: dict[str, Any] = {
        "vocab_size": model.vocab,
        "hidden_size": model.dim,
        "num_hidden_layers": model.depth,
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm.eps,
        "tie_word_embeddings": getattr(model.embedding, "tied", False),
        "hidden_act": _activation(model),
        "dtype": DTYPES[model.dtype],
        "residual_multiplier": model.residual_multiplier,
        "embedding_multiplier": getattr(model.embedding, "multiplier", 1.0),
        "logits_scaling": 1 / getattr(model.embedding, "logits_multiplier", 1.0),
        "lm_head_bias": getattr(model.embedding, "logits_bias", False),
        **_attention_keys(model),
        "mlp_layer_types": ["dense" if layer.moe is None else "sparse" for layer in model.layers],
        "mlp_only_layers": [number for number, layer in enumerate(model.layers) if layer.moe is None],
        "decoder_sparse_step": 1,
        "first_k_dense_replace": _leading(model),
        "num_dense_layers": _leading(model),
    }
    bodies = [*dense, *(moe.parts[0].body for moe in moes)]
    keys["intermediate_size"] = getattr(bodies[0], "hidden", None)
    return keys | (_mixture_keys(moes[0]) if moes else _keys_without_mixture(keys["intermediate_size"]))


def _keys_without_mixture(hidden: int | None) -> dict[str, Any]:
    """Keys that configs have even if no layer is sparse; they describe a mixture that the model does not have."""
    gate = TopK(k=1, normalize=True)
    keys = _mixture_keys(Moe(experts=Experts(count=2, body=SwiGLU(hidden=hidden or 1)), gate=gate))
    keys["shared_expert_intermediate_size"] = hidden
    return {key: value for key, value in keys.items() if key not in ("scoring_func", "use_routing_bias")}


def _activation(model: Model) -> str:
    bodies = [layer.ffn if layer.moe is None else layer.moe.parts[0].body for layer in model.layers]
    return "gelu" if isinstance(bodies[0], GeGLU) else "silu"


def _leading(model: Model) -> int:
    """The dense layers before the first sparse one."""
    return next((number for number, layer in enumerate(model.layers) if layer.moe is not None), model.depth)


def _attention_keys(model: Model) -> dict[str, Any]:
    attention = model.layers[0].attention
    windows = [layer.attention.window for layer in model.layers]
    window = next((size for size in windows if size is not None), None)
    keys: dict[str, Any] = {
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads if isinstance(attention, Gqa) else attention.heads,
        "attention_bias": attention.bias != "none",
        "qkv_bias": attention.bias != "none",
        "use_bias": attention.bias != "none",
        "use_qk_norm": attention.qk_norm != "none",
        "clip_qkv": attention.clip,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": next((n for n, size in enumerate(windows) if size is not None), model.depth),
        "layer_types": [FULL if size is None else SLIDING for size in windows],
        "attention_multiplier": attention.multiplier,
        "attention_dropout": 0.0,
        "rope_interleave": attention.rope is not None and attention.rope.interleaved,
    }
    width = model.dim // attention.heads
    if isinstance(attention, Gqa | Mha):
        width = keys["head_dim"] = attention.head_dim or width
    if isinstance(attention, Mla):
        width = attention.rope_dim
        keys |= {
            "q_lora_rank": attention.q_rank,
            "kv_lora_rank": attention.kv_rank,
            "qk_nope_head_dim": attention.nope_dim,
            "qk_rope_head_dim": attention.rope_dim,
            "v_head_dim": attention.value_dim,
        }
    ropes = {
        FULL if layer.attention.window is None else SLIDING: layer.attention.rope
        for layer in model.layers
        if layer.attention.rope is not None
    }
    distinct = list(dict.fromkeys(ropes.values()))
    if len(distinct) == 1:
        keys["rope_parameters"] = parameters_of(distinct[0], width, model.context)
    elif distinct:
        keys["rope_parameters"] = {kind: parameters_of(rope, width, model.context) for kind, rope in ropes.items()}
    return keys


def kinds_by_positions(model: Model) -> dict[str, Any]:
    """`layer_types` and `sliding_window` where layers with windows are those with positions: a window as long as the
    context hides nothing, and the model has none there."""
    windows = [layer.attention.window for layer in model.layers]
    kinds = [
        FULL if window is None and layer.attention.rope is None else SLIDING
        for layer, window in zip(model.layers, windows, strict=True)
    ]
    return {"layer_types": kinds, "sliding_window": next(filter(None, windows), model.context)}


def parameters_of(rope: Rope, width: int, context: int | None) -> dict[str, Any]:
    """`rope_parameters` of rotary positions."""
    keys: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": "default"}
    if rope.fraction != 1:
        keys["partial_rotary_factor"] = rope.fraction
    match rope.scaling:
        case Linear(factor=factor):
            keys |= {"rope_type": "linear", "factor": factor}
        case Ntk(factor=factor):
            keys |= {"rope_type": "dynamic", "factor": factor}
        case Llama3() as scaling:
            keys |= {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low,
                "high_freq_factor": scaling.high,
                "original_max_position_embeddings": scaling.original,
            }
        case Yarn() as scaling:
            keys |= {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "truncate": scaling.truncate,
            }
            if scaling.mscale and scaling.mscale_all:
                keys |= {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all}
            elif scaling.mscale:
                keys |= {"attention_factor": 0.1 * scaling.mscale * log(scaling.factor) + 1}
        case LongRope() as scaling:
            keys |= {
                "rope_type": "longrope",
                "short_factor": list(scaling.short),
                "long_factor": list(scaling.long),
                "original_max_position_embeddings": scaling.original,
            }
    return keys


def _mixture_keys(moe: Moe) -> dict[str, Any]:
    body, gate = moe.parts[0].body, moe.gate
    hidden, k = getattr(body, "hidden", None), getattr(gate, "k", None)
    shared = getattr(moe.shared, "hidden", None)
    keys: dict[str, Any] = {
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), moe.num_experts),
        **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), k),
        "moe_intermediate_size": hidden,
        "shared_expert_intermediate_size": shared or 0,
        "shared_intermediate_size": shared or 0,
    }
    if hidden and (shared or 0) % hidden == 0:
        number = (shared or 0) // hidden
        keys |= dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), number)
    if isinstance(gate, TopK):
        keys |= {
            "norm_topk_prob": gate.normalize or gate.order == "after",
            **dict.fromkeys(("routed_scaling_factor", "route_scale"), gate.scale),
            "n_group": gate.groups,
            "topk_group": gate.keep_groups or gate.groups,
            "scoring_func": gate.score,
            "use_routing_bias": isinstance(gate.bias, Online),
        }
    return keys
