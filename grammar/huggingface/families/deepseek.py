"""DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437), Kimi-K2, GLM-4.5, dots.llm1, Solar Open and EXAONE-MoE:
latent attention, or routers of sigmoid scores with a bias that chooses, and dense layers before the sparse ones."""

from __future__ import annotations

from typing import Any

from moec.grammar.huggingface.config import Config
from moec.grammar.huggingface.family import Family
from moec.grammar.huggingface.keys import kinds_by_positions, parameters_of
from moec.grammar.huggingface.parts import (
    FULL,
    SLIDING,
    attention_of,
    bias_of,
    depth_of,
    eps_of,
    gated,
    heads_of,
    kinds_of_attention,
    mixed,
    positive,
    shared_of,
    sparse_from,
    sparse_layers,
    windows_of,
)
from moec.grammar.huggingface.positions import rope_of
from moec.grammar.huggingface.usual_rules import Names, rules_by
from moec.grammar.spec import Experts, Mla, Model, Moe, Online, Rope, TopK

SCORES = {"dots1": ("noaux_tc", "sigmoid")}
"""What `scoring_func` may be, where it is not `sigmoid` alone: dots.llm1's configs name the method there, and its code
computes a sigmoid."""
LATENT_EPS = 1e-6
"""Of the latent vectors' norms in their code, whatever `rms_norm_eps` is."""
PREDICTED = frozenset(("num_nextn_predict_layers", "num_mtp_layers"))
"""Layers that predict further tokens: transformers leaves their tensors out too."""


def groups_of(config: Config, experts: int) -> dict[str, Any]:
    """`groups` and `keep_groups` of a gate, none where all groups are kept."""
    groups, kept = config.count("n_group", default=1), config.count("topk_group", default=1)
    if experts % groups:
        config.refuse("n_group", f"it does not divide the {experts} experts")
    return {"groups": groups, "keep_groups": kept} if kept < groups else {}


def biased_gate(config: Config, experts: int, *, normalize: bool = True, scale: float = 1.0) -> TopK:
    """Sigmoid scores; `e_score_correction_bias` chooses but does not weigh (V3)."""
    config.only("scoring_func", *SCORES.get(config.word("model_type"), ("sigmoid",)))
    config.only("topk_method", "noaux_tc")
    return TopK(
        k=config.count("num_experts_per_tok"),
        score="sigmoid",
        normalize=config.flag("norm_topk_prob", default=normalize),
        scale=positive(config, "routed_scaling_factor", scale),
        bias=Online(),
        **groups_of(config, experts),
    )


def mixture_of(
    config: Config,
    *,
    normalize: bool = True,
    scale: float = 1.0,
    routed: str = "n_routed_experts",
    shared: str = "n_shared_experts",
) -> Moe:
    """Experts, and as many shared ones as one wider expert."""
    hidden = config.count("moe_intermediate_size")
    count = config.count(routed)
    number = config.count(shared, least=0)
    return Moe(
        experts=Experts(count=count, body=gated(config, hidden)),
        gate=biased_gate(config, count, normalize=normalize, scale=scale),
        shared=gated(config, hidden * number) if number else None,
    )


def latent_attention(config: Config, *, interleaved: bool, rope: Rope | None = None) -> Mla:
    """DeepSeek's attention, with the config's positions unless `rope` gives them."""
    turning, eps = config.count("qk_rope_head_dim"), eps_of(config, 1e-6)
    config.raw("head_dim", "qk_head_dim", "num_key_value_heads")
    config.inert("attention_dropout", 0)
    return Mla(
        heads=config.count("num_attention_heads"),
        q_rank=None if config.is_null("q_lora_rank") else config.count("q_lora_rank"),
        kv_rank=config.count("kv_lora_rank"),
        nope_dim=config.count("qk_nope_head_dim"),
        rope_dim=turning,
        value_dim=config.count("v_head_dim"),
        bias=bias_of(config, "attention_bias"),
        rope=rope or rope_of(config, turning, interleaved=interleaved, sharpens_scores=True),
        latent_eps=None if eps == LATENT_EPS else LATENT_EPS,
    )


