"""tally: counts computed by hand."""

import pytest
from support.plans import moe_spec, moe_text
from support.tables import each_row

from moec.grammar import load_text
from moec.passes.cost.totals import tally
from moec.passes.pipeline import compile_program
from moec.runtime.backends.torch.torch_padded import places_of


def test_counts_agree_with_arithmetic_by_hand():
    spec = moe_spec(ranks=4, ep=2, experts=8, dim=16, depth=3, batch=8, sequence=8)
    counts = tally(compile_program(spec).program, spec)
    vocab, dim, hidden, experts = 32, 16, 16, 8
    embedding_and_head, norms = 2 * vocab * dim, dim * (2 * 3 + 1)
    dense_layer = 4 * dim * dim + 2 * dim * 32
    attention = 2 * dim * dim + 2 * dim * dim // 2
    expert = 3 * dim * hidden
    whole = embedding_and_head + norms + dense_layer + 2 * (attention + experts * dim + experts * expert)
    assert counts.parameters == whole
    assert counts.active_parameters == whole - 2 * 6 * expert
    assert counts.local_parameters == whole - 2 * 4 * expert
    assert counts.state_bytes == counts.local_parameters * 16
    assert counts.tokens == 64

    per_token = 2 * (dense_layer + vocab * dim + 2 * (attention + experts * dim + 2 * expert)) + 3 * 2 * dim * 8
    assert counts.flops_per_token == 3 * per_token


def flops(**options: str) -> float:
    spec = moe_spec(ranks=4, ep=2, batch=8, sequence=8, **options)
    return tally(compile_program(spec).program, spec).flops_per_token


@each_row(
    ("beside", "per_token"),
    [
        ("shared = swiglu(8)", 2 * 3 * 16 * 8),
        ("shared = swiglu(8, gated = true)", 2 * (3 * 16 * 8 + 16)),
        ("shared = gelu(8)", 2 * 2 * 16 * 8),
        ("residual = gelu(8)", 2 * (2 * 16 * 8 + 2 * 16)),
    ],
)
def test_dense_paths_beside_experts_are_counted(beside: str, per_token: int):
    """Every token takes them, in two layers; backward is twice forward."""
    assert flops(beside=beside) == flops() + 3 * 2 * per_token


INNER = 'layer "inner" { moe { experts = 4 * gelu(8); gate = topk(2) } }'
ROUTER, USUAL = 2 * 16 * 8, 2 * 2 * 3 * 16 * 16
"""FLOPs of a token forward: a router of 8 experts, and two experts `swiglu(16)`."""


@each_row(
    ("experts", "gate", "per_token"),
    [
        ("8 * linear()", "topk(2)", ROUTER + 2 * 2 * 16 * 16),
        ("8 * lora(4)", "topk(2)", ROUTER + 2 * 2 * 2 * 16 * 4),
        ("8 * conv(8, kernel = 3)", "topk(2)", ROUTER + 2 * 2 * (3 * 3 * 16 * 8 + 3 * 8 * 16)),
        ('8 * mixture("inner")', "topk(2)", 2 * 16 * (8 + 8 * 4) + 4 * 2 * 2 * 16 * 8),
        ("8 * swiglu(16)", "dense", ROUTER + 4 * USUAL),
        ("8 * swiglu(16)", "attention_router(2)", 3 * ROUTER + USUAL),
        ("8 * swiglu(16)", "noisy_topk(2)", 2 * ROUTER + USUAL),
        ("8 * swiglu(16)", "expert_choice(2)", ROUTER + USUAL),
        ("8 * swiglu(16)", "expert_choice(3)", ROUTER + 3 * USUAL / 2),
        ("8 * swiglu(16)", "base", ROUTER + USUAL / 2),
        ("8 * swiglu(16)", "hash(3)", 3 * USUAL / 2),
    ],
)
def test_every_kind_of_expert_and_gate_is_counted(experts: str, gate: str, per_token: float):
    """mx e365763, tt#3225: what stands beside the usual experts had no FLOPs."""
    text = moe_text(ranks=1, ep=1, depth=2, gate=gate, balance="[]") + (INNER if "mixture" in experts else "")
    spec = load_text(text.replace("8 * swiglu(16)", experts), name="tiny.moe").unwrap()
    usual = moe_spec(ranks=1, ep=1, depth=2, gate="topk(2)", balance="[]")
    found, expected = (tally(compile_program(one).program, one).flops_per_token for one in (spec, usual))
    assert found - expected == 3 * (per_token - ROUTER - USUAL)


