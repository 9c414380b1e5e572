"""Tensor parallelism: shards, conversions and refusals."""

from __future__ import annotations

from collections import Counter

import pytest
from support.plans import moe_plan, moe_spec, moe_text
from support.tables import each_row

from moec.grammar import load_text
from moec.grammar.diagnostics import DiagnosticError
from moec.passes.degrees.degrees import choose_degrees
from moec.passes.ir import Layout, Shard
from moec.passes.pipeline import compile_program
from moec.runtime.verify.verification import verify


def program(**options):
    return compile_program(moe_spec(**{"ranks": 8, "tp": 4, "ep": 4, "batch": 8, **options})).program


def ops(block):
    return Counter(op.mnemonic for op in block.ops)


def layout(block, name):
    return str(block.scope[name].layout)


def test_heads_hidden_widths_and_the_vocabulary_are_sharded_over_tp():
    dense, forward = program().block("layers[0]"), program().block("forward")
    for name in ("attention.q.weight", "attention.k.weight", "attention.v.weight"):
        assert layout(dense, f"@{name}") == "tp:shard(0)"
    assert layout(dense, "@attention.o.weight") == "tp:shard(1)"
    assert layout(dense, "@ffn.up.weight") == layout(dense, "@ffn.down.weight") == "tp:shard(1)"
    assert layout(forward, "@embedding.weight") == layout(forward, "@head.weight") == "tp:shard(0)"


def test_a_dense_layer_gathers_twice_and_scatters_twice():
    counted = ops(program().block("layers[0]"))
    assert (counted["all_gather"], counted["reduce_scatter"]) == (2, 2)
    assert not counted["all_reduce"]
    assert not counted["copy_to"]
    assert not counted["slice"]


def test_without_sequence_parallelism_it_copies_and_reduces():
    counted = ops(program(sequence_parallel=False).block("layers[0]"))
    assert (counted["copy_to"], counted["all_reduce"]) == (2, 2)
    assert not counted["all_gather"]
    assert not counted["reduce_scatter"]


@each_row("sequence_parallel", [True, False])
def test_no_two_ranks_send_the_same_token_to_its_experts(sequence_parallel: bool):
    block = program(sequence_parallel=sequence_parallel).block("layers[1..2]")
    permute = next(op for op in block.ops if op.mnemonic == "permute")
    tokens = Layout.of({"dp": Shard(0), "tp": Shard(1)})
    assert all(value.layout == tokens for value in block.operands(permute))
    assert ops(block)["all_gather_alike"] == (0 if sequence_parallel else 1)  # after combine


def test_every_gradient_sum_follows_from_the_layouts():
    block = program().block("layers[1..2]")
    sums = {p.name: p.sum_over for p in block.parameters}
    assert sums["attention.q.weight"] == ("dp",)
    assert sums["moe.gate.weight"] == sums["ffn_norm.weight"] == ("dp_cp_tp",)
    assert sums["moe.experts.up.weight"] == ("edp",)


def test_fewer_kv_heads_than_ranks_are_repeated_and_sharded():
    block = program().block("layers[1..2]")  # 2 kv heads, tp 4
    copies = block.scope["k_copies"]
    assert copies.shape == ("batch", "sequence", 4, 4)
    assert str(copies.layout) == "dp:shard(0) tp:shard(2)"
    assert verify(moe_plan(ranks=8, tp=4, ep=4, batch=8, bias="all")).ok


@each_row("tp", [2, 4])
def test_a_norm_of_each_head_moves_nothing_and_its_gradient_is_summed_over_tp(tp: int):
    normed, plain = (program(tp=tp, qk_norm=kind).block("layers[1..2]") for kind in ("head", "none"))
    assert ops(normed) - ops(plain) == {"rms_norm": 2}
    for name in "qk":
        weight = normed.scope[f"@attention.{name}_norm.weight"]
        assert (str(weight.layout), weight.sum_over) == ("replicate", ("dp_cp_tp",))


