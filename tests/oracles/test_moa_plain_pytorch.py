"""Mixtures of attention heads against the paper's definition in plain PyTorch, and against transformers' JetMoE.

The definition computes every group for every token, with an attention of its own, and weighs the groups: no rows, no
choices as heads.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracles.gate_oracle import LOSSES, Routed
from oracles.plain_attention import Weights, positions_and_texts, rms, turned, visible
from oracles.plain_philox import SEED, STEP, uniform
from oracles.same import PADDING, SEPARATOR, TIGHT, enlarge, packed_and_padded, require_gradients
from oracles.specs import BATCH, SEQUENCE, small_spec
from torch import Tensor

from moec.codegen.emit import emit_function
from moec.driver import to_spec
from moec.grammar.spec import Moa, Spec
from moec.passes.ir import Output, Program, Value
from moec.passes.lower.block_builder import Builder
from moec.passes.lower.lower_head_mixture import attend_by_groups
from moec.runtime.host.reference import reference

ORACLE_OF = {
    "moa": "experts gate kv_heads head_dim balance",
}

CONTEXT = 64


def shares_of(moa: Moa, own: Weights, h: Tensor, number: int, training: bool) -> Routed:
    """The gate by its definition: weights and choices [batch, sequence, k], logits and probabilities."""
    gate, logits = moa.gate, F.linear(h, own["attention.gate.weight"])
    bias = own.get("attention.gate.bias")
    logits = logits if bias is None else logits + bias
    k = moa.experts if gate.word == "dense" else getattr(gate, "k", 1)
    p = logits.softmax(-1)
    chosen = logits.topk(k)[1]
    weights = p.gather(-1, chosen)
    if gate.word == "gshard":
        weights = weights / weights.sum(-1, keepdim=True)
        if training:
            left_out = uniform(*h.shape[:2], 1, number, stream=17)[..., 0] >= 2 * weights[..., 1]
            chosen = torch.stack([chosen[..., 0], chosen[..., 1].masked_fill(left_out, -1)], -1)
    elif gate.word == "topk" and gate.order == "after":
        weights = logits.gather(-1, chosen).softmax(-1)
    elif gate.word == "topk" and gate.score == "sigmoid":
        scores = logits.sigmoid()
        weights, p = scores.gather(-1, chosen), scores / scores.sum(-1, keepdim=True)
    if getattr(gate, "normalize", False):
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * getattr(gate, "scale", 1.0)
    if moa.normalize:
        weights = weights / weights.sum(-1, keepdim=True).detach()
    return Routed(weights, chosen, logits, p)


def attend(spec: Spec, moa: Moa, own: Weights, h: Tensor, position: Tensor, seen: Tensor, found: Routed) -> Tensor:
    """Σ over groups of the token's weight for the group times the group's attention."""

    def made(x: Tensor, name: str) -> Tensor:
        if moa.qk_norm == "head" and name != "v":
            x = rms(x, own[f"attention.{name}_norm.weight"], spec.model.norm.eps)
        if moa.clip is not None:
            x = x.clamp(-moa.clip, moa.clip)
        if moa.rope is not None and name != "v":
            x = turned(x, moa.rope, position, 0, x.shape[-1], CONTEXT)
        return x

    def projected(name: str, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = torch.einsum("bsd,hwd->bshw", h, weight)
        return made(x if bias is None else x + bias, name)

    k, v = (projected(name, own[f"attention.{name}.weight"], own.get(f"attention.{name}.bias")) for name in "kv")
    copies = moa.heads // k.shape[2]
    k, v = (x.repeat_interleave(copies, dim=2) for x in (k, v))
    total = torch.zeros_like(h)
    for group in range(moa.experts):
        bias = own["attention.q.bias"][group] if moa.bias != "none" else None
        q = projected("q", own["attention.q.weight"][group], bias)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * (moa.multiplier or 1 / math.sqrt(q.shape[-1]))
        shares = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1)
        result = torch.einsum("bhij,bjhd,ohd->bio", shares, v, own["attention.o.weight"][group])
        total = total + result * ((found.experts == group) * found.weights).sum(-1, keepdim=True)
    return total + own["attention.o.bias"] if moa.bias == "all" else total


def balance_of(moa: Moa, found: Routed, text: Tensor, real: Tensor) -> Tensor:
    """Each term over each routing group, weighted by the group's real tokens."""
    members = [torch.ones_like(real)]
    if moa.group == "sequence":
        of_sequence = text + text.shape[1] * torch.arange(len(text))[:, None]
        members = [of_sequence == number for number in of_sequence.unique()]
    total = torch.zeros((), dtype=torch.float64)
    for inside in (mask & real for mask in members):
        parts = (found.weights, found.experts, found.logits, found.probabilities)
        of_group = Routed(*(part[inside] for part in parts))
        for term in moa.balance if inside.any() else ():
            total = total + term.weight * LOSSES[term.word](of_group, moa.experts) * inside.sum() / real.sum()
    return total


