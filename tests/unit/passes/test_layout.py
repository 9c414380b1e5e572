"""Layouts: the order in which axes shard a dim, each rank's part, and conversions between layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product
from typing import Any

import pytest
import torch
from support.tables import each_row
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from moec.codegen.emit import emit_graph, target_name
from moec.passes.ir import (
    Block,
    Dim,
    Layer,
    Layout,
    LayoutError,
    Mesh,
    Meshes,
    Output,
    Partial,
    Program,
    Shard,
    TypeRuleError,
    Value,
    local_shape,
    local_slices,
)
from moec.passes.ir.ops import AllGather, AllToAll, Call
from moec.passes.ir.ops.ragged_conversions import ReduceScatterRows
from moec.passes.ir.texts.parse import parse_program
from moec.passes.ir.texts.text import print_program
from moec.passes.ir.verifier import connected, laid_out, well_typed
from moec.passes.place.communicate import Communicate
from moec.runtime.errors import JobError
from moec.runtime.verify.cluster.shuffles import NODES
from moec.runtime.weights.shards import dtensor_placements

MESH = Mesh("dense", (("dp", 2), ("cp", 3)))
SHAPE = (12, 6)


def layouts(*placements: Any) -> Iterator[Layout]:
    """Every layout of the two axes with these placements, in both orders where the axes cut one dim."""
    for placed in product(placements, repeat=2):
        pairs = [(axis, p) for axis, p in zip(("dp", "cp"), placed, strict=True) if p is not None]
        yield from dict.fromkeys(Layout.of(order) for order in permutations(pairs))


SHARDED = list(layouts(None, Shard(0), Shard(1)))
SOURCES = list(layouts(None, Shard(0), Shard(1), Partial()))


# ---- the order of cuts ---------------------------------------------------------------------------------


def test_only_the_order_of_cuts_of_one_dim_tells_layouts_apart():
    first, second = Layout.parse("dp:shard(0) cp:shard(0)"), Layout.parse("cp:shard(0) dp:shard(0)")
    assert first != second
    assert str(first) == "dp:shard(0) cp:shard(0)"
    assert str(second) == "cp:shard(0) dp:shard(0)"
    assert Layout.parse("tp:shard(1) dp:shard(0)") == Layout.parse("dp:shard(0) tp:shard(1)")
    assert Layout.parse("tp:partial(sum) dp:partial(sum)") == Layout.parse("dp:partial(sum) tp:partial(sum)")
    # Axes between the shards of a dim have no effect.
    assert Layout.parse("dp:shard(0) tp:shard(1) cp:shard(0)") == Layout.parse("tp:shard(1) dp:shard(0) cp:shard(0)")


def test_a_layout_is_read_as_it_is_printed():
    assert len({str(layout) for layout in SOURCES}) == len(SOURCES) == 18
    for layout in SOURCES:
        assert Layout.parse(str(layout)) == layout
        program = converting(layout, layout)
        assert parse_program(print_program(program, spans=False)) == program


def test_a_new_cut_is_the_last_of_its_dim_and_the_same_placement_changes_nothing():
    layout = Layout.of({"dp": Shard(0), "cp": Shard(0)})
    assert layout.cuts(0) == ("dp", "cp")
    assert layout.replace("dp", Shard(0)) == layout
    assert layout.replace("dp", None).replace("dp", Shard(0)).cuts(0) == ("cp", "dp")
    assert layout.can_undo("cp")
    assert not layout.can_undo("dp")
    assert layout.replace("cp", Shard(1)).can_undo("dp")


# ---- what a rank holds ---------------------------------------------------------------------------------


@each_row("layout", SHARDED)
def test_local_slices_have_the_local_shape_and_tile_the_whole(layout: Layout):
    held = torch.zeros(SHAPE, dtype=torch.int64)
    for rank in range(MESH.ranks):
        part = held[local_slices(SHAPE, layout, MESH, rank)]
        assert part.shape == local_shape(SHAPE, layout, MESH) == local_shape(SHAPE, layout, Meshes(MESH))
        part += 1
    replicas = MESH.ranks * part.numel() // held.numel()
    assert (held == replicas).all()


def test_symbols_keep_their_name_in_a_local_shape():
    layout = Layout.of({"dp": Shard(0), "cp": Shard(1)})
    assert local_shape(("batch", 6), layout, MESH) == ("batch", 2)


@each_row("layout", [layout for layout in SHARDED if layout.cuts(0) != ("cp", "dp") != layout.cuts(1)])
def test_dtensor_holds_the_same_parts_on_a_mesh_of_the_same_order(layout: Layout):
    for rank in range(MESH.ranks):
        ranks = torch.arange(MESH.ranks).view(2, 3)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "cp"), _init_backend=False, _rank=rank)
        shape, offset = compute_local_shape_and_global_offset(SHAPE, mesh, dtensor_placements(layout, mesh))
        slices = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        assert slices == local_slices(SHAPE, layout, MESH, rank)


def test_an_order_of_cuts_that_dtensor_does_not_know_is_refused():
    mesh = DeviceMesh("cpu", torch.arange(6).view(2, 3), mesh_dim_names=("dp", "cp"), _init_backend=False, _rank=0)
    with pytest.raises(JobError, match=r"(?s)MOE0700.*lies as cp:shard"):
        dtensor_placements(Layout.of({"cp": Shard(0), "dp": Shard(0)}), mesh)


# ---- conversions ---------------------------------------------------------------------------------------


def converting(source: Layout, target: Layout, shape: tuple[Dim, ...] = SHAPE, dtype: str = "fp64") -> Program:
    """`forward` has an input with layout `source`, and calls a block that wants layout `target`."""
    x = Value(name="x", shape=shape, dtype=dtype, layout=source, role="residual")
    wanted = replace(x, layout=target)
    inner = Block(name="inner", inputs=(wanted,), parameters=(), ops=(), outputs=(Output("x", "residual"),))
    call = Call(operands=("x",), results=(replace(wanted, name="y", role=None),), block="inner", layer=0)
    forward = Block(name="forward", inputs=(x,), parameters=(), ops=(call,), outputs=(Output("y", "residual"),))
    return Program(name="conversions", meshes=(MESH,), blocks=(inner, forward), layers=(Layer(0, ("inner",)),))


def communicated(source: Layout, target: Layout, **of_value: Any) -> Program:
    program = Communicate().apply(converting(source, target, **of_value))
    for invariant in (well_typed, laid_out, connected):
        invariant(program)
    return program


def conversions(source: str, target: str, **of_value: Any) -> list[str]:
    ops = communicated(Layout.parse(source), Layout.parse(target), **of_value).block("forward").ops
    return [f"{op.mnemonic} {op.attributes()['axis']}" for op in ops if not isinstance(op, Call)]


def parts_of(whole: Tensor, layout: Layout) -> list[Tensor]:
    """Every rank's part of `whole`; partial sums are terms of different sizes."""
    parts = [whole[local_slices(whole.shape, layout, MESH, rank)] for rank in range(MESH.ranks)]
    for axis, size in MESH.axes:
        if layout.get(axis) == Partial():
            weights = [2.0, -1.0] if size == 2 else [4.0, -1.0, -2.0]
            parts = [part * weights[MESH.coordinate(rank, axis)] for rank, part in enumerate(parts)]
    return parts


