"""Families of one architecture each: AFMoE, DBRX, ERNIE-4.5, Hunyuan and Phi-3.5-MoE."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from typing import Any

from moec.grammar.huggingface.config import Config
from moec.grammar.huggingface.family import Family
from moec.grammar.huggingface.keys import kinds_by_positions
from moec.grammar.huggingface.parts import (
    FULL,
    GATED,
    SLIDING,
    attention_of,
    bias_of,
    decoder,
    depth_of,
    dtype_of,
    eps_of,
    gated,
    heads_of,
    kinds_of_attention,
    layers_of,
    positive,
    shared_of,
    window_of,
    windows_of,
)
from moec.grammar.huggingface.positions import rope_of
from moec.grammar.huggingface.rules import Piece, Rule, same
from moec.grammar.huggingface.usual_rules import Names, rules_by
from moec.grammar.spec import Experts, Gqa, Layer, LayerNorm, Mha, Model, Moe, Online, SparseMixer, TokenEmbedding, TopK

# ---- AFMoE (Arcee 2025) ----------------------------------------------------------------------------


def _afmoe(config: Config) -> Model:
    """Gated attention, positions in layers with windows only, norms around each part, sigmoid scores with a bias."""
    depth, step = depth_of(config), config.count("global_attn_every_n_layers", default=4)
    kinds = kinds_of_attention(config, depth, lambda n: FULL if (n + 1) % step == 0 else SLIDING)
    rope = rope_of(config, heads_of(config)[2])
    attentions = [
        attention_of(
            config,
            rope=rope if kind == SLIDING else None,
            bias=bias_of(config, "attention_bias"),
            qk_norm="head",
            output_gate="element",
            window=window,
        )
        for kind, window in zip(kinds, windows_of(config, kinds, default=1024), strict=True)
    ]
    config.inert("attention_dropout", 0)
    for key, value in (("score_func", "sigmoid"), ("route_norm", True), ("n_group", 1), ("topk_group", 1)):
        config.only(key, value)
    hidden, number = config.count("moe_intermediate_size"), shared_of(config, "num_shared_experts", 0)
    gate = TopK(
        k=config.count("num_experts_per_tok"),
        score="sigmoid",
        normalize=True,
        scale=positive(config, "route_scale", 1.0),
        bias=Online(),
    )
    body = Moe(
        experts=Experts(count=config.count("num_experts"), body=gated(config, hidden)),
        gate=gate,
        shared=gated(config, hidden * number) if number else None,
    )
    first = config.count("num_dense_layers", default=1, least=0)
    dense = gated(config, config.count("intermediate_size")) if first else None
    config.raw("intermediate_size")
    bodies: list[Any] = [dense if n < first else body for n in range(depth)]
    scale = math.sqrt(config.count("hidden_size")) if config.flag("mup_enabled", default=False) else 1.0
    return decoder(
        config,
        layers_of(attentions, bodies),
        eps=eps_of(config, 1e-5),
        norm_place="sandwich",
        embedding={"multiplier": scale},
    )


AFMOE_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "ffn_post_norm": "post_mlp_layernorm",
}

# ---- DBRX (Databricks 2024) ------------------------------------------------------------------------


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
    """Stands for a model that cannot be made: its errors are in `config`."""
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


# ---- ERNIE-4.5 (Baidu 2025) ------------------------------------------------------------------------


def _ernie(config: Config) -> Model:
    """Softmax scores with a bias that chooses; neighbours turn together; sparse layers by interval."""
    depth, has_bias = depth_of(config), config.flag("use_bias", default=False)
    rope = rope_of(config, heads_of(config)[2], theta=5e5, interleaved=True)
    attention = attention_of(config, rope=rope, bias="all" if has_bias else "none")
    config.inert("attention_dropout", 0)
    config.only("moe_use_aux_free", True)
    if config.number("moe_norm_min", default=1e-12) > 1e-6:
        config.refuse("moe_norm_min", "moec divides the weights by their sum, however small it is")
    hidden = config.count("moe_intermediate_size")
    number = shared_of(config, "moe_num_shared_experts", 2)
    body = Moe(
        experts=Experts(count=config.count("moe_num_experts"), body=gated(config, hidden)),
        gate=TopK(k=config.count("moe_k", default=6), normalize=True, bias=Online()),
        shared=gated(config, hidden * number, bias=has_bias) if number else None,
    )
    every, first = (
        config.count("moe_layer_interval", default=1),
        config.count("moe_layer_start_index", default=1, least=0),
    )
    last = config.count("moe_layer_end_index", default=-1, least=-1)
    last = depth - 1 if last == -1 else last
    sparse = [(n + 1) % every == 0 and first <= n <= last for n in range(depth)]
    dense = None if all(sparse) else gated(config, config.count("intermediate_size"), bias=has_bias)
    config.raw("intermediate_size")
    bodies: list[Any] = [body if is_sparse else dense for is_sparse in sparse]
    head = {"logits_bias": has_bias}
    return decoder(config, layers_of([attention] * depth, bodies), eps=eps_of(config, 1e-5), tied=True, embedding=head)


def _ernie_keys(model: Model) -> dict[str, Any]:
    sparse = [number for number, layer in enumerate(model.layers) if layer.moe is not None] or [model.depth]
    step = sparse[1] - sparse[0] if len(sparse) > 1 else 1
    return {
        "moe_layer_interval": step, "moe_layer_start_index": sparse[0], "moe_layer_end_index": sparse[-1],
    }  # fmt: skip


# ---- Hunyuan (Tencent 2025) ------------------------------------------------------------------------


def _hunyuan(config: Config) -> Model:
    """Norms of queries and keys after their positions, and a shared expert as wide as the others."""
    depth = depth_of(config)
    rope = rope_of(config, heads_of(config)[2], by_alpha=True)
    attention = attention_of(
        config, rope=rope, bias=bias_of(config, "attention_bias"), qk_norm="head", qk_norm_place="after_rope"
    )
    config.inert("attention_dropout", 0)
    for key, value in (("use_cla", False), ("use_mla", False), ("use_qk_norm", True), ("use_mixed_mlp_moe", True)):
        config.only(key, value)
    config.only("num_shared_expert", 1, [1] * depth)
    hidden = config.count("intermediate_size")
    config.only("moe_intermediate_size", hidden, [hidden] * depth)
    count, k = (_one_for_all(config, key, depth) for key in ("num_experts", "moe_topk"))
    moe = Moe(
        experts=Experts(count=count, body=gated(config, hidden)),
        gate=TopK(k=k, normalize=True),
        shared=gated(config, hidden),
    )
    return decoder(config, layers_of([attention] * depth, [moe] * depth), eps=eps_of(config, 1e-5))


def _one_for_all(config: Config, key: str, depth: int) -> int:
    """A number, or a list with the same number for each layer."""
    value = config.raw(key)
    if isinstance(value, list | tuple):
        numbers = config.numbers(key, length=depth) or (1.0,)
        if len(set(numbers)) > 1:
            config.refuse(key, "layers differ in it, and moec's reader has one number for all")
        return int(numbers[0])
    return config.count(key)


# ---- Phi-3.5-MoE (Microsoft 2024, arXiv 2404.14219) ------------------------------------------------


def _phi(config: Config) -> Model:
    """Sparsemixer as the gate, norms with biases, a bias of the logits."""
    depth, eps = depth_of(config), eps_of(config, 1e-5)
    attention = attention_of(
        config,
        rope=rope_of(config, heads_of(config)[2], theta=1e6),
        bias=bias_of(config, "attention_bias"),
        window=window_of(config),
    )
    config.inert("attention_dropout", 0)
    config.inert("hidden_dropout", 0)
    config.inert("input_jitter_noise", 0)
    config.only("num_experts_per_tok", 2)
    jitter = config.number("router_jitter_noise", default=0.01)
    experts = Experts(count=config.count("num_local_experts"), body=gated(config, config.count("intermediate_size")))
    moe = Moe(experts=experts, gate=SparseMixer(jitter=jitter))
    return decoder(
        config,
        layers_of([attention] * depth, [moe] * depth),
        eps=eps,
        norm=LayerNorm(eps=eps),
        embedding={"logits_bias": config.flag("lm_head_bias", default=False)},
    )


def _phi_keys(model: Model) -> dict[str, Any]:
    gates = [layer.moe.gate for layer in model.layers if layer.moe is not None]
    return {"router_jitter_noise": getattr(gates[0], "jitter", None)} if gates else {}


FAMILIES = (
    Family(
        "afmoe",
        "AfmoeForCausalLM",
        _afmoe,
        rules_by(Names(norms=AFMOE_NORMS, router="router.gate.weight", bias="expert_bias")),
        lambda model: {"mup_enabled": getattr(model.embedding, "multiplier", 1.0) != 1.0, **kinds_by_positions(model)},
        ignored=frozenset(("load_balance_coeff", "num_expert_groups", "num_limited_groups", "rope_scaling")),
        defaults={"head_dim": 128, "num_shared_experts": 2},
    ),
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
    Family(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        _ernie,
        rules_by(
            Names(bias="moe_statics.e_score_correction_bias", bias_form="1 e"),
            Names(bias="gate.moe_statics.e_score_correction_bias", bias_form="1 e"),
        ),
        _ernie_keys,
        ignored=frozenset(("num_nextn_predict_layers", "moe_capacity", "moe_gate", "compression_ratio")),
        skipped=(r"model\.mtp_.*",),
        defaults={"num_key_value_heads": 4},
        aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        fp32=("routers",),
    ),
    Family(
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        _hunyuan,
        rules_by(
            Names(router="gate.wg.weight", shared="mlp.shared_mlp.", q_norm="query_layernorm", k_norm="key_layernorm")
        ),
        ignored=frozenset(
            ("eod_token_id", "moe_drop_tokens", "moe_random_routing_dropped_token", "moe_layer_num_skipped")
        ),
        aliases={"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
        fp32=("routers",),
    ),
    Family(
        "phimoe",
        "PhimoeForCausalLM",
        _phi,
        rules_by(Names(moe="block_sparse_moe.", expert=("w1", "w3", "w2")), Names(moe="mlp.", router="router.weight")),
        _phi_keys,
        defaults={"num_key_value_heads": 8},
    ),
)