def test_a_tied_head_computes_as_much_as_its_own_and_holds_nothing():
    tied, own = (moe_spec(model=f"embedding = tokens(tied = {word})") for word in ("true", "false"))
    of_tied, of_own = (tally(compile_program(spec).program, spec) for spec in (tied, own))
    assert of_tied.flops_per_token == of_own.flops_per_token
    assert of_tied.parameters == of_own.parameters - 32 * 16


def test_traffic_is_what_a_ring_and_a_pairwise_exchange_send():
    spec = moe_spec(ranks=4, ep=2, batch=8, sequence=8)
    flows = {(flow.group, flow.purpose): flow for flow in tally(compile_program(spec).program, spec).traffic}
    rows = 16 * 2
    assert flows["ep[1..2]", "all_to_all of rows"].bytes == 2 * (4 * rows * 16 * 4 + 2 * rows * 4) / 2
    experts = 2 * 4 * 3 * 16 * 16 * 4
    assert flows["edp[1..2]", "all_reduce of gradients"].bytes == experts * 2 * (1 / 2)
    assert flows["dp", "all_reduce of gradients"].ranks == 4


def test_narrow_weights_count_fp32_masters():
    spec = moe_spec(dtype="bf16")
    counts = tally(compile_program(spec).program, spec)
    assert counts.state_bytes == counts.local_parameters * (2 + 4 + 4 + 8)


def test_imbalance_is_that_of_the_routing_to_plan_for():
    def imbalance(routing: str, ep: int) -> float:
        text = moe_text(ep=ep, experts=4).replace("sequence = 8;", f"sequence = 8; routing = {routing};")
        spec = load_text(text).unwrap()
        return tally(compile_program(spec).program, spec).imbalance

    assert imbalance("uniform", 4) == imbalance("zipf(1)", 1) == 1.0
    assert imbalance("zipf(1)", 4) == pytest.approx(4 / (1 + 1 / 2 + 1 / 3 + 1 / 4))
    assert imbalance("zipf(1)", 2) == pytest.approx(2 * 1.5 / (1 + 1 / 2 + 1 / 3 + 1 / 4))


@each_row("group", ["sequence", "rank", "batch"])
@each_row("degrees", [{"ep": 2}, {"ep": 1}, {"ep": 2, "tp": 2}])
@each_row("capacity", ["factor(1.25)", "dynamic", "dynamic(max = 0.5)"])
def test_capacities_are_counted_under_every_degree(capacity: str, degrees: dict[str, int], group: str):
    def flops(beside: str) -> float:
        spec = moe_spec(ranks=4, batch=8, sequence=8, beside=beside, **degrees)
        counted = tally(compile_program(spec).program, spec)
        assert counted.imbalance == 1.0
        return counted.flops_per_token

    tp = degrees.get("tp", 1)
    rows, tokens = 2 * 64, 64
    if capacity == "factor(1.25)" and degrees["ep"] == 2:
        # All places that the operator makes are computed, filled or not.
        groups, spread = (0, tp) if group == "sequence" else (1, tp * (4 // tp if group == "batch" else 1))
        rows = 4 * 8 * places_of(8 * tp // 4, 8 // tp, 2, 8, groups, spread, 5, 4, 1)[1]
    if capacity == "dynamic(max = 0.5)" and degrees["ep"] == 1:
        rows //= 2
    per_row = 3 * 2 * 3 * 16 * 16
    added = 2 * per_row * (rows - 2 * 64) / tokens
    assert flops(f"capacity = {capacity}; group = {group}") == flops("") + added


def test_places_are_those_that_the_operator_makes():
    spec = moe_spec(ranks=4, ep=2, experts=8, batch=8, sequence=8, beside="capacity = factor(1.25); group = rank")
    counted = {(f.group, f.purpose): f.bytes for f in tally(compile_program(spec).program, spec).traffic}
    # A rank's 16 tokens fill ⌈1.25 · 2 · 16 / 8⌉ = 5 places of each of 8 experts, half of which are on another rank.
    rows = 8 * 5
    assert counted["ep[1..2]", "activations"] == 2 * (4 * rows * 16 * 4 + 2 * rows * 4) / 2


@each_row("beside", ["", "capacity = factor(1.25)"])
@each_row("ep", [1, 2, 4])
def test_a_token_uses_its_own_experts_for_every_degree(ep: int, beside: str):
    """Top-2 of 8 experts in two layers: six experts of 3 · 16 · 16 parameters are idle in each."""
    spec = moe_spec(ranks=4, ep=ep, experts=8, beside=beside)
    counts = tally(compile_program(spec).program, spec)
    assert counts.parameters - counts.active_parameters == 2 * 6 * 3 * 16 * 16