def run_conversions(program: Program, parts: list[Tensor]) -> list[Tensor]:
    """The operand of the block that `forward` calls, on every rank."""
    graph, values = emit_graph(program, program.block("forward")), dict[fx.Node, list[Tensor]]()
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = parts
        elif node.op == "call_module":
            return values[node.all_input_nodes[0]]
        elif node.op == "call_function":
            (operand,), results = node.all_input_nodes, [torch.empty(0)] * MESH.ranks
            for ranks in MESH.groups(str(node.args[-1])):
                given = [[values[operand][rank] for rank in ranks]]
                for rank, result in zip(ranks, NODES[target_name(node)](node.args, given), strict=True):
                    results[rank] = result
            values[node] = results
    raise AssertionError("nothing is called")


@each_row("source", SOURCES)
def test_conversions_take_a_value_from_any_layout_to_any_other(source: Layout):
    whole = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for target in SHARDED:
        found = run_conversions(communicated(source, target), parts_of(whole, source))
        torch.testing.assert_close(found, parts_of(whole, target))


ROADS = {
    # The last cut alone changes.
    ("dp:shard(0) cp:shard(0)", "dp:shard(0)"): ["all_gather_alike cp"],
    ("dp:shard(0) cp:shard(0)", "dp:shard(0) cp:shard(1)"): ["all_to_all_padded cp"],
    ("dp:shard(0)", "dp:shard(0) cp:shard(0)"): ["slice cp"],
    ("dp:shard(0) cp:partial(sum)", "dp:shard(0) cp:shard(0)"): ["reduce_scatter cp"],
    # The target's first shard is made first, whatever its name.
    ("replicate", "dp:shard(0) cp:shard(0)"): ["slice dp", "slice cp"],
    ("replicate", "cp:shard(0) dp:shard(0)"): ["slice cp", "slice dp"],
    # Shards are undone from the last one on.
    ("dp:shard(0) cp:shard(0)", "replicate"): ["all_gather_alike cp", "all_gather_alike dp"],
    ("cp:shard(0) dp:shard(0)", "replicate"): ["all_gather_alike dp", "all_gather_alike cp"],
    # A later shard is in the way: it is undone and made again.
    ("dp:shard(0) cp:shard(0)", "cp:shard(0) dp:shard(1)"): [
        "all_gather_alike cp", "all_to_all_padded dp", "slice cp",
    ],
    ("dp:shard(0) cp:shard(0)", "cp:shard(0) dp:shard(0)"): [
        "all_gather_alike cp", "all_gather_alike dp", "slice cp", "slice dp",
    ],
}  # fmt: skip


