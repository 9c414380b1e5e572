"""A `layer` file through the passes: one mixture, from residual stream to residual stream."""

from __future__ import annotations

import pytest
from support.plans import layer_spec, moe_spec
from support.tables import each_row

from moec.driver import run_passes
from moec.grammar.diagnostics import DiagnosticError
from moec.passes.cost.totals import tally
from moec.passes.degrees.degrees import choose_degrees
from moec.passes.ir import Layout, Output, Program, Shard
from moec.passes.ir.work.workload import NOMINAL_SEQUENCE
from moec.passes.lower.lower_model import lower
from moec.passes.place.ranks import for_ranks


def placed(**options: object) -> Program:
    return run_passes(layer_spec(**options)).program


def test_a_layer_is_its_mixture_with_no_norm_no_residual_and_no_loss():
    program = lower(layer_spec())
    assert [block.name for block in program.blocks] == ["layers[0]", "forward", "num_tokens", "aux_loss"]
    mnemonics = [op.mnemonic for op in program.block("layers[0]").ops]
    assert mnemonics[:5] == ["router", "route", "permute", "expert_mlp", "combine"]
    assert "add" not in mnemonics
    assert {p.name.split(".")[0] for block in program.blocks for p in block.parameters} == {"moe"}


def test_a_layer_without_balance_has_no_blocks_for_it():
    program = lower(layer_spec(balance="[]"))
    assert [block.name for block in program.blocks] == ["layers[0]", "forward"]
    assert program.block("forward").outputs == (Output("y", "residual"), Output("counts_0", "counts", 0))


def test_x_and_y_have_the_layers_width_and_dtype_and_are_cut_over_dp_along_sequences():
    forward = placed(dtype="bf16", dim=32).block("forward")
    x, y = forward.scope["x"], forward.scope["y"]
    assert (x.shape, x.dtype) == (y.shape, y.dtype) == (("batch", "sequence", 32), "bf16")
    assert x.layout == y.layout == Layout.of({"dp": Shard(0)})


def test_tokens_are_counted_from_x_over_all_ranks():
    ops = placed().block("num_tokens").ops
    assert [op.mnemonic for op in ops] == ["count_tokens", "all_reduce"]


def test_a_layer_has_the_mixture_of_a_model_of_one_layer():
    """The same ops with the same layouts as in a model."""
    options = {"ep": 2, "balance": "[switch_loss(0.01)]", "beside": "shared = swiglu(8); capacity = factor(1.25)"}
    alone = placed(**options).block("layers[0]")
    model = run_passes(moe_spec(**options, depth=2)).program.block("layers[1]")
    first = next(i for i, op in enumerate(model.ops) if op.mnemonic == "router")
    given = {op.mnemonic: op.attributes() for op in model.ops[first:]}
    assert {op.mnemonic: op.attributes() for op in alone.ops}.items() <= given.items()
    sums = {p.name: (p.sum_over, p.layout) for p in model.parameters if p.name.startswith("moe.")}
    assert {p.name: (p.sum_over, p.layout) for p in alone.parameters} == sums


@each_row(("ranks", "experts", "ep"), [(1, 8, 1), (4, 8, 4), (4, 6, 2), (3, 8, 1), (6, 9, 3)])
def test_ep_is_the_largest_that_divides_ranks_and_experts(ranks: int, experts: int, ep: int):
    (degrees,) = choose_degrees(layer_spec(ranks=ranks, experts=experts)).experts
    assert (degrees.ep, degrees.edp, degrees.stated) == (ep, ranks // ep, False)


def test_an_ep_that_does_not_divide_is_the_diagnostic_of_a_model():
    with pytest.raises(DiagnosticError, match="MOE0312"):
        run_passes(layer_spec(ranks=4, ep=3, experts=9))
    with pytest.raises(DiagnosticError, match="MOE0311"):
        run_passes(layer_spec(ranks=4, ep=4, experts=6))


def test_a_spec_can_be_placed_on_another_number_of_ranks_than_its_file_says():
    spec = layer_spec(ranks=4)
    assert for_ranks(spec, 4) is spec
    other = for_ranks(spec, 6)
    assert (other.cluster.ranks, other.cluster.device) == (6, spec.cluster.device)
    with pytest.raises(DiagnosticError, match="MOE0312") as caught:
        choose_degrees(for_ranks(layer_spec(ranks=4, ep=4), 6))
    assert not caught.value.diagnostics[0].labels  # the file's cluster has no effect


def test_costs_are_counted_over_the_tokens_of_train_or_a_nominal_sequence_to_a_rank():
    spec = layer_spec(ranks=4)
    assert tally(run_passes(spec).program, spec).tokens == 4 * NOMINAL_SEQUENCE
    trained = layer_spec(ranks=4, tail="train { batch = 8; sequence = 32 }")
    assert tally(run_passes(trained).program, trained).tokens == 8 * 32
