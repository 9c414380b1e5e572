"""Granite-MoE (IBM 2024): multipliers everywhere, a softmax over the chosen, experts in one tensor, shared experts."""

from __future__ import annotations

from collections.abc import Container, Iterator
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
    positive,
    shared_of,
    windows_of,
)
from moec.grammar.huggingface.positions import rope_of
from moec.grammar.huggingface.rules import Piece, Rule, same
from moec.grammar.huggingface.usual_rules import Names, rules_by
from moec.grammar.spec import Experts, Model, Moe, Rope, TopK


def _attention(config: Config, rope: Rope | None, **options: Any) -> Any:
    config.inert("attention_dropout", 0)
    return attention_of(
        config,
        rope=rope,
        bias=bias_of(config, "attention_bias"),
        multiplier=positive(config, "attention_multiplier", 1.0),
        **options,
    )


def _mixture(config: Config, *, shared: int = 0) -> Moe:
    experts = Experts(count=config.count("num_local_experts"), body=gated(config, config.count("intermediate_size")))
    gate = TopK(k=config.count("num_experts_per_tok", default=2), order="after")
    return Moe(experts=experts, gate=gate, shared=gated(config, shared) if shared else None)


def _decoder(config: Config, attentions: list[Any], body: Any) -> Model:
    scaling = positive(config, "logits_scaling", 1.0)
    return decoder(
        config,
        layers_of(attentions, [body] * len(attentions)),
        eps=eps_of(config, 1e-6),
        residual_multiplier=positive(config, "residual_multiplier", 1.0),
        embedding={
            "multiplier": positive(config, "embedding_multiplier", 1.0),
            "logits_multiplier": 1 / scaling,
        },
    )


def _plain(config: Config) -> Model:
    depth = depth_of(config)
    attention = _attention(config, rope_of(config, heads_of(config)[2]))
    return _decoder(config, [attention] * depth, _mixture(config))


def _shared(config: Config) -> Model:
    depth = depth_of(config)
    attention = _attention(config, rope_of(config, heads_of(config)[2]))
    body = _mixture(config, shared=shared_of(config, "shared_intermediate_size", 0))
    return _decoder(config, [attention] * depth, body)


def _hybrid(config: Config) -> Model:
    """The layers with attention; layers with states (Mamba) are refused."""
    depth = depth_of(config)
    kinds = config.words("layer_types", length=depth)
    if kinds is None:
        config.refuse("layer_types", "left out, its layers are of Mamba")
    for kind in sorted(set(kinds or ()) - {"attention", FULL}):
        config.refuse("layer_types", f"moec has no layers of the kind `{kind}` (Mamba)")
    for key in config.values:
        if key.startswith("mamba_") or key == "time_step_limit":
            config.raw(key)
    place = config.only("position_embedding_type", "rope", "nope", default="nope")
    rope: Rope | None = rope_of(config, heads_of(config)[2])
    if place == "nope":
        rope = None
    shared = shared_of(config, "shared_intermediate_size", 1024)
    if config.has("num_local_experts") and config.raw("num_local_experts") == 0:
        config.raw("intermediate_size", "num_experts_per_tok")
        return _decoder(config, [_attention(config, rope)] * depth, gated(config, shared))
    return _decoder(config, [_attention(config, rope)] * depth, _mixture(config, shared=shared))


def _swa(config: Config) -> Model:
    """Windows, sinks, and a base of wavelengths for each layer, 0 for no positions."""
    depth, width = depth_of(config), heads_of(config)[2]
    kinds = kinds_of_attention(config, depth, lambda number: SLIDING if number % 4 else FULL)
    usual = rope_of(config, width)
    bases = config.numbers("layer_rope_theta", length=depth) or (usual.theta,) * depth
    attentions = [
        _attention(config, usual.replace(theta=base) if base else None, sinks=True, window=window)
        for base, window in zip(bases, windows_of(config, kinds, default=128), strict=True)
    ]
    body = _mixture(config, shared=shared_of(config, "shared_intermediate_size", 0))
    return _decoder(config, attentions, body)


def _mix(names: Names, moe: Moe, theirs: str, ours: str, present: Container[str] | None) -> Iterator[Rule]:
    router = f"{theirs}block_sparse_moe.{names.router}"
    yield same(router, f"{ours}moe.gate.weight", "e d")
    up, down = (f"{theirs}block_sparse_moe.{part}" for part in names.fused)
    yield Rule(up, "e (p f) d", (Piece(f"{ours}moe.experts.up.weight", "e p f d"),))
    yield same(down, f"{ours}moe.experts.down.weight", "e d f")
    if moe.shared is not None:
        yield from _feed(f"{theirs}shared_mlp.", f"{ours}moe.shared.")


def _feed(theirs: str, ours: str) -> Iterator[Rule]:
    yield Rule(f"{theirs}input_linear.weight", "(p f) d", (Piece(f"{ours}up.weight", "p f d"),))
    yield same(f"{theirs}output_linear.weight", f"{ours}down.weight", "d f")


def _keys(model: Model) -> dict[str, Any]:
    attention, layer = model.layers[0].attention, model.layers[0]
    width = getattr(attention, "head_dim", None) or max(1, model.dim // attention.heads)
    bases = [layer.attention.rope.theta if layer.attention.rope else 0.0 for layer in model.layers]
    return {
        "attention_multiplier": attention.multiplier or width**-0.5,
        "layer_rope_theta": bases,
        "mamba_expand": 2,
        "mamba_n_heads": 1,
        "mamba_d_head": 2 * model.dim,
        "position_embedding_type": "nope" if attention.rope is None else "rope",
        **(
            {}
            if layer.moe
            else {"num_local_experts": 0, "shared_intermediate_size": getattr(layer.ffn, "hidden", None)}
        ),
    }


SAVED = Names(
    moe="block_sparse_moe.", router="router.layer.weight", fused=("input_linear.weight", "output_linear.weight")
)
MADE = Names(moe="block_sparse_moe.", router="router.weight")
RULES = rules_by(SAVED, MADE, mix=_mix, feed=lambda layer, theirs, ours: _feed(f"{theirs}shared_mlp.", f"{ours}ffn."))

FAMILIES = (
    Family("granitemoe", "GraniteMoeForCausalLM", _plain, RULES, _keys),
    Family("granitemoeshared", "GraniteMoeSharedForCausalLM", _shared, RULES, _keys),
    Family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        _hybrid,
        RULES,
        _keys,
        aliases={"layers_block_type": "layer_types"},
    ),
    Family("granitemoe_swa", "GraniteMoeSWAForCausalLM", _swa, rules_by(MADE, mix=_mix), _keys),
)