@each_row(("source", "target"), ROADS)
def test_only_last_cuts_are_undone_and_every_new_cut_is_the_last(source: str, target: str):
    assert conversions(source, target) == ROADS[source, target]


def test_counts_of_rows_are_exchanged_and_other_integers_move_as_all_dense_values_do():
    there = ("cp:shard(0)", "cp:shard(1)")
    assert conversions(*there, shape=("sources", 6), dtype="int64") == ["exchange_counts cp"]
    for shape in (("batch", "sequence"), ("batch", 6), SHAPE):
        assert conversions(*there, shape=shape, dtype="int64") == ["all_to_all_padded cp"]


def rows_converted(source: str, target: str) -> list[str]:
    """The conversions of ragged rows whose counts lie as the rows do, with both dims swapped."""
    swapped = source.replace("shard(1)", "shard(2)").replace("shard(0)", "shard(1)").replace("shard(2)", "shard(0)")
    counts = Value(name="c", shape=("sources", 6), dtype="int64", layout=Layout.parse(swapped), role="counts")
    program = converting(Layout.parse(source), Layout.parse(target), shape=(6, "rows", 3))
    inner, forward = program.blocks
    (x,) = forward.inputs
    forward = replace(forward, inputs=(counts, replace(x, ragged="c")))
    program = Communicate().apply(replace(program, blocks=(inner, forward)))
    for invariant in (well_typed, laid_out, connected):
        invariant(program)
    ops = program.block("forward").ops
    return [f"{op.mnemonic} {op.attributes()['axis']}" for op in ops if not isinstance(op, Call)]


def test_counts_are_converted_before_their_rows():
    found = rows_converted("dp:shard(1) cp:shard(1)", "dp:shard(1) cp:shard(0)")
    assert found == ["exchange_counts cp", "all_to_all cp"]


