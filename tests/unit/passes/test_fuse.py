"""fuse: which mixtures become one op, and that nothing else changes."""

from __future__ import annotations

import pytest
from models import moe_spec

from moec.passes.ir import Program
from moec.passes.ir.ops import KeepChoices, MixtureMlp
from moec.passes.pipeline import compile_program

PARTS = ("permute", "permute_padded", "permute_dynamic", "expert_mlp", "expert_mlp_padded", "combine", "combine_padded")
CAPACITIES = ["dropless", "factor(1.25)", "dynamic", "dynamic(max = 1.5)"]


def mnemonics(program: Program, block: str = "layers[1..2]") -> list[str]:
    return [op.mnemonic for op in program.block(block).ops]


def compiled(capacity: str, **options: object) -> Program:
    return compile_program(moe_spec(beside=f"capacity = {capacity}", **options)).program


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("degrees", [{"ep": 1}, {"ranks": 1, "ep": 1}, {"ep": 1, "tp": 2}], ids=str)
def test_a_mixture_whose_rows_stay_becomes_one_op(capacity: str, degrees: dict[str, int]) -> None:
    ops = mnemonics(compiled(capacity, **degrees))
    assert ops.count("mixture_mlp") == 1
    assert not set(ops) & set(PARTS)
    assert "largest_load" not in ops
    assert "all_reduce_max" not in ops


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_rows_that_travel_stay_apart(capacity: str) -> None:
    ops = mnemonics(compiled(capacity, ep=2))
    assert "mixture_mlp" not in ops
    assert sum(op in PARTS for op in ops) == 3


def test_each_layer_by_its_own_degree() -> None:
    program = compile_program(moe_spec(ranks=4, dp=4, ep=None, mixtures=((8, 1), (8, 4)))).program
    fused = {block.name: "mixture_mlp" in mnemonics(program, block.name) for block in program.blocks}
    assert fused["layers[1]"]
    assert not fused["layers[2]"]


def test_what_a_capacity_drops_is_said_by_keep_choices() -> None:
    block = compiled("factor(0.5, eval = 1.5, min = 3)", ep=1).block("layers[1..2]")
    (keep,) = (op for op in block.ops if isinstance(op, KeepChoices))
    (mixture,) = (op for op in block.ops if isinstance(op, MixtureMlp))
    assert mixture.operands[1] == keep.results[0].name
    assert (keep.parts, keep.whole, keep.eval_parts, keep.eval_whole, keep.least) == (1, 2, 3, 2, 3)


def test_gradients_of_experts_are_summed_as_before() -> None:
    spec = moe_spec(ranks=4, ep=1)
    before, after = (compile_program(spec, stop_after=name).program for name in ("communicate", "fuse"))
    assert [b.parameters for b in before.blocks] == [b.parameters for b in after.blocks]
    assert {p.name: p.sum_over for p in after.block("layers[1..2]").parameters}["moe.experts.up.weight"] == ("edp",)
