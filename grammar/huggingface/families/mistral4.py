"""Mistral 4 (Mistral AI 2026): latent attention and softmax scores in groups."""

from __future__ import annotations

from typing import Any

from moec.grammar.huggingface.config import Config
from moec.grammar.huggingface.families.deepseek import ROUTED, groups_of, latent_attention
from moec.grammar.huggingface.family import Family
from moec.grammar.huggingface.keys import parameters_of
from moec.grammar.huggingface.parts import depth_of, gated, mixed, positive, shared_of, sparse_from
from moec.grammar.huggingface.positions import parameters_in, rope_of
from moec.grammar.huggingface.usual_rules import Names, rules_by
from moec.grammar.spec import Experts, Mla, Model, Moe, Rope, TopK, Yarn


def _mistral4(config: Config) -> Model:
    """Softmax scores in groups. Queries grow with positions from the context on that was trained."""
    depth, rope = depth_of(config), _mistral4_rope(config)
    attention = latent_attention(config, interleaved=rope.interleaved, rope=rope)
    hidden, number = config.count("moe_intermediate_size"), shared_of(config, "n_shared_experts", 1)
    count = config.count("n_routed_experts")
    gate = TopK(
        k=config.count("num_experts_per_tok", default=4),
        normalize=config.flag("norm_topk_prob", default=True),
        scale=positive(config, "routed_scaling_factor", 1.0),
        **groups_of(config, count),
    )
    experts = Experts(count=count, body=gated(config, hidden))
    body = Moe(experts=experts, gate=gate, shared=gated(config, hidden * number) if number else None)
    sparse = sparse_from(depth, config.count("first_k_dense_replace", default=0, least=0))
    model = mixed(config, [attention] * depth, sparse, body, 1e-6)
    original = rope.scaling.original if isinstance(rope.scaling, Yarn) else 1
    beta = parameters_in(config).number("llama_4_scaling_beta", default=0.0)
    if beta and model.context is not None and model.context > original:
        config.note(
            "max_position_embeddings",
            f"moec imports the model for {original} tokens, from which on `llama_4_scaling_beta` scales queries",
        )
        model = model.replace(context=original)
    return model


def _mistral4_rope(config: Config) -> Rope:
    interleaved = config.flag("rope_interleave", default=True)
    rope, turning = parameters_in(config), config.count("qk_rope_head_dim")
    rope.raw("max_position_embeddings")
    if rope.word("rope_type", "type", default="default") != "yarn":
        rope.refuse("rope_type", "transformers computes this architecture with `yarn` alone")
    width = turning + config.count("qk_nope_head_dim")
    config.only("head_dim", width, why="transformers computes positions of a part of this width")
    return rope_of(
        config, turning, fraction=turning / width, interleaved=interleaved, sharpens_scores=True, part_of=width
    )


def _mistral4_keys(model: Model) -> dict[str, Any]:
    attention = model.layers[0].attention
    if not isinstance(attention, Mla) or attention.rope is None:
        return {}
    parameters = parameters_of(attention.rope, attention.rope_dim, model.context)
    part = attention.rope_dim / (attention.rope_dim + attention.nope_dim)
    return {"rope_parameters": {**parameters, "partial_rotary_factor": part, "llama_4_scaling_beta": 0.0}}


YARN_OF_MISTRAL4 = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

FAMILIES = (
    Family(
        "mistral4",
        "Mistral4ForCausalLM",
        _mistral4,
        rules_by(Names(written_fused=True)),
        _mistral4_keys,
        defaults={"rope_parameters": YARN_OF_MISTRAL4},
        aliases=ROUTED,
    ),
)
