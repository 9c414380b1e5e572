"""shard and communicate: which conversions, and over which axes gradients are summed."""

import pytest
from models import moe_spec

from moec.passes.ir import Program
from moec.passes.pipeline import compile_program


def compiled(**options: object) -> Program:
    return compile_program(moe_spec(**options)).program


def collectives(program: Program, block: str) -> list[str]:
    found = [(op.mnemonic, op.attributes()) for op in program.block(block).ops if "axis" in op.attributes()]
    return [f"{name} {attributes['axis']}" for name, attributes in found]


def sums(program: Program) -> dict[str, tuple[str, ...]]:
    return {p.name: p.sum_over for block in program.blocks for p in block.parameters}


def test_one_rank_needs_no_collective_and_no_gradient_sum():
    program = compiled(ranks=1, ep=1)
    assert all(not collectives(program, block.name) for block in program.blocks)
    assert set(sums(program).values()) == {()}


def test_counts_travel_once_and_rows_there_and_back():
    program = compile_program(moe_spec(ep=4), stop_after="communicate").program
    assert collectives(program, "layers[1..2]") == ["exchange_counts ep", "all_to_all ep", "all_to_all ep"]
    assert collectives(program, "layers[0]") == []


def test_without_expert_parallelism_rows_stay_where_they_are():
    assert collectives(compiled(ep=1), "layers[1..2]") == []


def test_the_loss_is_reduced_once_and_its_counts_once_each():
    for block in ("valid_labels", "loss", "num_tokens", "aux_loss"):
        assert collectives(compiled(), block) == ["all_reduce dp"]


@pytest.mark.parametrize(("ep", "experts_over"), [(1, ("edp",)), (2, ("edp",)), (4, ())])
def test_expert_gradients_are_summed_over_edp_and_dense_ones_over_dp(ep: int, experts_over: tuple[str, ...]):
    found = sums(compiled(ep=ep))
    assert found["moe.experts.up.weight"] == found["moe.experts.down.weight"] == experts_over
    dense = {name: over for name, over in found.items() if not name.startswith("moe.experts.")}
    assert set(dense.values()) == {("dp",)}


def test_ranks_number_the_innermost_axis_first():
    mesh = compiled(ranks=4, ep=2).mesh("experts[1..2]")
    assert mesh.groups("ep") == ((0, 1), (2, 3))
    assert mesh.groups("edp") == ((0, 2), (1, 3))
