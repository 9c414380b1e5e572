"""gpt-oss (OpenAI 2025, arXiv 2508.10925): sinks, alternating windows, clamped gates, experts in one tensor."""

from __future__ import annotations

from collections.abc import Container, Iterator

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
    heads_of,
    kinds_of_attention,
    layers_of,
    positive,
    windows_of,
)
from moec.grammar.huggingface.positions import rope_of
from moec.grammar.huggingface.rules import Piece, Rule, same
from moec.grammar.huggingface.usual_rules import Names, rules_by
from moec.grammar.spec import Experts, Model, Moe, TopK
from moec.grammar.spec.experts import SwiGLU

DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read(config: Config) -> Model:
    depth = depth_of(config)
    kinds = kinds_of_attention(config, depth, lambda number: FULL if number % 2 else SLIDING)
    rope = rope_of(config, heads_of(config)[2], theta=150_000.0)
    bias = bias_of(config, "attention_bias", default=True)
    attentions = [
        attention_of(config, rope=rope, bias=bias, sinks=True, window=window)
        for window in windows_of(config, kinds, default=128)
    ]
    config.inert("attention_dropout", 0)
    config.only("hidden_act", "silu")
    chosen = config.count("num_experts_per_tok", default=4)
    config.only("experts_per_token", chosen, why="transformers reads `num_experts_per_tok` alone")
    body = SwiGLU(
        hidden=config.count("intermediate_size"),
        bias=True,
        clamp=positive(config, "swiglu_limit", 7.0),
        alpha=positive(config, "swiglu_alpha", 1.702),
    )
    moe = Moe(
        experts=Experts(count=config.count("num_local_experts"), body=body),
        gate=TopK(k=chosen, order="after", bias="learned"),
    )
    config.raw("initial_context_length")
    return decoder(config, layers_of(attentions, [moe] * depth), eps=eps_of(config, 1e-5))


def _mix(names: Names, moe: Moe, theirs: str, ours: str, present: Container[str] | None) -> Iterator[Rule]:
    """All experts in one tensor, transposed, in which gate and up alternate."""
    theirs, ours = f"{theirs}mlp.", f"{ours}moe."
    yield same(f"{theirs}router.weight", f"{ours}gate.weight", "e d")
    yield same(f"{theirs}router.bias", f"{ours}gate.bias", "e")
    yield Rule(f"{theirs}experts.gate_up_proj", "e d (f p)", (Piece(f"{ours}experts.up.weight", "e p f d"),))
    yield Rule(f"{theirs}experts.gate_up_proj_bias", "e (f p)", (Piece(f"{ours}experts.up.bias", "e p f"),))
    yield Rule(f"{theirs}experts.down_proj", "e f d", (Piece(f"{ours}experts.down.weight", "e d f"),))
    yield same(f"{theirs}experts.down_proj_bias", f"{ours}experts.down.bias", "e d")


def _keys(model: Model) -> dict[str, object]:
    body = model.layers[0].moe.parts[0].body if model.layers[0].moe is not None else None
    return {"swiglu_limit": getattr(body, "clamp", None), "swiglu_alpha": getattr(body, "alpha", None)}


DEFAULTS = {"num_key_value_heads": 8, "head_dim": 64, "rope_parameters": DEFAULT_ROPE}

FAMILIES = (
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        _read,
        rules_by(Names(), mix=_mix),
        _keys,
        defaults=DEFAULTS,
        aliases={"num_experts": "num_local_experts"},
    ),
)