def _v2(config: Config) -> Model:
    depth = depth_of(config)
    attention = latent_attention(config, interleaved=True)
    config.only("norm_topk_prob", False, why="transformers ignores it, and DeepSeek's code then leaves the scaling out")
    config.only("scoring_func", "softmax")
    config.only("moe_layer_freq", 1)
    config.only("mlp_bias", False)
    hidden, count = config.count("moe_intermediate_size"), config.count("n_routed_experts")
    method = config.only("topk_method", "greedy", "group_limited_greedy")
    groups = groups_of(config, count) if method == "group_limited_greedy" else {}
    if groups:
        groups["group_score"] = "max"
    config.raw("n_group", "topk_group")
    number = shared_of(config, "n_shared_experts", 2)
    gate = TopK(
        k=config.count("num_experts_per_tok"),
        scale=positive(config, "routed_scaling_factor", 1.0),
        **groups,
    )
    body = Moe(
        experts=Experts(count=count, body=gated(config, hidden)),
        gate=gate,
        shared=gated(config, hidden * number) if number else None,
    )
    sparse = sparse_from(depth, config.count("first_k_dense_replace", default=0, least=0))
    return mixed(config, [attention] * depth, sparse, body, 1e-6)


def _v3(config: Config) -> Model:
    depth = depth_of(config)
    attention = latent_attention(config, interleaved=config.flag("rope_interleave", default=True))
    config.only("moe_layer_freq", 1)
    config.only("head_dim", config.count("qk_rope_head_dim"), why="transformers computes positions of this width")
    body = mixture_of(config, scale=2.5)
    sparse = sparse_from(depth, config.count("first_k_dense_replace", default=3, least=0))
    return mixed(config, [attention] * depth, sparse, body, 1e-6)


def _glm4(config: Config) -> Model:
    depth = depth_of(config)
    attention = attention_of(
        config,
        rope=rope_of(config, heads_of(config)[2], fraction=0.5, partial=True),
        bias=bias_of(config, "attention_bias", word="qkv"),
        qk_norm="head" if config.flag("use_qk_norm", default=False) else "none",
    )
    config.inert("attention_dropout", 0)
    sparse = sparse_from(depth, config.count("first_k_dense_replace", default=1, least=0))
    return mixed(config, [attention] * depth, sparse, mixture_of(config), 1e-5)


def _glm4_keys(model: Model) -> dict[str, Any]:
    """The part of a head that turns, which is not all of it by default."""
    rope, width = model.layers[0].attention.rope, getattr(model.layers[0].attention, "head_dim", None) or 1
    if rope is None:
        return {}
    return {"rope_parameters": {**parameters_of(rope, width, model.context), "partial_rotary_factor": rope.fraction}}


def _glm4_lite(config: Config) -> Model:
    depth = depth_of(config)
    attention = latent_attention(config, interleaved=config.flag("rope_interleave", default=True))
    body = mixture_of(config, scale=1.8)
    eps = eps_of(config, 1e-5)
    if eps != LATENT_EPS and not config.has("rms_norm_eps"):
        attention = attention.replace(latent_eps=LATENT_EPS)
    return mixed(config, [attention] * depth, sparse_layers(config, depth, 1), body, 1e-5)


def _dots1(config: Config) -> Model:
    depth = depth_of(config)
    first = config.count("max_window_layers", default=62, least=0)
    has_window = config.has("sliding_window")
    kinds = kinds_of_attention(config, depth, lambda n: SLIDING if has_window and n >= first else FULL)
    attentions = [
        attention_of(
            config,
            rope=rope_of(config, heads_of(config)[2]),
            bias=bias_of(config, "attention_bias"),
            qk_norm="head",
            window=window,
        )
        for window in windows_of(config, kinds)
    ]
    config.inert("attention_dropout", 0)
    config.only("moe_layer_freq", 1)
    sparse = sparse_from(depth, config.count("first_k_dense_replace", default=0, least=0))
    return mixed(config, attentions, sparse, mixture_of(config, normalize=False), 1e-6)


