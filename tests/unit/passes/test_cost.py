"""Costs of ops: products, saved activations and bytes sent, for every op of a plan."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.plans import moe_plan, moe_spec, moe_text
from support.tables import each_row

from moec.driver import run_passes, to_spec
from moec.grammar import load_text
from moec.grammar.spec import Spec
from moec.open_words import stated
from moec.passes.cost.totals import BlockCost, tally
from moec.passes.ir import Op, Program
from moec.passes.ir.mesh import Mesh
from moec.passes.ir.work.cost import Cost
from moec.passes.ir.work.workload import Workload
from moec.passes.pipeline import compile_program

REPOSITORY = Path(__file__).parents[3]
FILES = [*sorted(REPOSITORY.glob("tests/cases/*.moe")), *sorted(REPOSITORY.glob("examples/*.moe"))]


def costs_of(text: str, block: str = "layers[1..2]") -> dict[str, Cost]:
    """The costs of a block's ops, by their first result."""
    spec = load_text(text).unwrap()
    program = compile_program(spec).program
    cost = BlockCost.of(program, program.block(block), Workload.of(spec, program))
    return {op.results[0].name: of_op for op, of_op in cost.costs}


@cache
def compiled(file: Path) -> tuple[Spec, Program]:
    """A file and its Program: several tests look at all of them."""
    spec = stated(to_spec(file))
    return spec, run_passes(spec).program


def every_op(program: Program, workload: Workload) -> list[tuple[BlockCost, Op, Cost]]:
    """Every op of a Program with its cost."""
    costs = [BlockCost.of(program, block, workload) for block in program.blocks]
    return [(cost, op, of_op) for cost in costs for op, of_op in cost.costs]


@each_row("file", FILES)
def test_every_op_names_what_it_keeps(file: Path) -> None:
    """An op saves an operand (parameters included), a result, or an intermediate tensor named after a result."""
    spec, program = compiled(file)
    for _, op, cost in every_op(program, Workload.of(spec, program)):
        results = {value.name for value in op.results}
        for saved in cost.saved:
            name, _, inner = saved.name.partition(":")
            assert name in (results if inner else {*op.operands, *results}), (op.mnemonic, saved)
            assert saved.bytes > 0, (op.mnemonic, saved)


@each_row("file", FILES)
def test_backward_computes_twice_what_forward_does(file: Path) -> None:
    spec, program = compiled(file)
    for _, op, cost in every_op(program, Workload.of(spec, program)):
        assert cost.work.backward.flops == 2 * cost.work.forward.flops, op.mnemonic
        assert cost.work.forward.moved >= 0
        is_run = cost.work.backward.moved > 0 or cost.work.backward.flops > 0 or any(s.backward for s in cost.sent)
        assert (cost.work.backward.launches > 0) == is_run


@each_row("file", FILES)
def test_costs_of_several_sizes_at_once_are_those_of_each(file: Path) -> None:
    spec, program = compiled(file)
    workload = Workload.of(spec, program)
    several = replace(workload, batch=np.array([workload.batch, 2 * workload.batch]))
    meshes = tuple(Mesh(m.name, tuple((axis, np.array([size, size])) for axis, size in m.axes)) for m in program.meshes)
    at_once = every_op(replace(program, meshes=meshes), several)
    for index, each in enumerate((workload, replace(workload, batch=2 * workload.batch))):
        for (_, op, cost), (*_, costs) in zip(every_op(program, each), at_once, strict=True):
            assert numbers(costs, index) == pytest.approx(numbers(cost, 0), rel=1e-12), op.mnemonic


def numbers(value: Any, index: int) -> list[float]:
    """The numbers in a cost, of arrays those at `index`."""
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, f.name) for f in fields(value)]
    if isinstance(value, tuple | list):
        return [number for part in value for number in numbers(part, index)]
    return (
        [float(value[index])]
        if isinstance(value, np.ndarray)
        else [float(value)]
        if isinstance(value, int | float)
        else []
    )


def test_positions_and_a_router_in_bf16_move_what_casts_and_five_wide_tensors_take() -> None:
    """4 ranks of 16 tokens: 4 heads of 4, of a model 16 wide with 8 experts."""
    costs = costs_of(moe_text(batch=8, sequence=8, dtype="bf16"))
    positions, router = costs["q.1"].work, costs["logits"].work
    assert positions.forward.moved == 16 * 16 * (2 + 2)
    assert positions.forward.again == positions.backward.again == 16 * 16 * (5 * 4 + 2 * (2 + 4) - 4)
    assert router.forward.again == router.backward.again == (16 * 16 + 8 * 16) * (2 + 4)


