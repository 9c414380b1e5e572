"""DBRX (Databricks 2024), whose keys lie in objects of their own."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from moec.grammar.huggingface.config import Config
from moec.grammar.huggingface.family import Family
from moec.grammar.huggingface.parts import GATED, dtype_of
from moec.grammar.huggingface.positions import rope_of
from moec.grammar.huggingface.rules import Piece, Rule, same
from moec.grammar.huggingface.usual_rules import Names, rules_by
from moec.grammar.spec import Experts, Gqa, Layer, LayerNorm, Mha, Model, Moe, TokenEmbedding, TopK


def _dbrx(config: Config) -> Model:
    """One projection of queries, keys and values, which are clamped; norms without biases."""
    attn, ffn = config.nested("attn_config"), config.nested("ffn_config")
    dim, heads, depth = config.count("d_model"), config.count("n_heads"), config.count("n_layers")
    kv_heads = attn.count("kv_n_heads", default=1)
    if dim % heads or heads % kv_heads:
        attn.refuse("kv_n_heads", f"heads of {dim} / {heads} dimensions, {kv_heads} of them for keys, do not fit")
        return _nothing(config)
    rope = rope_of(config, dim // heads, theta=attn.number("rope_theta", default=10_000.0))
    clip = attn.number("clip_qkv", default=0.0) or None
    attention: Gqa | Mha = Mha(heads=heads, rope=rope, clip=clip)
    if kv_heads != heads:
        attention = Gqa(heads=heads, kv_heads=kv_heads, rope=rope, clip=clip)
    for part, key in ((attn, "attn_pdrop"), (config, "resid_pdrop"), (config, "emb_pdrop")):
        part.inert(key, 0)
    config.only("tie_word_embeddings", False)
    ffn.inert("moe_jitter_eps", 0)
    ffn.raw("moe_loss_weight", "uniform_expert_assignment", "hidden_size")
    power = ffn.raw("moe_normalize_expert_weights")
    if "moe_normalize_expert_weights" in ffn.values and power not in (None, 1):
        ffn.refuse("moe_normalize_expert_weights", "moec divides by the sum, the norm of power 1")
    normalize = "moe_normalize_expert_weights" not in ffn.values or power is not None
    act = ffn.nested("ffn_act_fn")
    kind = GATED.get(act.word("name", default="silu"))
    if kind is None:
        act.refuse("name", "moec has the gated activations silu and gelu")
        return _nothing(config)
    body: Any = kind(hidden=ffn.count("ffn_hidden_size", default=3584))
    experts = Experts(count=ffn.count("moe_num_experts", default=4), body=body)
    moe = Moe(experts=experts, gate=TopK(k=ffn.count("moe_top_k", default=1), normalize=normalize))
    layer = Layer(attention=attention, moe=moe)
    return Model(
        name="dbrx",
        vocab=config.count("vocab_size", default=32_000),
        dim=dim,
        depth=depth,
        context=config.count("max_seq_len", default=2048),
        dtype=dtype_of(config),
        norm=LayerNorm(bias=False),
        embedding=TokenEmbedding(),
        layers=(layer,) * depth,
    )


def _nothing(config: Config) -> Model:
    """A placeholder for a model that cannot be made: its errors are in `config`."""
    config.require_sound()
    raise AssertionError("a config without errors makes a model")


def _dbrx_attention(names: Names, layer: Layer, theirs: str, ours: str) -> Iterator[Rule]:
    theirs, ours = f"{theirs}norm_attn_norm.attn.", f"{ours}attention."
    parts = tuple(Piece(f"{ours}{part}.weight", "h c d") for part in "qkv")
    yield Rule(f"{theirs}Wqkv.weight", "(h c) d", parts, along="h")
    yield Rule(f"{theirs}out_proj.weight", "d (h c)", (Piece(f"{ours}o.weight", "d h c"),))


def _dbrx_mixture(names: Names, moe: Moe, theirs: str, ours: str, present: Container[str] | None) -> Iterator[Rule]:
    theirs, ours = f"{theirs}ffn.", f"{ours}moe."
    yield same(f"{theirs}router.layer.weight", f"{ours}gate.weight", "e d")
    for half, name in enumerate(("w1", "v1")):
        piece = Piece(f"{ours}experts.up.weight", "e p f d", {"p": half})
        yield Rule(f"{theirs}experts.mlp.{name}", "(e f) d", (piece,))
    yield Rule(f"{theirs}experts.mlp.w2", "(e f) d", (Piece(f"{ours}experts.down.weight", "e d f"),))


def _dbrx_keys(model: Model) -> dict[str, Any]:
    attention, moe = model.layers[0].attention, model.layers[0].moe
    if moe is None or not isinstance(attention, Gqa | Mha):
        return {}
    body, gate = moe.parts[0].body, moe.gate
    normalized = isinstance(gate, TopK) and (gate.normalize or gate.order == "after")
    rope = attention.rope
    return {
        "d_model": model.dim,
        "n_heads": attention.heads,
        "n_layers": model.depth,
        "max_seq_len": model.context,
        "attn_config": {
            "kv_n_heads": attention.kv_heads if isinstance(attention, Gqa) else attention.heads,
            "clip_qkv": attention.clip,
            "rope_theta": rope.theta if rope else None,
        },
        "ffn_config": {
            "ffn_hidden_size": getattr(body, "hidden", None),
            "hidden_size": model.dim,
            "moe_num_experts": moe.num_experts,
            "moe_top_k": getattr(gate, "k", None),
            "moe_normalize_expert_weights": 1.0 if normalized else None,
            "ffn_act_fn": {"name": "gelu" if body.word == "geglu" else "silu"},
        },
    }


FAMILIES = (
    Family(
        "dbrx",
        "DbrxForCausalLM",
        _dbrx,
        rules_by(
            Names(
                embedding="transformer.wte.weight",
                norm="transformer.norm_f.weight",
                layer="transformer.blocks.{n}.",
                norms={"attention_norm": "norm_attn_norm.norm_1", "ffn_norm": "norm_attn_norm.norm_2"},
            ),
            attend=_dbrx_attention,
            mix=_dbrx_mixture,
        ),
        _dbrx_keys,
        ignored=frozenset(("num_key_value_heads",)),
        aliases={
            "num_attention_heads": "n_heads",
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "max_position_embeddings": "max_seq_len",
        },
    ),
)
