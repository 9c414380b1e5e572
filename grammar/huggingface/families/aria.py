"""Aria (Rhymes 2024, arXiv 2410.05993) and Command A+ (Cohere 2026)."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from moec.grammar.huggingface.config import Config
from moec.grammar.huggingface.family import Family
from moec.grammar.huggingface.keys import kinds_by_positions
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
from moec.grammar.huggingface.rules import Piece, Rule, same
from moec.grammar.huggingface.usual_rules import Names, dense_rules, rules_by
from moec.grammar.spec import Experts, LayerNorm, Model, Moe, RmsNorm, TopK
from moec.grammar.spec.experts import GeGLU, SwiGLU

# ---- Aria's text model -----------------------------------------------------------------------------


def _aria(config: Config) -> Model:
    """A softmax over the chosen; experts are SwiGLU whatever `hidden_act` is, which the shared ones follow."""
    depth = depth_of(config)
    attention = attention_of(config, rope=rope_of(config, heads_of(config)[2]), bias=bias_of(config, "attention_bias"))
    config.inert("attention_dropout", 0)
    hidden, number = config.count("intermediate_size"), shared_of(config, "moe_num_shared_experts", 2)
    biased = config.flag("mlp_bias", default=False)
    body = Moe(
        experts=Experts(count=config.count("moe_num_experts", default=8), body=SwiGLU(hidden=hidden)),
        gate=TopK(k=config.count("moe_topk", default=2), order="after"),
        shared=gated(config, hidden * number, bias=biased) if number else None,
    )
    return decoder(config, layers_of([attention] * depth, [body] * depth), eps=eps_of(config, 1e-6))


def _aria_keys(model: Model) -> dict[str, Any]:
    moe = model.layers[0].moe
    shared = moe.shared if moe is not None else None
    return {
        "mlp_bias": getattr(shared, "bias", False),
        "hidden_act": "gelu" if isinstance(shared, GeGLU) else "silu",
    }


def _aria_mix(names: Names, moe: Moe, theirs: str, ours: str, present: Container[str] | None) -> Iterator[Rule]:
    """All experts in one tensor, transposed."""
    theirs, ours = f"{theirs}mlp.", f"{ours}moe."
    yield same(f"{theirs}router.weight", f"{ours}gate.weight", "e d")
    made = "experts.gate_up_proj", "experts.down_proj"
    up, down = made if present is not None and theirs + made[0] in present else names.fused
    yield Rule(theirs + up, "e d (p f)", (Piece(f"{ours}experts.up.weight", "e p f d"),))
    yield Rule(theirs + down, "e f d", (Piece(f"{ours}experts.down.weight", "e d f"),))
    if moe.shared is not None:
        yield from dense_rules(moe.shared, f"{theirs}shared_experts.", f"{ours}shared.")


# ---- Command A+ ------------------------------------------------------------------------------------


def _cohere2(config: Config) -> Model:
    """Attention beside the feed-forward with one norm for both; positions in layers with windows."""
    depth, dense_before = depth_of(config), config.count("first_k_dense_replace", default=0, least=0)
    every = config.count("sliding_window_pattern", default=4)
    before = config.count("prefix_dense_sliding_window_pattern", default=1)

    def kind(number: int) -> str:
        place, step = (number, before) if number < dense_before else (number - dense_before, every)
        return FULL if (place + 1) % step == 0 else SLIDING

    kinds, sparse = kinds_of_attention(config, depth, kind), sparse_layers(config, depth, dense_before)
    heads, kv_heads, width = heads_of(config)
    if config.has("rope_scaling") and not config.has("rope_parameters"):
        config.refuse("rope_scaling", "transformers ignores it for this architecture: `rope_parameters` says the same")
    config.raw("rope_scaling")
    rope, bias = (
        rope_of(config, width, interleaved=True, spellings=("rope_parameters",)),
        bias_of(config, "attention_bias"),
    )
    attentions = [
        grouped(
            heads,
            kv_heads,
            width,
            config.count("hidden_size"),
            rope=rope if kind == SLIDING or (not is_sparse and before == 1) else None,
            bias=bias,
            window=window,
        )
        for is_sparse, kind, window in zip(sparse, kinds, windows_of(config, kinds, default=4096), strict=True)
    ]
    config.inert("attention_dropout", 0)
    hidden = config.count("intermediate_size")
    dense = gated(config, config.count("prefix_dense_intermediate_size", default=hidden))
    bodies = [_cohere2_mixture(config, hidden) if is_sparse else dense for is_sparse in sparse]
    has_rms, eps = config.has("rms_norm_eps"), eps_of(config, 1e-5, "layer_norm_eps")
    return decoder(
        config,
        layers_of(attentions, bodies),
        eps=eps,
        norm=RmsNorm(eps=eps_of(config, 1e-5)) if has_rms else LayerNorm(eps=eps, bias=False),
        tied=True,
        parallel_residual="one_norm",
        embedding={"logits_multiplier": positive(config, "logit_scale", 0.0625)},
    )


def _cohere2_mixture(config: Config, hidden: int) -> Moe:
    number = shared_of(config, "num_shared_experts", 0)
    how = config.only("shared_expert_combination_strategy", "average", "sum")
    if number and how == "average":
        config.refuse("shared_expert_combination_strategy", "moec adds shared experts, and halves nothing: only `sum`")
    k, normalize = config.count("num_experts_per_tok", default=2), config.flag("norm_topk_prob", default=True)
    if config.only("expert_selection_fn", "softmax", "sigmoid") == "softmax":
        gate = TopK(k=k, order="after")
    else:
        gate = TopK(k=k, score="sigmoid", normalize=normalize)
    experts = Experts(count=config.count("num_experts", default=8), body=gated(config, hidden))
    return Moe(experts=experts, gate=gate, shared=gated(config, hidden * number) if number else None)


def _cohere2_keys(model: Model) -> dict[str, Any]:
    moes = [layer.moe for layer in model.layers if layer.moe is not None]
    dense = [layer.ffn for layer in model.layers if layer.ffn is not None]
    full = [layer for layer in model.layers if layer.attention.window is None and layer.ffn is not None]
    hidden = getattr(moes[0].parts[0].body, "hidden", None) if moes else getattr(dense[0], "hidden", None)
    gate = moes[0].gate if moes else None
    is_rms = isinstance(model.norm, RmsNorm)
    kinds = {} if any(layer.attention.window for layer in model.layers) and full else kinds_by_positions(model)
    return {
        **kinds,
        "first_k_dense_replace": None,
        "intermediate_size": hidden,
        "prefix_dense_intermediate_size": getattr(dense[0], "hidden", None) if dense else None,
        "prefix_dense_sliding_window_pattern": 2 if any(layer.attention.rope is None for layer in full) else 1,
        "rms_norm_eps": model.norm.eps if is_rms else None,
        "layer_norm_eps": None if is_rms else model.norm.eps,
        "shared_expert_combination_strategy": "sum",
        "expert_selection_fn": getattr(gate, "score", "softmax"),
        "logit_scale": getattr(model.embedding, "logits_multiplier", 1.0),
    }


FAMILIES = (
    Family(
        "aria_text",
        "AriaTextForCausalLM",
        _aria,
        rules_by(
            Names(router="router.weight", fused=("experts.fc1.weight", "experts.fc2.weight")),
            mix=_aria_mix,
        ),
        _aria_keys,
    ),
    Family(
        "cohere2_moe",
        "Cohere2MoeForCausalLM",
        _cohere2,
        rules_by(Names(norms={"attention_norm": "input_layernorm"})),
        _cohere2_keys,
        ignored=frozenset(("use_gated_activation", "use_parallel_block", "use_qk_norm", "position_embedding_type")),
        defaults={"head_dim": 128},
    ),
)
