"""The virtual cluster against torch's own ranks in one process: right plans, and wrong ones, which are wrong alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from faults import bypass, change_node, change_sums, swap_groups
from models import moe_plan
from torch import Tensor

from moec.codegen.operators import CONVERSIONS, POSITIONED
from moec.codegen.plan import Plan
from moec.passes.ir import Layout
from moec.runtime.reference import reference
from moec.runtime.shards import local_slices
from moec.runtime.verify import global_batch
from moec.runtime.virtual import VirtualCluster

pytest.importorskip("torch.distributed._local_tensor", reason="this torch has no LocalTensorMode (2.10 and later do)")

from all_ranks import run_all_ranks

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


def run_both(plan: Plan) -> tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]:
    """Every rank's logits, loss and gradients in float64: by torch's mode, and on the virtual cluster."""
    model = reference(plan.spec, seed=0, dtype=torch.float64)
    cluster = VirtualCluster(plan, dict(model.named_parameters()))
    inputs = global_batch(plan, 0)
    logits, loss, gradients = run_all_ranks(plan, cluster.parameters, inputs)
    virtual_logits, virtual_loss = cluster.lockstep.run(inputs.rank_tokens, inputs.rank_labels)
    virtual = {"logits": virtual_logits, "loss": virtual_loss, **cluster.backward(virtual_loss)}
    return {"logits": logits, "loss": loss, **gradients}, virtual


def unsharded(plan: Plan, *, training: bool = True) -> dict[str, list[Tensor]]:
    """What each rank should have."""
    model = reference(plan.spec, seed=0, dtype=torch.float64).train(training)
    inputs = global_batch(plan, 0)
    out = model(inputs.tokens, inputs.labels)
    assert out.loss is not None
    out.loss.backward()
    dense, ranks = plan.meshes["dense"], range(plan.world_size)
    logits = [out.logits[local_slices(out.logits.shape, plan.logits_layout, dense, rank)] for rank in ranks]
    found = {"logits": logits, "loss": [out.loss for _ in ranks]}
    for name, parameter in model.named_parameters():
        data = plan.parameters[name]
        layout, mesh = Layout.parse(data.layout), plan.meshes[data.mesh]
        assert parameter.grad is not None
        found[name] = [parameter.grad[local_slices(data.shape, layout, mesh, rank)] for rank in ranks]
    return found


def distance(one: dict[str, list[Tensor]], other: dict[str, list[Tensor]]) -> float:
    """The largest difference on any rank."""
    assert one.keys() == other.keys()
    pairs = [pair for name in one for pair in zip(one[name], other[name], strict=True)]
    assert all(a.shape == b.shape for a, b in pairs)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("name", PLANS)
def test_torchs_own_ranks_give_what_the_virtual_cluster_and_the_unsharded_model_give(name: str):
    plan = moe_plan(**PLANS[name], batch=8)
    torchs, virtual = run_both(plan)
    assert distance(torchs, virtual) < BOUND
    assert distance(torchs, unsharded(plan)) < BOUND


def test_evaluation_has_its_own_capacity_there_too():
    plan = moe_plan(ranks=4, ep=2, tp=2, batch=8, beside="capacity = factor(0.5, eval = 1.5); group = batch")
    torchs, virtual = run_both(plan.in_evaluation())
    assert distance(torchs, virtual) < BOUND
    assert distance(torchs, unsharded(plan, training=False)) < BOUND
    assert distance(torchs, unsharded(plan)) > WRONG


def test_every_conversion_is_among_these_plans():
    plans = [moe_plan(**options, batch=8) for options in PLANS.values()]
    used = {node.target for plan in plans for graph in plan.stages[0].graphs for node in graph.nodes}
    assert {*CONVERSIONS, *POSITIONED} <= used


def without(plan: Plan, target: str) -> Plan:
    """`plan` without the first node of that operator."""
    return bypass(plan, *first(plan, target))


def instead(plan: Plan, target: str, other: str) -> Plan:
    """`plan` with another operator at the first node of that one."""
    return change_node(plan, *first(plan, target), target=other)


def first(plan: Plan, target: str) -> tuple[str, str]:
    return next((g.name, n.name) for g in plan.stages[0].graphs for n in g.nodes if n.target == target)


FAULTS: dict[str, tuple[str, Callable[[Plan], Plan]]] = {
    "expert gradients are not summed": ("ep 2", lambda p: change_sums(p, "experts.up.weight", ())),
    "ep and edp are swapped": ("ep 2", swap_groups),
    "the loss is not reduced": ("ep 2", lambda p: bypass(p, "loss", "loss_2")),
    "no copy_to": ("tp 4, tokens whole", lambda p: without(p, "moec.copy_to.default")),
    "gathered for sharded ops as if they were alike": (
        "tp 2, ep 1", lambda p: instead(p, "moec.all_gather.default", "moec.all_gather_alike.default")
    ),
    "gathered to be alike as if for sharded ops": (
        "tp 4, tokens whole", lambda p: instead(p, "moec.all_gather_alike.default", "moec.all_gather.default")
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_plan_is_wrong_alike_on_torchs_own_ranks(fault: str):
    name, plant = FAULTS[fault]
    plan = moe_plan(**PLANS[name], batch=8)
    torchs, virtual = run_both(plant(plan))
    assert distance(torchs, unsharded(plan)) > WRONG
    assert distance(torchs, virtual) < BOUND