def test_a_norm_over_all_heads_exchanges_heads_for_tokens_and_back():
    normed, plain = (program(tp=2, qk_norm=kind).block("layers[1..2]") for kind in ("projection", "none"))
    assert ops(normed) - ops(plain) == {"rms_norm": 2, "all_to_all_padded": 4}
    norms = [
        op
        for op in normed.ops
        if op.mnemonic == "rms_norm" and op.operands[1].endswith(("q_norm.weight", "k_norm.weight"))
    ]
    assert [str(op.results[0].layout) for op in norms] == ["dp:shard(0) tp:shard(1)"] * 2
    assert {normed.scope[op.operands[1]].sum_over for op in norms} == {("dp_cp_tp",)}


def test_a_vocabulary_that_tp_does_not_divide_stays_whole():
    text = moe_text(ranks=4, tp=2, ep=4).replace("vocab = 32", "vocab = 31")
    forward = compile_program(load_text(text).unwrap()).program.block("forward")
    assert layout(forward, "@embedding.weight") == "replicate"
    assert layout(forward, "logits") == "dp:shard(0) tp:shard(1)"


def test_identical_ranks_fold_both_ways():
    spec = moe_spec(ranks=8, tp=2, ep=8, batch=8)
    degrees = choose_degrees(spec)
    assert (degrees.dp, degrees.tp, degrees.experts[0].edp, degrees.experts[0].ep) == (4, 2, 1, 8)
    assert "dp" not in degrees.stated


@each_row(
    ("change", "code", "words"),
    [
        ({"tp": 3}, "MOE0312", "8 / 3 is not whole"),
        ({"tp": 2, "dp": 8}, "MOE0310", "dp = 8, tp = 2"),
        ({"tp": 8}, "MOE0318", "4 / 8 is not whole"),
        ({"tp": 4, "ffn": "gelu(30)"}, "MOE0318", "30 / 4 is not whole"),
        ({"tp": 4, "beside": "shared = swiglu(6)"}, "MOE0318", "6 / 4 is not whole"),
        ({"tp": 4, "beside": "residual = gelu(6)"}, "MOE0318", "6 / 4 is not whole"),
        ({"tp": 4, "sequence": 6}, "MOE0319", "6 tokens over 4 ranks"),
        ({"tp": 2, "cp": 3}, "MOE0312", "8 / (3 * 2) is not whole"),
        ({"tp": 2, "dp": 4, "cp": 2}, "MOE0310", "dp = 4, cp = 2, tp = 2"),
        ({"tp": 2, "cp": 4}, "MOE0318", "4 / (4 * 2) is not whole"),
        ({"cp": 4, "sequence": 6, "sequence_parallel": False}, "MOE0319", "6 tokens over 4 ranks"),
        ({"cp": 2, "gate": "soft(3)", "balance": "[]"}, "MOE0318", "3 / 2 is not whole"),
        ({"etp": 3}, "MOE0312", "8 / 3 is not whole"),
        ({"ep": 4, "etp": 4}, "MOE0312", "8 / (4 * 4) is not whole"),
        ({"etp": 4, "expert": "gelu(6)"}, "MOE0318", "6 / 4 is not whole"),
        ({"cp": 2, "batch": 6}, "MOE0313", "6 sequences over 4 data-parallel ranks"),
        ({"tp": 2, "batch": 6}, "MOE0313", "6 sequences over 4 data-parallel ranks"),
    ],
)
def test_what_does_not_divide_is_refused_with_both_places(change, code, words):
    with pytest.raises(DiagnosticError) as caught:
        choose_degrees(moe_spec(**{"ranks": 8, "ep": 2, "batch": 8, **change}))
    found = next(d for d in caught.value.diagnostics if d.code == code)
    assert words in found.message
    assert found.span
    assert found.labels
    assert found.help
