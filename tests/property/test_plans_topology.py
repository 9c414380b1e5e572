"""The gate `topology`: plans of random models on random clusters are the unsharded model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from random_specs import specs
from support.examples import examples
from support.plans import layer_spec, moe_spec
from support.verified import require_equal

from moec.driver import compile as compile_source
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.spec import Level, Spec

GATES = [
    "topology({k}, weight = 0.5)",
    "topology({k}, weight = 0.5, share = 0.3)",
    "topology({k}, weight = 0, share = 0.1)",
    "topology({k}, share = 0)",
]
BALANCES = ["[]", "[switch_loss(0.1), z_loss(0.01)]", "[sequence_loss(0.1)]"]


@st.composite
def levelled(draw: st.DrawFn, max_ranks: int) -> Spec:
    """A random Spec on two or three levels; not one whose nodes have too few experts for the bound."""
    spec = draw(specs(max_ranks=max_ranks, max_layers=3, gates=GATES, balances=BALANCES))
    left, sizes = spec.cluster.ranks, list[int]()
    for _ in range(draw(st.integers(1, 2))):
        sizes.append(draw(st.sampled_from([size for size in range(1, left + 1) if left % size == 0])))
        left //= sizes[-1]
    found = on(spec, *sizes, left, speeds=draw(st.permutations([8e9, 2e9, 3e8])))
    try:
        compile_source(found)
    except DiagnosticError as error:
        assume({d.code for d in error.diagnostics} != {"MOE0329"})
        raise
    return found


def on(spec: Spec, *sizes: int, speeds: list[float]) -> Spec:
    """The Spec on levels of these sizes and bandwidths, from the innermost out."""
    pairs = zip(sizes, speeds, strict=False)
    levels = tuple(Level(name=f"l{i}", size=size, bandwidth=speed) for i, (size, speed) in enumerate(pairs))
    return spec.replace(cluster=spec.cluster.replace(levels=levels))


@examples(3, 25)
@given(levelled(16))
def test_every_plan_equals_the_unsharded_model(spec: Spec) -> None:
    require_equal(spec)


@pytest.mark.parametrize(
    ("sizes", "degrees"),
    [
        ((2, 2), {"tp": 2, "ep": 4, "beside": "capacity = factor(1.0); group = batch"}),
        ((2, 2), {"tp": 2, "ep": 4, "sequence_parallel": False, "zero": 3, "recompute": "layer"}),
        ((2, 2, 2), {"ranks": 8, "tp": 2, "ep": 8, "dtype": "bf16", "recompute": "experts"}),
    ],
)
def test_tensor_and_expert_parallelism_together_change_nothing(sizes: tuple[int, ...], degrees: dict[str, Any]) -> None:
    """With packed texts, padding and micro-batches: the gate's groups are the data ranks whatever these."""
    spec = moe_spec(
        **degrees, depth=2, batch=16, microbatches=2, gate="topology(2, weight = 0.5, share = 0.1)",
        model="embedding = tokens(padding = 3, separator = 5)",
    )  # fmt: skip
    require_equal(on(spec, *sizes, speeds=[4e9, 1e9, 2e8]))


def test_a_layer_by_itself_prefers_near_experts() -> None:
    spec = layer_spec(ranks=4, ep=4, gate="topology(2, weight = 0.5, share = 0.1)", balance="[]")
    require_equal(on(spec, 2, 2, speeds=[4e9, 1e9]))


def test_layers_with_another_ep_have_other_distances() -> None:
    spec = moe_spec(ranks=4, gate="topology(2, weight = 0.5)", mixtures=((8, 2), (8, 4), (8, 1), (4, None)))
    require_equal(on(spec, 2, 2, speeds=[4e9, 1e9]))
