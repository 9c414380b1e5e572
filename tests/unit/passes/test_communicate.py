"""shard and communicate: the inserted conversions, and the axes over which gradients are summed."""

from support.plans import moe_plan, moe_spec
from support.tables import each_row

from moec.passes.ir import Block, Init, Layout, Mesh, Op, Output, Parameter, Program, Value
from moec.passes.ir.ops import Linear
from moec.passes.ir.texts.parse import parse_program
from moec.passes.ir.texts.text import print_program
from moec.passes.ir.verifier import connected, laid_out, well_typed
from moec.passes.pipeline import compile_program
from moec.passes.place.communicate import Communicate


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


@each_row(("ep", "experts_over"), [(1, ("edp",)), (2, ("edp",)), (4, ())])
def test_expert_gradients_are_summed_over_edp_and_dense_ones_over_dp(ep: int, experts_over: tuple[str, ...]):
    found = sums(compiled(ep=ep))
    assert found["moe.experts.up.weight"] == found["moe.experts.down.weight"] == experts_over
    dense = {name: over for name, over in found.items() if not name.startswith("moe.experts.")}
    assert set(dense.values()) == {("dp",)}


def test_ranks_number_the_innermost_axis_first():
    mesh = compiled(ranks=4, ep=2).mesh("experts[1..2]")
    assert mesh.groups("ep") == ((0, 1), (2, 3))
    assert mesh.groups("edp") == ((0, 2), (1, 3))


# ---- rows over two axes --------------------------------------------------------------------------------


def moves(program: Program) -> list[str]:
    ops = [op for op in program.block("layers[1..2]").ops if "axis" in op.attributes()]
    return [f"{op.mnemonic} {op.attributes()['axis']} {' '.join(op.operands)}" for op in ops]


def test_rows_of_sliced_experts_go_to_all_ranks_of_the_slices_and_back():
    """The counts of the way back are those from before each gather or exchange, over its own axis."""
    program = moe_plan(ranks=4, ep=2, etp=2).program
    assert moves(program) == [
        "exchange_and_gather_counts ep counts",
        "all_to_all ep rows splits counts.1",
        "all_to_all ep row_weights splits counts.1",
        "all_gather_rows etp rows.1 splits.1 counts.2",
        "all_gather_rows etp row_weights.1 splits.1 counts.2",
        "reduce_scatter_rows etp weighted splits.1 counts.1",
        "all_to_all ep weighted.1 splits counts",
    ]
    assert dict(program.mesh("experts[1..2]").axes) == {"edp": 1, "ep": 2, "etp": 2}
    experts = {p.name: (str(p.layout), p.sum_over) for p in program.block("layers[1..2]").parameters if "exp" in p.name}
    assert set(experts.values()) == {("ep:shard(0) etp:shard(2)", ())}


def test_counts_of_rows_that_are_gathered_alone_are_gathered_by_themselves():
    assert moves(moe_plan(ranks=2, ep=1, etp=2).program)[:2] == [
        "gather_counts etp counts",
        "all_gather_rows etp rows splits counts.1",
    ]


def test_conversions_of_rows_are_read_as_they_are_printed():
    program = moe_plan(ranks=4, ep=2, etp=2).program
    assert parse_program(print_program(program)) == program


# ---- a partial sum for an op that is sharded on its axis -----------------------------------------------


def linears(weights: dict[str, str], x: str) -> Program:
    """`forward` applies each of these weights `[out, in]`, in these layouts, to one x that lies so."""
    value = Value(name="x", shape=("batch", "sequence", 8), dtype="fp32", layout=Layout.parse(x), role="residual")
    init = Init(kind="zeros")
    parameters = tuple(
        Parameter(name=name, shape=(4, 8), dtype="fp32", init=init, decays=True).placed(Layout.parse(layout))
        for name, layout in weights.items()
    )
    results = [Value(name=f"y_{name}", shape=("batch", "sequence", 4), dtype="fp32") for name in weights]
    ops: tuple[Op, ...] = tuple(
        Linear(operands=("x", f"@{name}"), results=(result,)) for name, result in zip(weights, results, strict=True)
    )
    outputs = tuple(Output(result.name, "residual") for result in results)
    block = Block(name="forward", inputs=(value,), parameters=parameters, ops=ops, outputs=outputs)
    program = Communicate().apply(
        Program(name="linears", meshes=(Mesh("dense", (("dp", 2), ("tp", 2))),), blocks=(block,))
    )
    for invariant in (well_typed, laid_out, connected):
        invariant(program)
    return program


def test_a_partial_sum_for_an_op_sharded_on_its_axis_is_reduced_and_its_gradient_too():
    assert collectives(linears({"cut": "tp:shard(0)"}, x="tp:partial(sum)"), "forward") == [
        "all_reduce tp",
        "copy_to tp",
    ]
    assert collectives(linears({"cut": "tp:shard(0)"}, x="replicate"), "forward") == ["copy_to tp"]
    assert collectives(linears({"whole": "replicate"}, x="tp:partial(sum)"), "forward") == ["all_reduce tp"]


def test_a_partial_sum_is_reduced_once_for_all_that_use_it():
    found = linears({"whole": "replicate", "cut": "tp:shard(0)", "other": "tp:shard(0)"}, x="tp:partial(sum)")
    assert collectives(found, "forward") == ["all_reduce tp", "copy_to tp"]
    of_ops = {op.operands[1]: op.operands[0] for op in found.block("forward").ops if isinstance(op, Linear)}
    assert of_ops["@cut"] == of_ops["@other"] != of_ops["@whole"]
