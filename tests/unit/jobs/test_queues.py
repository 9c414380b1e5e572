"""Queues of whole routing groups in an order of their own: wrong plans are refused, and bad words too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.plans import BODY, layer_text, moe_plan, moe_text
from support.wrong_plans import bypass, change_op, op_giving

from moec.codegen.plan import Plan
from moec.driver import compile as compile_source
from moec.grammar import load_text
from moec.grammar.diagnostics import DiagnosticError
from moec.passes.ir.ops import AllGatherAlike, KeepBest, KeepFirst
from moec.runtime import ops
from moec.runtime.host.reference import reference
from moec.runtime.verify.verification import verify

ORDERED = "capacity = factor(1.0, order = {}); group = {}"


def gathered_before(plan: Plan, value: str, kind: type) -> list[str]:
    """The results of the gathers that an op asked for."""
    block = plan.program.block(BODY)
    found = []
    for name in op_giving(plan, BODY, value).operands:
        while isinstance(op := next((o for o in block.ops if name in [v.name for v in o.results]), None), kind):
            found.append(name)
            name = op.operands[0]
    return found


def test_a_queue_sees_the_choices_and_priorities_of_its_whole_group() -> None:
    axes = {}
    for group in ("sequence", "rank", "batch"):
        plan = moe_plan(ranks=4, tp=2, ep=2, beside=ORDERED.format("priority", group))
        block = plan.program.block(BODY)
        (keep,) = (op for op in block.ops if isinstance(op, KeepFirst))
        axes[group] = [str(block.scope[name].layout) for name in keep.operands]
    assert axes == {
        "sequence": ["dp:shard(0)"] * 2,
        "rank": ["dp:shard(0)"] * 2,
        "batch": ["replicate"] * 2,
    }


def test_a_queue_by_weight_sees_the_weights_of_its_whole_group_and_one_by_token_no_weights() -> None:
    for group, lies in (("sequence", "dp:shard(0)"), ("batch", "replicate")):
        for order, operands in (("weight", 2), ("token", 1)):
            plan = moe_plan(ranks=4, tp=2, ep=2, beside=ORDERED.format(order, group))
            block = plan.program.block(BODY)
            (keep,) = (op for op in block.ops if isinstance(op, KeepBest))
            assert [str(block.scope[name].layout) for name in keep.operands] == [lies] * operands


FAULTS: dict[str, Callable[[Plan], Plan]] = {
    "priorities of logits": lambda p: change_op(p, BODY, "priorities", operands=("logits",)),
    "a smaller capacity": lambda p: change_op(p, BODY, "kept", parts=1, whole=2),
    "another group": lambda p: change_op(p, BODY, "kept", group="batch"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_plan_with_another_queue_is_refused(fault: str) -> None:
    plan = moe_plan(ep=1, ranks=2, beside=ORDERED.format("priority", "sequence"))
    assert verify(plan, float32=False).ok
    report = verify(FAULTS[fault](plan), float32=False)
    assert not report.ok


def test_a_queue_over_a_part_of_its_group_is_refused() -> None:
    plan = moe_plan(ranks=4, tp=2, ep=2, beside=ORDERED.format("priority", "sequence"))
    for name in gathered_before(plan, "kept", AllGatherAlike):
        plan = bypass(plan, BODY, name)
    report = verify(plan, float32=False)
    assert not report.ok


def test_ties_are_in_token_order_and_padding_takes_no_place() -> None:
    experts = torch.tensor([[[0], [-1], [0], [0], [0]]])
    capacity = (None, 2, 5, 2, 5, 1, 1, 0)  # two of five tokens, one expert
    equal = ops.keep_first(experts, torch.ones(1, 5), *capacity)
    assert equal.flatten().tolist() == [0, -1, 0, -1, -1]
    first = ops.keep_first(experts, torch.tensor([[0.0, 9.0, 1.0, 0.0, 1.0]]), *capacity)
    assert first.flatten().tolist() == [-1, -1, 0, -1, 0]


def test_each_expert_keeps_what_it_weighs_most_and_ties_are_token_by_token() -> None:
    experts = torch.tensor([[[0, 1], [1, 0], [-1, -1], [0, 1]]])
    capacity = (None, 2, 3, 2, 3, 1, 2, 0)  # ⌈2/3 · 2 · 4 / 2⌉ = 3 places of two experts
    weights = torch.tensor([[[0.9, 0.1], [0.5, 0.5], [9.0, 9.0], [0.6, 0.4]]])
    few = (None, 1, 2, 1, 2, 1, 2, 0)  # two places
    assert ops.keep_best(experts, weights, *capacity).tolist() == experts.tolist()
    assert ops.keep_best(experts, weights, *few).tolist() == [[[0, -1], [1, -1], [-1, -1], [0, 1]]]
    in_order = [[[0, 1], [1, 0], [-1, -1], [-1, -1]]]
    assert ops.keep_best(experts, None, *few).tolist() == in_order
    assert ops.keep_best(experts, torch.ones(1, 4, 2), *few).tolist() == in_order


def test_a_random_order_is_another_in_each_step_and_none_in_evaluation() -> None:
    plan = moe_plan(ranks=1, ep=1, beside=ORDERED.format("random", "batch"))
    model = reference(plan.spec, seed=1, dtype=torch.float64)
    tokens = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(0))

    def logits(step: int) -> torch.Tensor:
        model.set(step=step)
        with torch.no_grad():
            found: torch.Tensor = model(tokens).logits
        return found

    assert torch.equal(logits(1), logits(1))
    assert not torch.allclose(logits(1), logits(2))
    model.eval()
    assert torch.equal(logits(1), logits(2))


def test_a_layer_by_itself_has_no_numbers_of_tokens_to_draw_from() -> None:
    with pytest.raises(DiagnosticError) as refused:
        compile_source(load_text(layer_text(beside=ORDERED.format("random", "batch"))).unwrap())
    (diagnostic,) = refused.value.diagnostics
    assert (diagnostic.code, "`order = random`" in diagnostic.message) == ("MOE0202", True)
    compile_source(load_text(layer_text(beside=ORDERED.format("priority", "batch"))).unwrap())


def test_an_unknown_order_is_refused() -> None:
    loaded = load_text(moe_text(beside=ORDERED.format("best", "sequence")))
    assert [d.code for d in loaded.diagnostics] == ["MOE0201"]
    assert "priority, random, sequence, token, weight" in loaded.diagnostics[0].help


@pytest.mark.parametrize(
    ("gate", "beside", "codes"),
    [
        ("batch_priority(2)", "", ["MOE0351"]),
        ("batch_priority(2)", "capacity = dynamic()", ["MOE0351"]),
        ("batch_priority(2)", "capacity = factor(4.0)", []),
        ("batch_priority(2)", "capacity = factor(4.0, order = random)", ["MOE0354"]),
        ("batch_priority(2)", "capacity = factor(4.0, order = priority)", []),
        ("batch_priority(9)", "capacity = factor(9.0)", ["MOE0304"]),
        ("topk(2)", "capacity = dynamic(order = priority)", ["MOE0351"]),
        ("topk(2)", "capacity = dynamic(order = token)", ["MOE0351"]),
        ("batch_priority(2)", "capacity = factor(4.0, order = weight)", ["MOE0354"]),
    ],
)
def test_an_order_without_effect_is_warned_of_and_two_orders_are_refused(
    gate: str, beside: str, codes: list[str]
) -> None:
    assert [d.code for d in load_text(moe_text(gate=gate, beside=beside)).diagnostics] == codes


@pytest.mark.parametrize(
    ("gate", "beside", "codes"),
    [
        ("topk(2)", "overflow = reroute", ["MOE0350"]),
        ("topk(2)", "overflow = pad", ["MOE0350"]),
        ("topk(2)", "capacity = dynamic(); overflow = reroute", ["MOE0350"]),
        ("topk(2)", "capacity = dynamic(max = 4.0); overflow = pad", ["MOE0350"]),
        ("topk(2)", "capacity = dynamic(max = 4.0); overflow = reroute", []),
        ("topk(2)", "capacity = factor(4.0); overflow = pad", []),
        ("hash(2)", "capacity = factor(4.0); overflow = reroute", ["MOE0354"]),
        ("topk(2)", "capacity = factor(4.0, order = weight); overflow = reroute", ["MOE0354"]),
        ("topk(2)", "capacity = factor(4.0, order = token); overflow = reroute", ["MOE0354"]),
        ("topk(2, groups = 2, keep_groups = 1)", "capacity = factor(4.0); overflow = reroute", ["MOE0354"]),
        ("topk(2)", "overflow = drop", []),
    ],
)
def test_an_overflow_needs_a_capacity_and_a_reroute_a_next_best_expert(
    gate: str, beside: str, codes: list[str]
) -> None:
    assert [d.code for d in load_text(moe_text(gate=gate, beside=beside, balance="[]")).diagnostics] == codes


def test_a_reroute_keeps_what_drop_keeps_and_gives_a_token_no_expert_twice() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 20, 5, generator=generator) * torch.tensor([1.0, 1.0, 1.0, 3.0, 3.0])
    experts = logits.topk(2)[1]
    for groups in (0, 2, 1):
        room = (1, 1, 1, 1, 1)
        found, scored = ops.reroute(logits, experts, None, None, None, *room, "softmax", groups)
        kept = ops.keep_first(experts, torch.zeros(6, 20), None, *room, 5, groups)
        assert torch.equal(found.where(kept >= 0, -1), kept)
        assert (found >= 0).sum() > (kept >= 0).sum()
        assert torch.equal(scored.where(found >= 0, -1), found)
        chosen = found.flatten(0, 1)
        assert all(len(set(row)) == len(row) for row in ([e for e in each if e >= 0] for each in chosen.tolist()))
        capacity = -(-2 * 20 * (6 // (groups or 6)) // 5)
        for group in found.reshape(groups or 6, -1):
            loads = torch.bincount(group[group >= 0], minlength=5)
            assert loads.max() <= capacity


def test_all_places_are_computed_with_pad_and_not_otherwise() -> None:
    def kinds(overflow: str) -> set[str]:
        plan = moe_plan(ranks=1, ep=1, beside=f"capacity = factor(1.0); overflow = {overflow}")
        return {op.mnemonic for op in plan.program.block(BODY).ops}

    assert {"expert_mlp_padded", "combine_padded"} <= kinds("pad")
    assert "mixture_mlp" in kinds("drop") - kinds("pad")
