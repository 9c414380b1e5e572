"""tally: counts worked out by hand."""

import pytest
from models import moe_spec, moe_text

from moec.grammar import load_text
from moec.passes.pipeline import compile_program
from moec.passes.tally import tally


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


def test_traffic_is_what_a_ring_and_a_pairwise_exchange_send():
    spec = moe_spec(ranks=4, ep=2, batch=8, sequence=8)
    flows = {(flow.group, flow.purpose): flow for flow in tally(compile_program(spec).program, spec).traffic}
    rows = 16 * 2
    assert flows["ep[1..2]", "all_to_all of rows"].bytes == 2 * 4 * rows * 16 * 4 / 2
    experts = 2 * 4 * 3 * 16 * 16 * 4
    assert flows["edp[1..2]", "all_reduce of gradients"].bytes == experts * 2 * (1 / 2)
    assert flows["dp", "all_reduce of gradients"].ranks == 4


def test_narrow_weights_count_fp32_masters():
    spec = moe_spec(dtype="bf16")
    counts = tally(compile_program(spec).program, spec)
    assert counts.state_bytes == counts.local_parameters * (2 + 2 + 4 + 8)


def test_imbalance_is_that_of_the_routing_to_plan_for():
    def imbalance(routing: str, ep: int) -> float:
        text = moe_text(ep=ep, experts=4).replace("sequence = 8;", f"sequence = 8; routing = {routing};")
        spec = load_text(text).unwrap()
        return tally(compile_program(spec).program, spec).imbalance

    assert imbalance("uniform", 4) == imbalance("zipf(1)", 1) == 1.0
    assert imbalance("zipf(1)", 4) == pytest.approx(4 / (1 + 1 / 2 + 1 / 3 + 1 / 4))
    assert imbalance("zipf(1)", 2) == pytest.approx(2 * 1.5 / (1 + 1 / 2 + 1 / 3 + 1 / 4))
