"""Kinds of attention against their definitions in plain PyTorch: logits and every gradient in float64."""

from __future__ import annotations

import pytest
import torch
from oracles.plain_attention import plain_logits
from oracles.same import PADDING, SEPARATOR, TIGHT, enlarge, packed_and_padded, require_gradients
from oracles.specs import small_spec
from support.combinations import diagonals

from moec.runtime.host.reference import reference

ORACLE_OF = {
    "gqa": "kv_heads head_dim",
    "mha": "head_dim",
    "attention": "heads rope qk_norm qk_norm_place bias window sinks clip causal multiplier output_gate",
    "mla": "q_rank kv_rank nope_dim rope_dim value_dim latent_eps",
    "rope": "theta scaling fraction interleaved",
    "linear (Linear)": "factor",
    "ntk": "factor original",
    "yarn": "factor original beta_fast beta_slow mscale mscale_all truncate",
    "longrope": "short long original",
}

CAUSALITY = {
    "both ways": "mha(heads = 3, causal = false)",
    "both ways, grouped": "gqa(heads = 4, kv_heads = 2, head_dim = 6, rope = rope(), causal = false, bias = all)",
}
ROTARY = {
    "half of the dims turn": "mha(heads = 3, rope = rope(fraction = 0.5))",
    "of an odd head some dims turn": "gqa(heads = 4, kv_heads = 2, head_dim = 7, rope = rope(fraction = 0.6))",
    "neighbours turn": "mha(heads = 3, rope = rope(theta = 100, interleaved = true))",
    "some neighbours turn": "gqa(heads = 4, kv_heads = 2, head_dim = 8, qk_norm = head, "
    "rope = rope(fraction = 0.75, interleaved = true))",
}
SCALINGS = {
    "linear": "linear(3)",
    "ntk": "ntk(2, original = 5)",
    "ntk within the context": "ntk(2)",
    "yarn": "yarn(4, original = 6, beta_fast = 2, beta_slow = 0.05)",
    "yarn, not truncated": "yarn(4, original = 40, beta_fast = 2, beta_slow = 0.05, truncate = false)",
    "yarn, sharpened": "yarn(40, original = 64, mscale = 0.7, mscale_all = 1.5)",
    "yarn, DeepSeek": "yarn(40, original = 64, mscale = 1, mscale_all = 1)",
    "llama3": "llama3(8, original = 64)",
    "longrope, short": "longrope(short = [1, 1.5, 2.5], long = [1, 4, 9], original = 13)",
    "longrope, long": "longrope(short = [1, 1.5, 2.5], long = [1, 4, 9], original = 12)",
}
SCALED = {
    name: f"gqa(heads = 4, kv_heads = 2, head_dim = 6, rope = rope(theta = 50, scaling = {scaling}))"
    for name, scaling in SCALINGS.items()
} | {
    "scaled in part": "mha(heads = 3, rope = rope(fraction = 0.5, interleaved = true, scaling = yarn(4, original = 6)))"
}
SCORES = {
    "multiplier": "mha(heads = 3, rope = rope(), multiplier = 0.9)",
    "multiplier, grouped": "gqa(heads = 4, kv_heads = 2, qk_norm = projection, causal = false, multiplier = 2)",
    "multiplier, sharpened": "mha(heads = 3, multiplier = 0.1, "
    "rope = rope(scaling = yarn(9, original = 4, mscale_all = 1)))",
    "clip": "mha(heads = 3, rope = rope(), clip = 0.7)",
    "clip, after norms": "gqa(heads = 4, kv_heads = 2, rope = rope(), bias = qkv, qk_norm = head, clip = 1.2)",
}
PLACES = {
    "norms after positions": "gqa(heads = 4, kv_heads = 2, rope = rope(), qk_norm = head, qk_norm_place = after_rope)",
    "norms of projections after positions, clip": "mha(heads = 3, rope = rope(), qk_norm = projection, clip = 0.8, "
    "qk_norm_place = after_rope)",
}
GATED = {
    "a gate for each head": "mha(heads = 3, rope = rope(), output_gate = head)",
    "a gate for each element": "gqa(heads = 4, kv_heads = 2, head_dim = 6, bias = all, output_gate = element)",
}
WINDOWS = {
    "window": "mha(heads = 3, rope = rope(), window = 4)",
    "window of one": "gqa(heads = 4, kv_heads = 2, window = 1)",
    "window of all": "gqa(heads = 4, kv_heads = 2, window = 13)",
    "window both ways": "gqa(heads = 4, kv_heads = 2, rope = rope(), window = 3, causal = false, multiplier = 0.9)",
}
SINKS = {
    "sinks": "mha(heads = 3, sinks = true)",
    "sinks, window": "gqa(heads = 4, kv_heads = 2, rope = rope(), sinks = true, window = 4, bias = all)",
    "sinks both ways": "gqa(heads = 4, kv_heads = 2, qk_norm = head, sinks = true, causal = false, multiplier = 0.8)",
}
MLA = "mla(heads = 3, kv_rank = 10, nope_dim = 4, rope_dim = 2, value_dim = {})"
LATENT = {
    "mla": MLA.format("5, q_rank = 8, rope = rope(theta = 50)"),
    "mla, no latent queries": MLA.format("5, rope = rope(theta = 50, interleaved = true)"),
    "mla, no positions": MLA.format("6, q_rank = 3, bias = qkv"),
    "mla, wide values": MLA.format("9, rope = rope(), bias = all, sinks = true, window = 4"),
    "mla, narrow values": MLA.format("1, rope = rope(), q_rank = 8, bias = all, sinks = true, multiplier = 0.8"),
    "mla, latent eps": MLA.format("5, rope = rope(), q_rank = 8, latent_eps = 0.1"),
    "mla, gated": MLA.format("5, rope = rope(), output_gate = element"),
    "mla, yarn": MLA.format(
        "4, q_rank = 8, causal = false, rope = rope(theta = 9, scaling = "
        "yarn(4, original = 6, mscale = 1, mscale_all = 0.7)), window = 5"
    ),
}
KINDS = CAUSALITY | ROTARY | SCALED | SCORES | PLACES | GATED | WINDOWS | SINKS | LATENT
EMBEDDINGS = {
    "plain": "tokens()",
    "packed": f"tokens(separator = {SEPARATOR}, positions = learned)",
    "padded": f"tokens(padding = {PADDING})",
    "packed and padded": f"tokens(separator = {SEPARATOR}, padding = {PADDING})",
}


