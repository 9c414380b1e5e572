"""The virtual cluster against torch's simulated ranks in one process, for right and for wrong plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.combinations import some
from support.plans import moe_plan
from support.wrong_plans import bypass, change_kind, change_sums, swap_groups

from moec.codegen.emit import emit_graph, target_name
from moec.codegen.plan import Plan
from moec.passes.ir import Op
from moec.passes.ir.ops import AllGather, AllGatherAlike, CopyTo
from moec.runtime.verify.cluster.shuffles import NODES

pytest.importorskip("torch.distributed._local_tensor", reason="this torch has no LocalTensorMode (2.10 and later do)")

from support.torch_ranks import distance, run_both, unsharded

BOUND = 1e-12
WRONG = 1e-4

PLANS: dict[str, dict[str, Any]] = {
    "ep 2": {"ranks": 4, "ep": 2},
    "ep 4, one choice": {"ranks": 4, "ep": 4, "gate": "topk(1)"},
    "tp 2, ep 1": {"ranks": 2, "tp": 2, "ep": 1},
    "dp 2, tp 2, ep 4": {"ranks": 4, "tp": 2, "ep": 4},
    "tp 4, tokens whole": {"ranks": 4, "tp": 4, "ep": 2, "sequence_parallel": False},
    "tp 2, dense paths beside": {"ranks": 4, "tp": 2, "ep": 2, "beside": "shared = swiglu(8); residual = gelu(8)"},
    "a degree per layer": {"ranks": 4, "tp": 2, "ep": 4, "mixtures": ((8, 2), (16, None), (8, 1))},
    "capacity of a sequence": {"ranks": 4, "ep": 2, "beside": "capacity = factor(1.0)"},
    "capacity of a batch": {"ranks": 8, "tp": 2, "ep": 4, "beside": "capacity = factor(1.0); group = batch"},
    "capacity of the busiest": {"ranks": 4, "ep": 4, "beside": "capacity = dynamic()"},
    "capacity of the busiest, up to one": {"ranks": 4, "ep": 2, "tp": 2, "beside": "capacity = dynamic(max = 1.0)"},
}


OFTEN = (
    "dp 2, tp 2, ep 4",
    "tp 4, tokens whole",
    "a degree per layer",
    "capacity of a batch",
    "capacity of the busiest, up to one",
)
"""Of every conversion at least one plan; gloo ranks train under all of these."""


@pytest.mark.parametrize("name", some(list(PLANS), OFTEN))
def test_torchs_own_ranks_give_what_the_virtual_cluster_and_the_unsharded_model_give(name: str):
    plan = moe_plan(**PLANS[name], batch=8)
    torchs, virtual = run_both(plan)
    assert distance(torchs, virtual) < BOUND
    assert distance(torchs, unsharded(plan)) < BOUND


@pytest.mark.parametrize("ep", [1, 2])
def test_so_do_they_of_experts_over_a_second_axis(ep: int):
    plan = moe_plan(ranks=2 * ep, ep=ep, etp=2)
    torchs, virtual = run_both(plan)
    assert distance(torchs, virtual) < BOUND
    assert distance(torchs, unsharded(plan)) < BOUND


def test_evaluation_has_its_own_capacity_there_too():
    plan = moe_plan(ranks=4, ep=2, tp=2, batch=8, beside="capacity = factor(0.5, eval = 1.5); group = batch")
    torchs, virtual = run_both(plan, training=False)
    assert distance(torchs, virtual) < BOUND
    assert distance(torchs, unsharded(plan, training=False)) < BOUND
    assert distance(torchs, unsharded(plan)) > WRONG


def test_every_conversion_is_among_these_plans():
    plans = [moe_plan(**PLANS[name], batch=8) for name in OFTEN]
    plans += [moe_plan(expert="gelu(4, bias = true)", ep=ep, etp=2) for ep in (1, 2)]
    graphs = (emit_graph(plan.program, block) for plan in plans for block in plan.program.blocks)
    used = {target_name(node) for graph in graphs for node in graph.nodes}
    assert NODES.keys() - {"moec.assign_slots.default"} <= used  # gloo ranks train with it


def without(plan: Plan, kind: type[Op]) -> Plan:
    """`plan` without the first op of that kind."""
    block, op = first(plan, kind)
    return bypass(plan, block, op.results[0].name)


def instead(plan: Plan, kind: type[Op], other: type[Op]) -> Plan:
    """`plan` with an op of another kind, and the same attributes, at the first of that one."""
    block, op = first(plan, kind)
    return change_kind(plan, block, op.results[0].name, other, **op.attributes())


def first(plan: Plan, kind: type[Op]) -> tuple[str, Op]:
    return next((block.name, op) for block in plan.program.blocks for op in block.ops if isinstance(op, kind))


FAULTS: dict[str, tuple[str, Callable[[Plan], Plan]]] = {
    "expert gradients are not summed": ("ep 2", lambda p: change_sums(p, "experts.up.weight", ())),
    "ep and edp are swapped": ("ep 2", swap_groups),
    "the loss is not reduced": ("ep 2", lambda p: bypass(p, "loss", "loss.1")),
    "no copy_to": ("tp 4, tokens whole", lambda p: without(p, CopyTo)),
    "gathered for sharded ops as if they were alike": (
        "tp 2, ep 1", lambda p: instead(p, AllGather, AllGatherAlike)
    ),
    "gathered to be alike as if for sharded ops": (
        "tp 4, tokens whole", lambda p: instead(p, AllGatherAlike, AllGather)
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_plan_is_wrong_alike_on_torchs_own_ranks(fault: str):
    name, plant = FAULTS[fault]
    plan = moe_plan(**PLANS[name], batch=8)
    torchs, virtual = run_both(plant(plan))
    assert distance(torchs, unsharded(plan)) > WRONG
    assert distance(torchs, virtual) < BOUND
