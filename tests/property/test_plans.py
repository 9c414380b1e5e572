"""Random models on random clusters: every plan that compiles equals the unsharded model."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import moe_spec

from moec.codegen.folder import plan_files
from moec.driver import compile as compile_source
from moec.grammar.spec import Spec
from moec.passes.ir.parse import parse_program
from moec.passes.ir.text import print_program
from moec.passes.ir.verifier import check_program
from moec.passes.pipeline import compile_program
from moec.runtime.job.reference import reference
from moec.runtime.verify.blame import first_difference
from moec.runtime.verify.inputs import global_batch
from moec.runtime.verify.unsharded import outcome
from moec.runtime.verify.verification import verify

SLOW_EXAMPLES = 2000

BESIDE = [
    "",
    "shared = swiglu({0})",
    "shared = relu({0}, gated = true)",
    "residual = gelu({0}, bias = true)",
    "residual = geglu({0}); shared = relu2({1}, gated = true)",
]
"""Templates for hidden widths, which `tp` must divide."""

CAPACITIES = [
    "",
    "",
    "capacity = factor(1.0)",
    "capacity = factor(0.6, min = 2); group = sequence",
    "capacity = factor(1.25); group = batch",
    "capacity = factor(0.75); group = rank",
    "capacity = dynamic()",
    "capacity = factor(0.5, eval = 1.5); group = sequence",
    "capacity = dynamic(max = 0.8); group = sequence",
    "capacity = dynamic(max = 1.1); group = batch",
    "group = batch",
    "group = rank",
]

EXPERTS = [
    *("swiglu(8)", "gelu(12)", "swiglu(7)", "geglu(6)", "relu(9)", "relu2(8)", "silu(7)"),
    *("swiglu(8, bias = true)", "gelu(7, bias = true)"),
]
FFNS = ["gelu({2})", "geglu({0})", "relu({1})", "relu2({0})", "silu({1})", "swiglu({1}, bias = true)"]

MODELS = [
    "",
    "norm = layer_norm(eps = 1e-4)",
    "norm = layer_norm(bias = false); embedding = tokens(tied = true)",
    "embedding = tokens(tied = true, positions = learned)",
    "embedding = tokens(padding = 0)",
    "embedding = tokens(tied = true, padding = 31)",
    "embedding = tokens(separator = 5)",
    "embedding = tokens(padding = 31, separator = 2, positions = learned)",
]

RECOMPUTED = [
    *("", "", "experts", "layer"),
    "layers 1 { recompute = layer }",
    "recompute = layer; layers 0..1 { recompute = experts }",
]


@st.composite
def mixture(draw: st.DrawFn, ranks: int, experts: int) -> tuple[int, int | None]:
    """The experts of a layer, often equal to other layers', and its `ep`, None for the whole block's."""
    count = draw(st.one_of(st.just(experts), st.integers(1, 12)))
    return count, draw(st.sampled_from([*common_divisors(ranks, count), None]))


def common_divisors(ranks: int, experts: int) -> list[int]:
    return [d for d in range(1, ranks + 1) if ranks % d == 0 and experts % d == 0]


@st.composite
def specs(draw: st.DrawFn, max_ranks: int = 16, max_layers: int = 5) -> Spec:
    ranks = draw(st.sampled_from([r for r in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64) if r <= max_ranks]))
    experts = draw(st.integers(1, 12))
    mixtures = draw(st.lists(mixture(ranks, experts), max_size=max_layers - 1))
    undecided = [count for count, ep in mixtures if ep is None]
    k = draw(st.integers(1, min([experts, 4, *(count for count, _ in mixtures)])))
    score = draw(st.sampled_from(["softmax", "sigmoid"]))
    order = draw(st.sampled_from(["before", "after"]))
    normalize = draw(st.sampled_from(["true", "false"]))
    tp = draw(st.sampled_from([degree for degree in (1, 1, 2, 4) if ranks % degree == 0]))
    sequence_parallel = draw(st.booleans())
    hidden = (6, 5, 32) if tp == 1 else (2 * tp, 4, 8)
    topk = f"topk({k}, score = {score}, order = {order}, normalize = {normalize})"
    balance = draw(st.sampled_from(["[]", "[switch_loss(0.1)]", "[z_loss(0.01)]", "[switch_loss(0.1), z_loss(0.01)]"]))
    jittered, online = (topk.replace(")", f", {more})") for more in ("jitter = 0.2", "bias = online(0.01)"))
    microbatches = draw(st.sampled_from([None, None, 2]))
    gate = draw(st.sampled_from([topk, topk, jittered, online, "switch(jitter = 0.5)", f"hash({k}, seed = {k})"]))
    return moe_spec(
        ranks=ranks,
        tp=tp if tp > 1 else None,
        sequence_parallel=sequence_parallel,
        zero=draw(st.integers(0, 3)),
        ep=draw(st.sampled_from([*common_divisors(ranks, math.gcd(experts, *undecided)), None])),
        experts=experts,
        expert=draw(st.sampled_from(EXPERTS)),
        gate=gate,
        balance="[]" if gate.startswith("hash") else balance,
        model=draw(st.sampled_from(MODELS)),
        beside="; ".join([draw(st.sampled_from(BESIDE)).format(*hidden), draw(st.sampled_from(CAPACITIES))]),
        ffn=draw(st.sampled_from(FFNS)).format(*hidden),
        bias=draw(st.sampled_from(["none", "qkv", "all"])),
        qk_norm=draw(st.sampled_from(["none", "head", "projection"])),
        dim=draw(st.sampled_from([8, 16])),
        depth=draw(st.integers(2, min(4, max_layers))),
        dtype=draw(st.sampled_from(["fp32", "bf16"])),
        batch=ranks * draw(st.integers(1, 2)) * (microbatches or 1),
        sequence=tp * draw(st.integers(1, 9 // tp)),
        mixtures=tuple(mixtures),
        microbatches=microbatches,
        recompute=draw(st.sampled_from(RECOMPUTED)),
    )


@settings(max_examples=180, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(specs(max_ranks=8, max_layers=3))
def test_every_plan_equals_the_unsharded_model(spec: Spec):
    report = verify(compile_source(spec), float32=False)
    assert report.ok, report


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(specs(max_ranks=64))
def test_every_plan_of_many_ranks_equals_the_unsharded_model(spec: Spec):
    report = verify(compile_source(spec), float32=False)
    assert report.ok, report


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(specs())
def test_every_plan_equals_the_unsharded_model_at_toy_widths(spec: Spec):
    report = verify(compile_source(spec), scale=True)
    assert report.ok, report


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(specs())
def test_nothing_is_blamed_in_a_right_plan(spec: Spec):
    plan = compile_source(spec)
    model = reference(spec, dtype=torch.float64)
    inputs = global_batch(plan, seed=0)
    outcome(model, inputs).differentiated.backward()
    assert first_difference(plan, model, inputs) is None


@pytest.mark.slow
@settings(max_examples=SLOW_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(specs(max_ranks=64))
def test_every_plan_equals_the_unsharded_model_at_length(spec: Spec):
    report = verify(compile_source(spec), float32=False)
    assert report.ok, report


@settings(max_examples=20, deadline=None, derandomize=True)
@given(specs(max_ranks=64))
def test_text_and_bytes_are_functions_of_the_spec(spec: Spec):
    program = compile_program(spec).program
    read = parse_program(print_program(program))
    assert read == program
    check_program(read)
    assert plan_files(compile_source(spec)) == plan_files(compile_source(spec))


@pytest.mark.slow
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(specs(max_ranks=8))
def test_every_plan_gives_the_same_on_torchs_own_ranks(spec: Spec):
    pytest.importorskip("torch.distributed._local_tensor", reason="this torch has no LocalTensorMode")
    from all_ranks import distance, run_both, unsharded

    plan = compile_source(spec)
    for training in (True, False):
        if training or plan.program.settings:
            torchs, virtual = run_both(plan, training=training)
            assert distance(torchs, virtual) < 1e-11
            assert distance(torchs, unsharded(plan, training=training)) < 1e-11