def _solar(config: Config) -> Model:
    depth = depth_of(config)
    rope = rope_of(config, heads_of(config)[2], theta=1e6)
    attention = attention_of(config, rope=rope, bias=bias_of(config, "attention_bias", word="qkv"))
    config.inert("attention_dropout", 0)
    config.only("first_k_dense_replace", 0)
    config.only("use_qk_norm", False)
    return mixed(config, [attention] * depth, [True] * depth, mixture_of(config), 1e-5)


def _exaone(config: Config) -> Model:
    """Layers without windows have no positions."""
    depth = depth_of(config)
    pattern = config.raw("sliding_window_pattern")
    step = pattern if isinstance(pattern, int) and pattern > 0 else 4
    kinds = kinds_of_attention(config, depth, lambda n: FULL if (n + 1) % step == 0 else SLIDING)
    rope = rope_of(config, heads_of(config)[2])
    attentions = [
        attention_of(config, rope=None if kind == FULL else rope, qk_norm="head", window=window)
        for kind, window in zip(kinds, windows_of(config, kinds, default=4096), strict=True)
    ]
    config.inert("attention_dropout", 0)
    sparse = sparse_layers(config, depth, config.count("first_k_dense_replace", default=1, least=0))
    body = mixture_of(config, scale=2.5, routed="num_experts", shared="num_shared_experts")
    return mixed(config, attentions, sparse, body, 1e-5)


USUAL = rules_by(Names())
EXAONE = rules_by(Names(bias="e_score_correction_bias"), Names())

ROUTED = {"num_local_experts": "n_routed_experts"}
PREDICTING = {"num_mtp_layers": "num_nextn_predict_layers"}
GROUPS_OF_V3 = {"n_group": 8, "topk_group": 4}

FAMILIES = (
    Family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        _v2,
        USUAL,
        lambda model: {
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "topk_method": "group_limited_greedy" if _grouped(model) else "greedy",
        },
        aliases={"num_experts": "n_routed_experts"},
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        _v3,
        USUAL,
        ignored=PREDICTED,
        extra_layers=True,
        defaults=GROUPS_OF_V3,
        aliases=ROUTED | PREDICTING,
    ),
    Family(
        "kimi_k2",
        "DeepseekV3ForCausalLM",
        _v3,
        USUAL,
        ignored=PREDICTED,
        extra_layers=True,
        defaults=GROUPS_OF_V3,
        aliases=ROUTED | PREDICTING,
    ),
    Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        _glm4,
        USUAL,
        _glm4_keys,
        ignored=PREDICTED,
        extra_layers=True,
        defaults={"num_key_value_heads": 8},
        aliases=ROUTED | PREDICTING,
    ),
    Family(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        _glm4_lite,
        USUAL,
        ignored=PREDICTED,
        extra_layers=True,
        aliases={**ROUTED, "head_dim": "qk_rope_head_dim"},
    ),
    Family("dots1", "Dots1ForCausalLM", _dots1, USUAL, defaults={"num_key_value_heads": 32}, aliases=ROUTED),
    Family(
        "solar_open",
        "SolarOpenForCausalLM",
        _solar,
        USUAL,
        ignored=PREDICTED,
        extra_layers=True,
        defaults={"num_key_value_heads": 8, "head_dim": 128},
        aliases=ROUTED,
    ),
    Family(
        "exaone_moe",
        "ExaoneMoeForCausalLM",
        _exaone,
        EXAONE,
        kinds_by_positions,
        ignored=PREDICTED,
        skipped=(r"mtp\..*",),
        defaults={"num_key_value_heads": 32},
    ),
)


def _grouped(model: Model) -> bool:
    gates = [layer.moe.gate for layer in model.layers if layer.moe is not None]
    return any(isinstance(gate, TopK) and gate.groups > 1 for gate in gates)
