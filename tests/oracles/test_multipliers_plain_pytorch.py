"""The multipliers of Granite against a handwritten model, and against Hugging Face's Granite-MoE."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from oracles.plain_parts import attention, gelu_ffn, of_layer, rms_norm, swiglu_mixture
from oracles.same import TIGHT, batch, require_gradients, spread
from oracles.specs import BATCH, SEQUENCE, VOCAB
from torch import Tensor
from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

from moec.driver import to_spec
from moec.runtime.host.reference import reference

ORACLE_OF = {
    "tokens": "multiplier logits_multiplier logits_bias",
    "model": "residual_multiplier",
    "attention": "multiplier",
}

VECTORS, LOGITS, ADDED = 12.0, 0.125, 0.22


def text(layers: str, *, embedding: str = "", model: str = "", dim: int = 24, depth: int = 2) -> str:
    """A model for one rank with all three multipliers."""
    return f"""
        model "small" {{
          vocab = {VOCAB}; dim = {dim}; depth = {depth}; dtype = fp32; residual_multiplier = {ADDED}; {model}
          embedding = tokens(multiplier = {VECTORS}, logits_multiplier = {LOGITS}{embedding})
          {layers}
        }}
        cluster "here" {{ device = cpu; level "process" {{ size = 1 }} }}
        train {{ batch = {BATCH}; sequence = {SEQUENCE} }}
    """


def plain(p: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits: a dense layer, then a mixture."""
    x = VECTORS * p["embedding.weight"][tokens]
    if "positions.weight" in p:
        x = x + p["positions.weight"][: tokens.shape[1]]
    for number in range(2):
        of = of_layer(p, number)
        x = x + ADDED * attention(of, rms_norm(x, of["attention_norm.weight"]))
        h = rms_norm(x, of["ffn_norm.weight"])
        x = x + ADDED * (gelu_ffn(of, h) if number == 0 else swiglu_mixture(of, h, 2))
    logits = rms_norm(x, p["norm.weight"]) @ p.get("head.weight", p["embedding.weight"]).T * LOGITS
    return logits + p["head.bias"] if "head.bias" in p else logits


@pytest.mark.parametrize("embedding", ["", ", tied = true", ", positions = learned", ", logits_bias = true"])
def test_the_reference_equals_the_handwritten_model(embedding: str) -> None:
    layers = """
        layers 0 { attention = gqa(heads = 4, kv_heads = 2); ffn = gelu(32) }
        layers 1 { attention = mha(heads = 3); moe { experts = 5 * swiglu(20); gate = topk(2, normalize = true) } }
    """
    ours = reference(to_spec(text(layers, embedding=embedding)), dtype=torch.float64)
    p = spread(ours)
    tokens, labels = batch()
    output, logits = ours(tokens, labels), plain(p, tokens)
    torch.testing.assert_close(output.logits, logits, **TIGHT)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(output.loss, loss, **TIGHT)
    output.loss.backward()
    loss.backward()
    require_gradients(ours, p)


def granite() -> GraniteMoeForCausalLM:
    torch.manual_seed(0)
    config = GraniteMoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=6,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        rms_norm_eps=1e-5,
        embedding_multiplier=VECTORS,
        logits_scaling=1 / LOGITS,
        residual_multiplier=ADDED,
        attention_multiplier=8**-0.5,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    return GraniteMoeForCausalLM(config)


def test_logits_and_gradients_equal_granites() -> None:
    """Their experts' input projection holds gate and up, one after the other, as ours does."""
    theirs = granite()
    layers = """
        layers {
          attention = gqa(heads = 4, kv_heads = 2, rope = rope(theta = 1e4))
          moe { experts = 6 * swiglu(20); gate = topk(2, order = after) }
        }
    """
    ours = reference(to_spec(text(layers, dim=32)))
    names = {
        "model.embed_tokens": "embedding",
        "model.norm": "norm",
        "lm_head": "head",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "block_sparse_moe.router": "moe.gate",
        "block_sparse_moe.experts.gate_up_proj": "moe.experts.up",
        "block_sparse_moe.experts.down_proj": "moe.experts.down",
        **{f"self_attn.{part}_proj": f"attention.{part}" for part in "qkvo"},
    }

    def our_name(name: str) -> str:
        layer, rest = re.fullmatch(r"(?:model\.(layers\.\d+\.))?(.*?)(?:\.weight)?", name).groups()
        return f"{layer or ''}{names[rest]}.weight"

    parameters = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameters[our_name(name)].copy_(parameter.view(parameters[our_name(name)].shape))
    assert {our_name(name) for name, _ in theirs.named_parameters()} == set(parameters)
    tokens = torch.randint(VOCAB, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    cotangent = torch.randn(BATCH, SEQUENCE, VOCAB, generator=torch.Generator().manual_seed(3))
    logits, expected = ours(tokens).logits, theirs(tokens).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-5)
    (logits * cotangent).sum().backward()
    (expected * cotangent).sum().backward()
    for name, parameter in theirs.named_parameters():
        gradient, scale = parameters[our_name(name)].grad.view(parameter.shape), float(parameter.grad.abs().max())
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5 * scale)