def plain(spec: Spec, weights: Weights, tokens: Tensor, training: bool) -> tuple[Tensor, Tensor]:
    """Logits of a dense model with these attentions, and its balance terms."""
    model, eps = spec.model, spec.model.norm.eps
    position, text = positions_and_texts(tokens, model.embedding.separator)
    real = tokens != (-1 if model.embedding.padding is None else model.embedding.padding)
    x, balance = weights["embedding.weight"][tokens], torch.zeros((), dtype=torch.float64)
    for number, layer in enumerate(model.layers):
        own = {name.removeprefix(f"layers.{number}."): w for name, w in weights.items()}
        h, moa = rms(x, own["attention_norm.weight"], eps), layer.attention
        assert isinstance(moa, Moa)
        found = shares_of(moa, own, h, number, training)
        found.experts = found.experts.masked_fill(~real[..., None], -1)
        x = x + attend(spec, moa, own, h, position, visible(moa, text, real), found)
        balance = balance + balance_of(moa, found, text, real)
        h = rms(x, own["ffn_norm.weight"], eps)
        x = x + F.linear(F.gelu(F.linear(h, own["ffn.up.weight"][0])), own["ffn.down.weight"])
    return F.linear(rms(x, weights["norm.weight"], eps), weights["head.weight"]), balance


