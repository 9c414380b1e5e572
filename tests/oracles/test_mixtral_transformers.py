"""The reference against Hugging Face's Mixtral, Qwen3-MoE and OLMoE with tiny random configurations.

The mapping, tensor by tensor (theirs → ours); gate comes before up in both:

    model.embed_tokens, model.norm, lm_head          embedding, norm, head
    input_layernorm, post_attention_layernorm        attention_norm, ffn_norm
    self_attn.{q,k,v}_proj [H·hd, D]                 attention.{q,k,v} [H, hd, D]
    self_attn.o_proj [D, H·hd]                       attention.o [D, H, hd]
    self_attn.{q,k}_norm (Qwen3-MoE, OLMoE)          attention.{q,k}_norm: [hd], or [H·hd] as [H, hd]
    mlp.gate [E, D]                                  moe.gate [E, D]
    mlp.experts.gate_up_proj [E, 2·F, D]             moe.experts.up [E, 2, F, D]
    mlp.experts.down_proj [E, D, F]                  moe.experts.down [E, D, F]

Both rotate halves (not interleaved pairs), so q and k need no permutation. Their labels are shifted inside the model,
ours come shifted. Their norms, rope and router compute in float32 whatever the model's dtype, so float32 is where they
compare.
"""

from __future__ import annotations

import re

import pytest
import torch
from oracles.specs import BATCH, SEQUENCE, VOCAB, small_spec
from torch import Tensor
from torch.nn import Parameter
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moec.runtime.host.reference import reference
from moec.runtime.model.module import PlanModule

ORACLE_OF = {
    "gqa": "kv_heads",
    "attention": "qk_norm",
    "topk": "k normalize",
    "swiglu": "",
    "rms": "eps",
}

DIM, HIDDEN, EXPERTS, LAYERS = 32, 20, 6, 3
LAYER = """
    layers {
      attention = gqa(heads = 4, kv_heads = 2, rope = rope(theta = 1e6))
      moe { experts = 6 * swiglu(20); gate = topk(2, normalize = true); balance = [%s] }
    }
"""
NAMES = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate.weight": "moe.gate.weight",
    "mlp.experts.gate_up_proj": "moe.experts.up.weight",
    "mlp.experts.down_proj": "moe.experts.down.weight",
} | {
    **{f"self_attn.{part}_proj.weight": f"attention.{part}.weight" for part in "qkvo"},
    **{f"self_attn.{part}_norm.weight": f"attention.{part}_norm.weight" for part in "qk"},
}


def our_name(theirs: str) -> str:
    layer = re.match(r"model\.(layers\.\d+\.)(.*)", theirs)
    return layer[1] + NAMES[layer[2]] if layer else NAMES[theirs]


def mixtral(layers: int = LAYERS) -> MixtralForCausalLM:
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        max_position_embeddings=64,
        initializer_range=0.2,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return drawn(MixtralForCausalLM, config)


def drawn(model_class: type[PreTrainedModel], config: object) -> PreTrainedModel:
    """A model with random weights, those of its norms too."""
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 0.1 * torch.randn(parameter.shape)
    return model


def ours_with_weights_of(theirs: PreTrainedModel, layers: str = LAYER % "", embedding: str = "tokens()") -> PlanModule:
    ours = reference(small_spec(layers, dim=DIM, depth=theirs.config.num_hidden_layers, embedding=embedding))
    parameters = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            target: Parameter = parameters.pop(our_name(name))
            target.copy_(parameter.view(target.shape))
    assert not parameters, f"not mapped: {list(parameters)}"
    return ours


def text() -> Tensor:
    return torch.randint(VOCAB, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))


def shifted(tokens: Tensor) -> Tensor:
    """The labels of language modelling as moec takes them: at each position the next token, nothing at the last."""
    return torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -100)], dim=1)


QK_NORMED = """
    layers {
      attention = gqa(heads = 4, kv_heads = 2, head_dim = %d, rope = rope(theta = 1e6), qk_norm = %s)
      moe { experts = 6 * swiglu(20); gate = topk(2, normalize = true) }
    }
"""
SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "attn_implementation": "eager",
    "experts_implementation": "eager",
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def qwen3() -> PreTrainedModel:
    config = Qwen3MoeConfig(**SHARED, head_dim=16, moe_intermediate_size=HIDDEN, tie_word_embeddings=False)
    return drawn(Qwen3MoeForCausalLM, config)


def olmoe() -> PreTrainedModel:
    return drawn(OlmoeForCausalLM, OlmoeConfig(**SHARED, intermediate_size=HIDDEN))


MODELS = {
    "mixtral": (mixtral, LAYER % ""),
    "qwen3": (qwen3, QK_NORMED % (16, "head")),
    "olmoe": (olmoe, QK_NORMED % (8, "projection")),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients_equal_theirs(name: str) -> None:
    make, layers = MODELS[name]
    theirs = make()
    ours = ours_with_weights_of(theirs, layers)
    tokens = text()
    expected, output = theirs(tokens, labels=tokens), ours(tokens, shifted(tokens))
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)
    expected.loss.backward()
    output.loss.backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    for name, parameter in theirs.named_parameters():
        gradient = gradients[our_name(name)].view(parameter.shape)
        scale = float(parameter.grad.abs().max())
        assert scale > 0
        error = float((gradient - parameter.grad).abs().max())
        assert error <= 1e-5 * scale, f"{name}: off by {error / scale:.1e}"


def test_ignored_labels_count_alike() -> None:
    theirs = mixtral()
    tokens = text()
    labels = tokens.masked_fill(tokens % 3 == 0, -100)
    output = ours_with_weights_of(theirs)(tokens, shifted(labels))
    torch.testing.assert_close(output.loss, theirs(tokens, labels=labels).loss, rtol=1e-6, atol=0)


def test_mixtrals_balance_loss_is_k_times_ours_on_one_layer_and_sequence() -> None:
    """Theirs counts each of the k choices in full, and pools layers and sequences; ours is 1 when balanced."""
    theirs = mixtral(layers=1)
    tokens = text()[:1]
    nothing = torch.full_like(tokens, -100)
    ours = ours_with_weights_of(theirs, LAYER % "switch_loss(1.0)")(tokens, nothing).loss
    aux = theirs(tokens, output_router_logits=True).aux_loss
    torch.testing.assert_close(2 * ours, aux, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_generation_gives_their_tokens(name: str) -> None:
    """Theirs pads prompts of different lengths on the left."""
    make, layers = MODELS[name]
    theirs = make().eval()
    theirs.generation_config.eos_token_id = theirs.generation_config.pad_token_id = None
    ours = ours_with_weights_of(theirs, layers)
    prompts, new = text()[:, :5], SEQUENCE - 5
    lengths = torch.tensor([5, 2, 4])
    padding = torch.arange(5) < (5 - lengths)[:, None]
    how = {"max_new_tokens": new, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    for mask in (torch.zeros_like(padding), padding):
        expected = theirs.generate(prompts, attention_mask=(~mask).long(), **how)[:, 5:]
        found = ours.generate(prompts, padding=mask, max_new_tokens=new).tokens
        assert len(expected.unique()) > 5
        assert torch.equal(found, expected)
