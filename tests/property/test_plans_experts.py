"""Plans of models with each kind of expert, on random clusters, equal the unsharded model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from random_specs import CAPACITIES, specs
from support.examples import examples
from support.plans import moe_text
from support.verified import require_equal

from moec.grammar import load_text
from moec.grammar.spec import Spec

PARTS = [
    "[{0} * swiglu(8), {1} * swiglu(5)]",
    "[{0} * gelu(7, bias = true), {1} * linear, {0} * lora(2, alpha = 3)]",
    "[{0} * conv(3, kernel = 2), {1} * swiglu(6)]",
    "[{1} * swiglu(6, clamp = 0.01), {0} * swiglu(6, alpha = 2)]",
]


@st.composite
def in_parts(draw: st.DrawFn) -> Spec:
    """Experts of several kinds in one layer: each part's number is a multiple of `ep`."""
    ranks = draw(st.sampled_from([2, 4, 8]))
    ep, tp = (draw(st.sampled_from([d for d in (1, 2, 4) if ranks % d == 0])) for _ in range(2))
    counts = draw(st.integers(1, 2)) * ep, draw(st.integers(1, 2)) * ep
    gates = ["topk(2)", "topk(1, jitter = 0.2)", "topk(2, score = sigmoid, bias = online(0.01))", "hash(2)"]
    gate = draw(st.sampled_from(gates))
    text = moe_text(
        ranks=ranks,
        tp=tp,
        ep=ep,
        zero=draw(st.integers(0, 3)),
        sequence_parallel=draw(st.booleans()),
        experts=8,
        expert="gelu(3)",
        gate=gate,
        balance="[]" if gate.startswith("hash") else draw(st.sampled_from(["[]", "[switch_loss(0.1), z_loss(0.01)]"])),
        beside=draw(st.sampled_from([*CAPACITIES, "shared = swiglu(4)"])),
        model=draw(st.sampled_from(["", "embedding = tokens(padding = 0)"])),
        dtype=draw(st.sampled_from(["fp32", "bf16"])),
        batch=2 * ranks,
        sequence=tp * draw(st.integers(1, 3)),
        microbatches=draw(st.sampled_from([None, 2])),
        recompute=draw(st.sampled_from(["", "experts", "layer"])),
    )
    parts = draw(st.sampled_from(PARTS)).format(*counts)
    return load_text(text.replace("8 * gelu(3)", parts), name="tiny.moe").unwrap()


@st.composite
def nested(draw: st.DrawFn) -> Spec:
    """Experts that are mixtures: `ep` divides the outer experts."""
    ranks = draw(st.sampled_from([2, 4, 8]))
    ep, tp = (draw(st.sampled_from([d for d in (1, 2, 4) if ranks % d == 0])) for _ in range(2))
    outer, inner = draw(st.integers(1, 2)) * ep, draw(st.integers(2, 4))
    ways = ["normalize = true", "order = after", "score = sigmoid"]
    text = moe_text(
        ranks=ranks,
        tp=tp,
        ep=ep,
        zero=draw(st.integers(0, 3)),
        sequence_parallel=draw(st.booleans()),
        experts=8,
        expert="gelu(3)",
        gate=f"topk({draw(st.integers(1, min(outer, 2)))}, {draw(st.sampled_from(ways))})",
        balance=draw(st.sampled_from(["[]", "[switch_loss(0.1)]"])),
        beside=draw(st.sampled_from(["", "group = batch", "shared = swiglu(4)"])),
        model=draw(st.sampled_from(["", "embedding = tokens(padding = 0)"])),
        dtype=draw(st.sampled_from(["fp32", "bf16"])),
        batch=2 * ranks,
        sequence=tp * draw(st.integers(1, 3)),
        microbatches=draw(st.sampled_from([None, 2])),
        recompute=draw(st.sampled_from(["", "experts", "layer"])),
    )
    body = draw(st.sampled_from(["swiglu(5, bias = true)", "gelu(6)", "linear"]))
    gate = draw(st.sampled_from([f"topk({draw(st.integers(1, 2))}, {draw(st.sampled_from(ways))})", "switch"]))
    text = text.replace("8 * gelu(3)", f'{outer} * mixture("inner")')
    text += f'\nlayer "inner" {{ moe {{ experts = {inner} * {body}; gate = {gate} }} }}\n'
    return load_text(text, name="tiny.moe").unwrap()


DRAWS: dict[str, st.SearchStrategy[Spec]] = {
    "clamp and alpha": specs(
        max_ranks=8,
        max_layers=3,
        experts_of=[
            "swiglu(8, bias = true, clamp = 0.02, alpha = 1.7)",
            "swiglu(7, clamp = 0.01)",
            "swiglu(6, alpha = 2)",
        ],
        ffns=["swiglu({0}, clamp = 0.03, alpha = 1.702)"],
        paths=["", "shared = swiglu({0}, alpha = 1.5, gated = true)", "residual = swiglu({1}, clamp = 0.01)"],
    ),
    "linear": specs(
        max_ranks=8,
        max_layers=3,
        experts_of=["linear", "linear(bias = true)"],
        ffns=["linear(bias = true)"],
        paths=["", "shared = linear(gated = true)", "residual = linear(bias = true); shared = linear"],
    ),
    "lora": specs(
        max_ranks=8,
        max_layers=3,
        experts_of=["lora(3)", "lora(2, alpha = 5)"],
        ffns=["lora(3, alpha = 6)"],
        paths=["", "shared = swiglu({0}, gated = true)", "residual = lora(2); shared = lora(3, alpha = 1)"],
    ),
    "parts": in_parts(),
    "mixture": nested(),
    "conv": specs(
        max_ranks=8,
        max_layers=3,
        experts_of=["conv(4)", "conv(3, kernel = 2, bias = true)"],
        ffns=["conv(3)", "conv(5, kernel = 2, bias = true)"],
        paths=["", "shared = conv(3, kernel = 2, gated = true)", "residual = conv(2)"],
    ),
}
"""Clamps lie inside of what the small initial weights give."""


@examples(8, 150)
@given(st.one_of(list(DRAWS.values())))
def test_plans_with_experts_of_each_kind_equal_the_unsharded_model(spec: Spec) -> None:
    require_equal(spec, float32=False)