@each_row("axes", [("cp",), ("dp", "cp")])
def test_rows_return_only_from_where_they_went(axes: tuple[str, ...]):
    source, target = (" ".join(f"{axis}:{placed}" for axis in axes) for placed in ("partial(sum)", "shard(1)"))
    with pytest.raises(LayoutError, match=r"reduce_scatter_rows of %x: %c is no gather_counts"):
        rows_converted(source, target)


def test_rows_of_several_ranks_do_not_go_to_their_experts():
    """They are sorted by source, then by expert: what goes to one rank does not lie together."""
    rows = Value(name="x", shape=(6, "rows", 3), dtype="fp64", ragged="c", layout=Layout.parse("ep:shard(1)"))
    counts = Value(name="c", shape=("sources", 6), dtype="int64", layout=Layout.parse("ep:shard(1)"))
    splits = Value(name="s", shape=(2, "sources"), dtype="int64", layout=Layout())
    op = AllToAll(operands=("x", "s", "c"), axis="ep", reverse=False)
    experts = Mesh("experts", (("ep", 2), ("etp", 3)))
    with pytest.raises(LayoutError, match="with rows of several ranks over"):
        op.place([rows, splits, counts], Meshes(MESH, experts), {})
    own = replace(rows, layout=Layout.parse("etp:shard(1) ep:shard(1)"))
    received = replace(counts, layout=Layout.parse("etp:shard(0) ep:shard(1)"))
    placing = op.place([own, splits, received], Meshes(MESH, experts), {})
    assert placing.results == (Layout.parse("etp:shard(1) ep:shard(0)"),)
    with pytest.raises(LayoutError, match="to rows that %c does not count"):
        op.place([own, splits, replace(counts, layout=Layout.parse("etp:shard(0) ep:shard(0)"))], Meshes(MESH), {})


def test_rows_return_by_the_splits_of_their_counts():
    rows = Value(name="x", shape=(6, "rows", 3), dtype="fp64", ragged="g", layout=Layout.parse("cp:partial(sum)"))
    gathered = Value(name="g", shape=("sources", 6), dtype="int64", layout=Layout())
    counts = replace(gathered, name="c", layout=Layout.parse("cp:shard(0)"))
    splits = replace(counts, name="s", shape=(2, "sources"))
    op = ReduceScatterRows(operands=("x", "s", "c"), axis="cp")
    assert op.infer([rows, splits, counts], {})[0].ragged == "c"
    assert op.place([rows, splits, counts], Meshes(MESH), {}).results == (Layout.parse("cp:shard(1)"),)
    with pytest.raises(LayoutError, match="to rows that %g does not count"):
        op.place([rows, splits, gathered], Meshes(MESH), {})
    with pytest.raises(TypeRuleError, match="wants splits"):
        op.infer([rows, gathered, counts], {})


def test_what_no_conversion_gives_is_a_layout_error():
    with pytest.raises(LayoutError, match="no conversion of %x"):
        communicated(Layout.parse("dp:shard(0)"), Layout.parse("dp:partial(sum)"))


def test_an_op_that_would_undo_an_inner_cut_first_is_a_layout_error():
    x = Value(name="x", shape=SHAPE, dtype="fp32", layout=Layout.of({"dp": Shard(0), "cp": Shard(0)}))
    gather = AllGather(operands=("x",), axis="dp", dim=0)
    with pytest.raises(LayoutError, match="all_gather over dp of %x"):
        gather.place([x], Meshes(MESH), {})
    assert AllGather(operands=("x",), axis="cp", dim=0).place([x], Meshes(MESH), {}).results == (
        Layout.of({"dp": Shard(0)}),
    )


def test_an_axis_that_a_mesh_does_not_have_is_of_one_rank() -> None:
    assert MESH.groups("tp") == tuple((rank,) for rank in range(6))
    assert {MESH.coordinate(rank, "tp") for rank in range(6)} == {0}
