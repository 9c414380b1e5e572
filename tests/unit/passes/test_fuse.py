"""fuse: the mixtures that become one op; nothing else changes."""

from __future__ import annotations

from support.plans import moe_spec
from support.tables import each_row

from moec.passes.ir import Program
from moec.passes.ir.ops import ExpertMlp, ExpertMlpPadded, KeepChoices, MixtureMlp
from moec.passes.pipeline import compile_program

PARTS = ("permute", "permute_padded", "permute_dynamic", "expert_mlp", "expert_mlp_padded", "combine", "combine_padded")
CAPACITIES = ["dropless", "factor(1.25)", "dynamic", "dynamic(max = 1.5)"]


def mnemonics(program: Program, block: str = "layers[1..2]") -> list[str]:
    return [op.mnemonic for op in program.block(block).ops]


def compiled(capacity: str, **options: object) -> Program:
    return compile_program(moe_spec(beside=f"capacity = {capacity}", **options)).program


@each_row("capacity", CAPACITIES)
@each_row("degrees", [{"ep": 1}, {"ranks": 1, "ep": 1}, {"ep": 1, "tp": 2}])
def test_a_mixture_whose_rows_stay_becomes_one_op(capacity: str, degrees: dict[str, int]) -> None:
    ops = mnemonics(compiled(capacity, **degrees))
    assert ops.count("mixture_mlp") == 1
    assert not set(ops) & set(PARTS)
    assert "largest_load" not in ops
    assert "all_reduce_max" not in ops


@each_row(
    ("gate", "fused"),
    [("dense", True), ("topk(8)", True), ("topk(2)", True), ("expert_choice", False), ("dselect_k(2)", False)],
)
@each_row("padding", ["", "embedding = tokens(padding = 0)"])
def test_choices_that_are_mostly_none_get_no_room_and_others_do(gate: str, fused: bool, padding: str) -> None:
    program = compiled("dropless", ranks=1, ep=1, gate=gate, balance="[]", model=padding)
    assert ("mixture_mlp" in mnemonics(program)) == fused
    assert ("permute" in mnemonics(program)) != fused


@each_row("capacity", CAPACITIES)
@each_row("tp", [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": False}])
def test_weights_travel_with_rows_that_do(capacity: str, tp: dict[str, object]) -> None:
    ops = mnemonics(compiled(capacity, ep=2, **tp))
    assert "mixture_mlp" not in ops
    assert not {"combine", "combine_padded"} & {*ops}
    rows = [op for op in ops if op.startswith(("permute", "all_to_all", "expert_mlp", "sum_rows"))]
    there = "all_to_all" if capacity == "dropless" else "all_to_all_padded"
    assert rows[1:] == [
        there, "permute_weights", there, "expert_mlp" if capacity == "dropless" else "expert_mlp_padded",
        there, "sum_rows",
    ]  # fmt: skip


@each_row("capacity", CAPACITIES)
def test_what_is_weighted_has_a_name_of_its_own(capacity: str) -> None:
    """`moec verify` compares values by name with a reference that weights later."""
    block = compiled(capacity, ep=2).block("layers[1..2]")
    given = {value.name: op for op in block.ops for value in op.results}
    assert "y" not in given
    (experts,) = (op for op in block.ops if isinstance(op, ExpertMlp | ExpertMlpPadded))
    weights = next(name for name in experts.operands if name.startswith("row_weights"))
    rows, own = block.scope[experts.operands[0]], block.scope[weights]
    assert (own.shape, own.ragged, own.layout, own.dtype) == (rows.shape[:-1], rows.ragged, rows.layout, "fp32")
    (summed,) = (op for op in block.ops if op.mnemonic == "sum_rows")
    assert [value.name for value in summed.results] == ["mixed"]
    assert given[summed.operands[0]].operands[0] == experts.results[0].name == "weighted"


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
