"""Latent attention against transformers' `DeepseekV3Attention` with the same weights: results and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moec.codegen.emit import emit_function
from moec.driver import to_spec
from moec.grammar.spec import Spec
from moec.passes.ir import Output, Program, Value
from moec.passes.lower.block_builder import Builder
from moec.passes.lower.lower_attention import attend
from moec.runtime import ops  # noqa: F401  (registers torch.ops.moec.*)

pytest.importorskip("transformers")
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

ORACLE_OF = {
    "mla": "q_rank kv_rank nope_dim rope_dim value_dim",
}

DIM, HEADS, SEQUENCE, EPS = 24, 4, 9, 1e-6
Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 10, 8, 6, 4, 5
YARN = "scaling = yarn(4, original = 16, mscale = 0.8, mscale_all = 0.6)"


def spec_of(options: str) -> Spec:
    dims = f"kv_rank = {KV_RANK}, nope_dim = {NOPE}, rope_dim = {ROPE}, value_dim = {VALUE}"
    return to_spec(f"""
        model "small" {{
          vocab = 32; dim = {DIM}; depth = 1; dtype = fp32; context = 64; norm = rms(eps = {EPS})
          layers {{ attention = mla(heads = {HEADS}, {dims}, {options}); ffn = gelu(8) }}
        }}
    """)


def ours(spec: Spec, weights: dict[str, Tensor], h: Tensor) -> Tensor:
    """The attention of the layer alone."""
    given = Value(name="h", shape=("batch", "sequence", DIM), dtype="fp32", role="residual")
    b = Builder("attention", [given], None)
    y = attend(b, spec.model, spec.model.layers[0].attention, "h", {}, 64)
    program = Program(name="alone", blocks=(b.block([Output(y, "residual")]),))
    function = emit_function(program, "attention", float64=True)
    result: Tensor = function.module(h, *(weights[name] for name in function.weights))
    return result


def theirs(weights: dict[str, Tensor], interleaved: bool, scaling: dict[str, object], h: Tensor) -> Tensor:
    latent = "attention.q_down.weight" in weights
    config = DeepseekV3Config(
        hidden_size=DIM, num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=Q_RANK if latent else None,
        kv_lora_rank=KV_RANK, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=VALUE, rms_norm_eps=EPS,
        max_position_embeddings=64, rope_interleave=interleaved, attention_bias=False,
        rope_parameters={"rope_theta": 100.0, "rope_type": "default", **scaling}, attn_implementation="eager",
    )  # fmt: skip
    module = DeepseekV3Attention(config, layer_idx=0).double()
    keys_and_values = torch.cat([weights["attention.k.weight"], weights["attention.v.weight"]], 1)
    named = {
        "kv_a_proj_with_mqa": torch.cat([weights["attention.kv_down.weight"], weights["attention.k_rope.weight"][0]]),
        "kv_a_layernorm": weights["attention.kv_down_norm.weight"],
        "kv_b_proj": keys_and_values.flatten(0, 1),
        "o_proj": weights["attention.o.weight"].flatten(1),
        "q_b_proj" if latent else "q_proj": weights["attention.q.weight"].flatten(0, 1),
    }
    if latent:
        named["q_a_proj"] = weights["attention.q_down.weight"]
        named["q_a_layernorm"] = weights["attention.q_down_norm.weight"]
    angles = DeepseekV3RotaryEmbedding(config)(h, torch.arange(SEQUENCE)[None])
    hidden = torch.full((SEQUENCE, SEQUENCE), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    tensors = {f"{name}.weight": tensor for name, tensor in named.items()}
    result: Tensor = torch.func.functional_call(module, tensors, (h, angles, hidden))[0]
    return result


@pytest.mark.parametrize(
    ("options", "interleaved", "scaling"),
    [
        (f"q_rank = {Q_RANK}, rope = rope(theta = 100, interleaved = true)", True, {}),
        ("rope = rope(theta = 100)", False, {}),
        (
            f"q_rank = {Q_RANK}, rope = rope(theta = 100, interleaved = true, {YARN})",
            True,
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 0.8,
                "mscale_all_dim": 0.6,
            },
        ),
    ],
    ids=["interleaved", "halves, no latent queries", "yarn"],
)
def test_latent_attention_is_deepseeks(options: str, interleaved: bool, scaling: dict[str, object]) -> None:
    spec = spec_of(options)
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "attention.q.weight": (HEADS, NOPE + ROPE, Q_RANK if "q_rank" in options else DIM),
        "attention.kv_down.weight": (KV_RANK, DIM),
        "attention.kv_down_norm.weight": (KV_RANK,),
        "attention.k.weight": (HEADS, NOPE, KV_RANK),
        "attention.v.weight": (HEADS, VALUE, KV_RANK),
        "attention.k_rope.weight": (1, ROPE, DIM),
        "attention.o.weight": (DIM, HEADS, VALUE),
    }
    if "q_rank" in options:
        shapes |= {"attention.q_down.weight": (Q_RANK, DIM), "attention.q_down_norm.weight": (Q_RANK,)}
    weights = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in shapes.items()
    }
    h = torch.randn(2, SEQUENCE, DIM, generator=generator, dtype=torch.float64).requires_grad_()
    leaves = [h, *weights.values()]
    found, expected = ours(spec, weights, h), theirs(weights, interleaved, scaling, h)
    cotangent = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    # Theirs computes angles and the softmax in float32.
    close = {"rtol": 1e-4, "atol": 2e-5}
    torch.testing.assert_close(found, expected, **close)
    gradients = [torch.autograd.grad(result, leaves, cotangent) for result in (found, expected)]
    for name, one, other in zip(["h", *weights], *gradients, strict=True):
        torch.testing.assert_close(one / other.abs().max(), other / other.abs().max(), **close, msg=name)