BALANCE = "balance = [switch_loss(0.3), z_loss(0.1)]"
KINDS = {
    "one head, one choice": "moa(heads = 1, head_dim = 5, experts = 4, gate = topk(1), normalize = true)",
    "the paper's": f"moa(heads = 1, head_dim = 6, experts = 7, gate = topk(3), normalize = true, {BALANCE})",
    "grouped": "moa(heads = 4, kv_heads = 2, experts = 3, gate = topk(2, order = after, bias = learned), "
    "rope = rope())",
    "every option": "moa(heads = 6, kv_heads = 3, head_dim = 4, experts = 5, gate = topk(2, score = sigmoid, "
    "normalize = true, scale = 1.7), rope = rope(theta = 50), bias = all, qk_norm = head, clip = 0.9, "
    f"multiplier = 0.8, window = 4, {BALANCE})",
    "switch": f"moa(heads = 2, head_dim = 6, experts = 3, gate = switch, bias = qkv, {BALANCE}, group = batch)",
    "both ways": "moa(heads = 3, kv_heads = 1, experts = 4, gate = topk(2), causal = false, rope = rope())",
    "dense": "moa(heads = 2, head_dim = 5, experts = 3, gate = dense, balance = [importance_loss(0.2)], group = batch)",
    "a random second": f"moa(heads = 2, head_dim = 5, experts = 5, gate = gshard, {BALANCE})",
    "one group": "moa(heads = 3, experts = 1, gate = topk(1))",
}
EMBEDDINGS = {
    "plain": "tokens()",
    "packed and padded": f"tokens(separator = {SEPARATOR}, padding = {PADDING})",
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("embedding", EMBEDDINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_of_heads_equals_its_definition(kind: str, embedding: str, training: bool) -> None:
    layers = f"context = {CONTEXT}; layers {{ attention = {KINDS[kind]}; ffn = gelu(8) }}"
    spec = small_spec(layers, embedding=EMBEDDINGS[embedding])
    ours = reference(spec, dtype=torch.float64).train(training)
    ours.set(seed=SEED, step=STEP)
    generator = enlarge(ours)
    weights = {name: p.detach().clone().requires_grad_() for name, p in ours.named_parameters()}
    tokens = packed_and_padded()
    output, (logits, balance) = ours(tokens), plain(spec, weights, tokens, training)
    torch.testing.assert_close(output.logits, logits, **TIGHT)
    terms = torch.zeros_like(balance) if output.aux_loss is None else output.aux_loss
    torch.testing.assert_close(terms, balance, **TIGHT)
    assert bool(balance) == ("balance" in KINDS[kind])
    cotangent = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    ((output.logits * cotangent).sum() + terms).backward()
    ((logits * cotangent).sum() + balance).backward()
    require_gradients(ours, weights, unused=("gate",) if kind == "one group" else ())


def test_the_weight_of_one_choice_is_one_and_its_router_learns() -> None:
    """What the detached sum is for: with the gradient through the sum, a gate of one choice would have none."""
    gradients = {}
    for normalize, gate in ((True, "topk(1)"), (False, "topk(1, normalize = true)")):
        moa = f"moa(heads = 2, head_dim = 4, experts = 3, gate = {gate}, normalize = {str(normalize).lower()})"
        ours = reference(small_spec(f"layers {{ attention = {moa}; ffn = gelu(8) }}"), dtype=torch.float64)
        logits = ours(packed_and_padded()).logits
        logits.square().sum().backward()
        gradients[normalize] = logits.detach(), ours.get_parameter("layers.0.attention.gate.weight").grad
    torch.testing.assert_close(gradients[True][0], gradients[False][0])
    assert gradients[True][1].abs().max() > 1e-6
    assert gradients[False][1].abs().max() < 1e-12


# ---- Hugging Face --------------------------------------------------------------------------------------

DIM, HEADS, WIDTH, GROUPS, CHOICES = 24, 3, 4, 5, 2


def ours_alone(moa: str, weights: dict[str, Tensor], h: Tensor) -> Tensor:
    """The attention of one layer."""
    spec = to_spec(f"""
        model "small" {{
          vocab = 32; dim = {DIM}; depth = 1; dtype = fp32; context = {CONTEXT}
          layers {{ attention = {moa}; ffn = gelu(8) }}
        }}
    """)
    attention = spec.model.layers[0].attention
    assert isinstance(attention, Moa)
    b = Builder("attention", [Value(name="h", shape=("batch", "sequence", DIM), dtype="fp32", role="residual")], None)
    y, _ = attend_by_groups(b, spec.model, attention, "h", {}, {}, CONTEXT)
    program = Program(name="alone", blocks=(b.block([Output(y, "residual")]),))
    function = emit_function(program, "attention", float64=True)
    result: Tensor = function.module(h, *(weights[name] for name in function.weights))
    return result


def test_results_and_gradients_equal_those_of_jetmoe() -> None:
    modeling: Any = pytest.importorskip("transformers.models.jetmoe.modeling_jetmoe")
    configuration: Any = pytest.importorskip("transformers.models.jetmoe.configuration_jetmoe")
    config = configuration.JetMoeConfig(
        hidden_size=DIM, num_key_value_heads=HEADS, kv_channels=WIDTH, num_local_experts=GROUPS,
        num_experts_per_tok=CHOICES, max_position_embeddings=CONTEXT, attn_implementation="eager",
        rope_parameters={"rope_theta": 100.0, "rope_type": "default"},
    )  # fmt: skip
    module = modeling.JetMoeAttention(config, layer_idx=0).double()
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> Tensor:
        return (0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()

    weights = {
        "attention.gate.weight": drawn(GROUPS, DIM),
        "attention.q.weight": drawn(GROUPS, HEADS, WIDTH, DIM),
        "attention.k.weight": drawn(HEADS, WIDTH, DIM),
        "attention.v.weight": drawn(HEADS, WIDTH, DIM),
        "attention.o.weight": drawn(GROUPS, DIM, HEADS, WIDTH),
    }
    h = drawn(BATCH, SEQUENCE, DIM)
    named = {
        "experts.bias": torch.zeros(DIM, dtype=torch.float64),
        "experts.router.layer.weight": weights["attention.gate.weight"],
        "experts.input_linear.weight": weights["attention.q.weight"].flatten(1, 2),
        "experts.output_linear.weight": weights["attention.o.weight"].flatten(2),
        "kv_proj.weight": torch.cat([weights["attention.k.weight"], weights["attention.v.weight"]]).flatten(0, 1),
    }
    angles = modeling.JetMoeRotaryEmbedding(config)(h, torch.arange(SEQUENCE)[None])
    hidden = torch.full((SEQUENCE, SEQUENCE), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    theirs = torch.func.functional_call(module, named, (h,), {"attention_mask": hidden, "position_embeddings": angles})
    moa = f"moa(heads = {HEADS}, head_dim = {WIDTH}, experts = {GROUPS}, gate = topk({CHOICES}, order = after), "
    found = ours_alone(f"{moa} rope = rope(theta = 100))", weights, h)
    close = {"rtol": 1e-5, "atol": 1e-5}  # JetMoE computes router logits and angles in float32
    torch.testing.assert_close(found, theirs[0], **close)
    cotangent = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    inputs = [h, *weights.values()]
    expected = torch.autograd.grad(theirs[0], inputs, cotangent)
    for name, wanted, gradient in zip(
        ["h", *weights], expected, torch.autograd.grad(found, inputs, cotangent), strict=True
    ):
        torch.testing.assert_close(gradient, wanted, **close, msg=lambda text, name=name: f"{name}: {text}")