def test_experts_say_their_products() -> None:
    """4 ranks, edp 2 × ep 2: of 64 tokens' 128 choices a rank gets 32, for 4 of 8 experts."""
    work = costs_of(moe_text(batch=8, sequence=8))["weighted"].work
    up, down = work.forward.products
    assert (up.name, up.m, up.n, up.k, up.groups, up.rows_per_group) == ("up", 32, 2 * 16, 16, 4, 8)
    assert (down.name, down.m, down.n, down.k, down.groups) == ("down", 32, 16, 16, 4)
    assert [product.name for product in work.backward.products] == [
        "down_backward", "down_weights", "up_backward", "up_weights",
    ]  # fmt: skip
    assert up.moved == 4 * (32 * 16 + 4 * 32 * 16 + 32 * 32)


def test_an_uneven_load_is_that_of_the_busiest_rank_and_its_busiest_expert() -> None:
    """Loads 1, 1/2, 1/3, 1/4 on two ranks: the first has 1.5 of 2.083, and its first expert 1."""
    text = moe_text(experts=4, batch=8, sequence=8)
    even, uneven = (
        costs_of(text.replace("sequence = 8;", f"sequence = 8; routing = {r};")) for r in ("uniform", "zipf(1)")
    )
    total, choices = 1 + 1 / 2 + 1 / 3 + 1 / 4, 64
    up, _ = uneven["weighted"].work.forward.products
    assert up.m == pytest.approx(choices * 1.5 / total)
    assert up.most_rows == pytest.approx(choices / total)
    # Ranks send evenly; the busiest rank receives more, and sends it back.
    (there,), (usual,) = uneven["rows.1"].sent, even["rows.1"].sent
    assert there.forward == there.backward == pytest.approx(usual.forward * 1.5 / total * 2)
    assert uneven["rows"] == even["rows"]


def test_the_busiest_rank_keeps_more() -> None:
    text = moe_text(experts=4).replace("sequence = 8;", "sequence = 8; routing = zipf(1);")
    spec = load_text(text).unwrap()
    counts = tally(compile_program(spec).program, spec)
    assert counts.activation_bytes < counts.most_activation_bytes < counts.imbalance * counts.activation_bytes
    even = moe_spec(experts=4)
    assert tally(compile_program(even).program, even).activation_bytes == counts.activation_bytes


def test_what_two_ops_keep_is_counted_once() -> None:
    """q, k and v are projections of one value, which is the sum of nothing that is kept."""
    spec = moe_spec()
    program = compile_program(spec).program
    cost = BlockCost.of(program, program.block("layers[0]"), Workload.of(spec, program))
    of_op = [{saved.name for saved in c.saved if not saved.is_parameter} for _, c in cost.costs]
    assert sum(map(len, of_op)) > len(cost.saved()) == len(set.union(*of_op))
    assert [op.mnemonic for op, c in cost.costs if any(s.name == "h" for s in c.saved)] == ["linear"] * 3


def test_bytes_over_an_axis_are_said_for_each_direction() -> None:
    """8 ranks, dp 2 × tp 4: a rank's 4 sequences of 8 tokens, 16 wide in fp32, of which it sends three quarters."""
    sent = costs_of(moe_text(ranks=8, tp=4, ep=4, batch=8), "layers[0]")["h.2"].sent
    assert [(s.axis, s.forward, s.backward, s.backward_op) for s in sent] == [("tp", 1536, 1536, "reduce_scatter")]


def test_gathered_rows_are_sent_once_each_way() -> None:
    """64 tokens' 128 rows, 16 wide in fp32, over ep 2: a rank of etp 2 gets 64 rows, half of them from the other.

    The rows that it sends and receives are kept for backward.
    """
    plan = moe_plan(ranks=4, ep=2, etp=2)
    cost = BlockCost.of(plan.program, plan.program.block("layers[1..2]"), Workload.of(plan.spec, plan.program).even)
    found = {op.results[0].name: (op, of_op) for op, of_op in cost.costs}
    sent = {name: found[name][1].sent[0] for name in ("rows.2", "weighted.1", "row_weights.2")}
    bytes_of = {name: (each.axis, each.forward, each.backward, each.backward_op) for name, each in sent.items()}
    assert bytes_of["rows.2"] == ("etp", 2048, 2048, "reduce_scatter_rows")
    assert bytes_of["weighted.1"] == ("etp", 2048, 2048, "all_gather_rows")
    assert bytes_of["row_weights.2"][1] == 2048 / 16
    assert [(saved.name, saved.bytes) for saved in found["rows.2"][1].saved] == [("splits.1", 2 * 2 * 8)]


def test_processors_keep_more_of_a_norm_than_devices_with_a_fused_one() -> None:
    def kept(device: str) -> set[str]:
        spec = moe_spec(dtype="bf16")
        program = compile_program(spec).program
        workload = Workload(batch=8, sequence=8, device=device)
        cost = BlockCost.of(program, program.block("layers[0]"), workload)
        norm = next(of_op for op, of_op in cost.costs if op.mnemonic == "rms_norm")
        return {saved.name for saved in norm.saved if not saved.is_parameter}

    assert kept("cuda") == {"x", "h:rstd"}
    assert kept("cpu") == {"h:wide", "h:normalized", "h:rstd"}