def require_equal(layers: str, embedding: str = "tokens()", **options: object) -> None:
    spec = small_spec(layers, embedding=embedding, **options)  # type: ignore[arg-type]
    ours = reference(spec, dtype=torch.float64)
    generator = enlarge(ours)
    weights = {name: p.detach().clone().requires_grad_() for name, p in ours.named_parameters()}
    tokens = packed_and_padded()
    logits, expected = ours(tokens).logits, plain_logits(spec, weights, tokens)
    torch.testing.assert_close(logits, expected, **TIGHT)
    cotangent = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    (logits * cotangent).sum().backward()
    (expected * cotangent).sum().backward()
    require_gradients(ours, weights, unused=(".attention.q", ".attention.k") if "window = 1)" in layers else ())


@pytest.mark.parametrize(("kind", "embedding"), diagonals(list(KINDS), list(EMBEDDINGS), number=2))
def test_attention_equals_its_definition(kind: str, embedding: str) -> None:
    require_equal(f"layers {{ attention = {KINDS[kind]}; ffn = gelu(8) }}", EMBEDDINGS[embedding])


def test_layers_alternate() -> None:
    """As sliding and full attention do."""
    first, second = WINDOWS["window"], CAUSALITY["both ways, grouped"]
    require_equal(f"layers {{ attention = {first}; ffn = gelu(8) }}\nlayers 1 {{ attention = {second} }}")
