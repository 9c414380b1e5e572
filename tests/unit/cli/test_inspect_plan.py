"""`moec inspect PLAN`: every collective with its group, bytes and line; a rank's parts; pictures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.inspected_text import inspected
from support.plans import moe_plan, moe_spec
from support.staged_plans import staged_plan

from moec.commands.inspecting.inspect_picture import picture_of
from moec.commands.inspecting.inspect_plan import plan_document
from moec.commands.inspecting.inspect_rank import rank_document
from moec.driver import load
from moec.grammar.diagnostics import DiagnosticError
from moec.passes.ir.ops import Conversion


@pytest.fixture
def plan(tmp_path) -> Path:
    return moe_plan(ranks=4, ep=2, batch=8, sequence=8).save(tmp_path / "tiny.plan")


def test_every_collective_of_a_layer_is_listed_with_group_bytes_and_line(plan: Path):
    text = inspected(plan)
    layer = text[text.index("layers[1..2], 2 layers") :].split("\n\n")[0]
    rows = [re.split(r"  +", line.strip()) for line in layer.splitlines()[2:]]
    # 16 tokens a rank, 2 choices each, 16 wide in fp32; half of the rows stay.
    assert rows == [
        ["exchange_counts %counts.1", "ep[1..2]", "2", "32 B", "none", "-", "tiny.moe:10"],
        ["all_to_all %rows.1", "ep[1..2]", "2", "1.02 kB", "all_to_all", "1.02 kB", "tiny.moe:10"],
        ["all_to_all %row_weights.1", "ep[1..2]", "2", "64 B", "all_to_all", "64 B", "tiny.moe:10"],
        ["all_to_all back %weighted.1", "ep[1..2]", "2", "1.02 kB", "all_to_all", "1.02 kB", "tiny.moe:9"],
        ["gradients", "dp", "4", "-", "all_reduce", "5.57 kB"],
        ["gradients", "edp[1..2]", "2", "-", "all_reduce", "12.3 kB"],
    ]
    assert "layers[0], 1 layer" in text
    assert "group ep[1..2]: 2 communicators of 2: [0, 1], [2, 3]" in text


def test_a_step_of_micro_batches_sends_all_of_them_and_keeps_one(plan: Path, tmp_path: Path):
    parts = moe_plan(ranks=4, ep=2, batch=8, sequence=8, microbatches=2).save(tmp_path / "parts.plan")
    whole, halved = (inspected(path) for path in (plan, parts))
    assert "Below: one rank's step; equal layers are shown once." in whole
    assert "one rank's step of 2 micro-batches (kept for backward: of one of them); equal layers" in halved

    def row(text: str, name: str) -> list[str]:
        layer = text[text.index("layers[1..2], 2 layers") :]
        return re.split(r"  +", next(line for line in layer.splitlines() if line.startswith(f"  {name}")).strip())

    assert row(whole, "all_to_all %rows.1") == row(halved, "all_to_all %rows.1")
    assert row(halved, "exchange_counts")[3] == "64 B"
    op, *numbers = row(whole, "rms_norm %h ")
    assert numbers[2] == "2.11 kB"
    assert row(halved, "rms_norm %h ")[:4] == [op, *numbers[:2], "1.06 kB"]
    assert row(halved, "expert_mlp")[1:3] == row(whole, "expert_mlp")[1:3]


def test_conversions_of_tensor_parallelism_name_their_backward(tmp_path):
    text = inspected(moe_plan(ranks=8, tp=4, ep=4, batch=8).save(tmp_path / "tp.plan"))
    layer = text[text.index("layers[0], 1 layer") :].split("\n\n")[0]
    rows = [re.split(r"  +", line.strip()) for line in layer.splitlines()[2:]]
    # 4 sequences of 8 tokens for each tp group, 16 wide in fp32: a rank has a quarter of it, or sends three.
    assert rows[:2] == [
        ["all_gather %h.2", "tp", "4", "1.54 kB", "reduce_scatter", "1.54 kB", "tiny.moe:6"],
        ["reduce_scatter %o.1", "tp", "4", "1.54 kB", "all_gather", "1.54 kB", "tiny.moe:6"],
    ]


def test_the_largest_ops_of_a_layer_are_listed_with_flops_and_what_they_keep(plan: Path):
    text = inspected(plan)
    table = text[text.index("layers[1..2], 2 layers") :].split("\n\n")[1]
    head, *lines = [re.split(r"  +", line.strip()) for line in table.splitlines()]
    assert head == ["op", "FLOPs forward", "FLOPs backward", "kept for backward", "sent", "line"]
    rows = {row[0]: row[1:] for row in lines}
    # 32 rows through 3 matrices of 16 by 16. Kept: rows, pre-activations [32, 2, 16], weights, counts from 2 sources,
    # and the int32 table of rows: their order, 5 offsets, one number of tiles, 6 tiles' experts and rows, in fours.
    kept = 32 * 16 * 4 + 32 * 32 * 4 + 32 * 4 + 2 * 4 * 8 + (32 + 8 + 4 + 8 + 8) * 4
    assert rows["expert_mlp %weighted"] == ["49.2 k", "98.3 k", f"{kept / 1000:.3g} kB", "-", "tiny.moe:10"]
    # q, k and v are projections of one value, which is saved once.
    assert (rows["linear %q"][2], rows["linear %k"][2]) == ("1.02 kB", "-")
    assert [row[0] for row in lines[-2:]] == ["18 others", "all"]
    assert rows["all"][3] == "4.26 kB"


def test_one_rank_cannot_send(tmp_path):
    text = inspected(moe_plan(ranks=1, ep=1).save(tmp_path / "one.plan"))
    assert text.count("no communication") == 7


def test_stages_send_and_receive_messages_where_they_are_on_different_ranks() -> None:
    spec = moe_spec(ranks=1, ep=1, batch=8, sequence=8, microbatches=2, depth=4)
    document = plan_document(staged_plan(spec, virtual=2, schedule="zero_bubble_v"))
    rows = {
        block.name: [(row.group, row.forward, row.forward_bytes, row.backward, row.backward_bytes) for row in found]
        for block in document.blocks
        if (found := [row for row in block.collectives if row.forward in ("send", "receive")])
    }
    # 64 tokens in 2 micro-batches, 16 wide in fp32, and the sum of balance terms. Stages 1 and 2 are on one rank.
    sends, receives = (
        [("pp", "send", n, "receive", 0) for n in (4096, 8)],
        [("pp", "receive", 0, "send", n) for n in (4096, 8)],
    )
    assert rows == {"forward": sends[:1], "forward[1]": receives[:1], "forward[2]": sends, "forward[3]": receives}


def test_a_rank_knows_its_place_its_peers_and_its_experts(plan: Path):
    text = inspected(plan, 3)
    assert "rank 3 of 4: its sequences are part 3 of 4" in text
    assert "group ep[1..2] with [2]" in text
    assert "group edp[1..2] with [1]" in text
    assert re.search(r"moe.experts.up.weight +fp32\[4:8, 2, 16, 16\] +of \[8, 2, 16, 16\] +ep:shard\(0\)", text)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_the_plan_does_not_have_is_refused(plan: Path, rank: int):
    with pytest.raises(DiagnosticError) as refused:
        inspected(plan, rank)
    (found,) = refused.value.diagnostics
    assert (found.code, found.message) == ("MOE0017", f"--rank must be 0 to 3, not {rank}")
    assert found.help == "the plan is for 4 ranks"


def test_the_document_has_the_meshes_groups_and_every_op_of_a_layer(plan: Path):
    found = plan_document(load(plan))
    assert (found.ranks, found.microbatches, found.frozen) == (4, 1, 0)
    assert {mesh.name: mesh.axes for mesh in found.meshes}["experts[1..2]"] == {"edp": 2, "ep": 2, "etp": 1}
    assert found.groups["ep[1..2]"] == [[0, 1], [2, 3]]
    (layer,) = (block for block in found.blocks if block.layers == [1, 2])
    rows = next(each for each in layer.collectives if each.of == "%rows.1")
    assert (rows.group, rows.ranks, rows.forward, rows.backward) == ("ep[1..2]", 2, "all_to_all", "all_to_all")
    assert (rows.forward_bytes, rows.backward_bytes, rows.line) == (1024, 1024, "tiny.moe:10")
    counts = next(each for each in layer.collectives if each.of == "%counts.1")
    assert (counts.forward, counts.backward, counts.backward_bytes) == ("exchange_counts", None, 0)
    gradients = [each for each in layer.collectives if each.of == "gradients"]
    assert [(each.forward, each.backward, each.group) for each in gradients] == [
        (None, "all_reduce", "dp"),
        (None, "all_reduce", "edp[1..2]"),
    ]
    assert len(layer.ops) == len(load(plan).program.block(layer.name).ops) > 18
    experts = next(op for op in layer.ops if op.op == "expert_mlp %weighted")
    assert (experts.forward_flops, experts.backward_flops) == (32 * 3 * 16 * 16 * 2, 2 * 32 * 3 * 16 * 16 * 2)


def test_the_document_of_a_rank_has_its_peers_and_slices(plan: Path):
    found = rank_document(load(plan), 3)
    assert found.coordinates["experts[1..2]"] == {"edp": 1, "ep": 1, "etp": 0}
    assert (found.groups["ep[1..2]"], found.groups["edp[1..2]"]) == ([2, 3], [1, 3])
    parameters = {p.name: p for block in found.blocks[-2:] for p in block.parameters}
    (experts,) = (p for name, p in parameters.items() if name.endswith("moe.experts.up.weight"))
    assert (experts.shape, experts.layout) == ([8, 2, 16, 16], "ep:shard(0)")
    assert experts.held == [(4, 8), (0, 2), (0, 16), (0, 16)]
    assert found.held_elements < found.elements


@pytest.mark.parametrize(("kind", "arrow", "loud"), [("mermaid", "-->", "(["), ("dot", "->", "fillcolor = gold")])
def test_pictures_have_every_op_once_and_show_collectives(plan: Path, kind: str, arrow: str, loud: str):
    program = moe_plan(ranks=4, ep=2, batch=8, sequence=8).program
    text = picture_of(plan, kind, "full")
    drawn = edges = 0
    for block in program.blocks:
        makers = {v.name: f"in {v.name}" for v in block.inputs}
        makers.update({v.name: op.results[0].name for op in block.ops for v in op.results})
        drawn += len(block.inputs) + len(block.ops) + 1
        edges += sum(len({makers[name] for name in op.operands if name in makers}) for op in block.ops)
        edges += len({makers[output.name] for output in block.outputs})
    assert text.count(f" {arrow} ") == edges
    collectives = sum(isinstance(op, Conversion) for block in program.blocks for op in block.ops)
    assert text.count(loud) == collectives > 0
    blocks = len(program.blocks)
    assert len(text.splitlines()) == edges + drawn + (2 * blocks + 1 if kind == "mermaid" else 3 * blocks + 3)
