"""Gates that choose for whole routing groups: their operators' definitions, wrong plans, and bad words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.plans import BODY, layer_plan, moe_plan, moe_spec, moe_text
from support.verified import require_equal
from support.wrong_plans import bypass, change_op, change_sums, op_giving
from torch import Tensor

import moec
from moec.codegen.plan import Plan
from moec.grammar import load_text
from moec.grammar.diagnostics import DiagnosticError
from moec.passes.ir.ops import AllGatherAlike
from moec.runtime import ops
from moec.runtime.host.reference import reference
from moec.runtime.inputs.forward_checks import counts_own_tokens
from moec.runtime.verify.verification import verify

# ---- expert_choice -----------------------------------------------------------------------------------------


def taken_by_hand(scores: Tensor, real: Tensor, capacity: int) -> Tensor:
    """One group: scores [T, E], real [T] -> [T, E]."""
    chosen = torch.full(scores.shape, -1, dtype=torch.int64)
    for e in range(scores.shape[1]):
        ranked = sorted((t for t in range(len(scores)) if real[t]), key=lambda t, e=e: (-float(scores[t, e]), t))
        chosen[ranked[:capacity], e] = e
    return chosen


@pytest.mark.parametrize("groups", [0, 2, 1])
@pytest.mark.parametrize("padding", [False, True])
def test_each_expert_takes_its_best_real_tokens_and_ties_go_to_the_earlier(groups: int, padding: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 4, (4, 9, 3), generator=generator).double()  # many ties
    real = torch.randint(0, 3, (4, 9), generator=generator).clamp_max(1) if padding else torch.ones(4, 9).long()
    found = ops.choose_tokens(scores, real if padding else None, 5, 4, groups)
    tokens = 9 * 4 // (groups or 4)
    capacity = -(-5 * tokens // 12)
    for each, of_group, are_real in zip(
        found.view(-1, tokens, 3), scores.view(-1, tokens, 3), real.view(-1, tokens), strict=True
    ):
        assert torch.equal(each, taken_by_hand(of_group, are_real, capacity))


@pytest.mark.parametrize("kind", ["ties", "all equal", "no ties"])
def test_of_many_tokens_each_expert_takes_its_best(kind: str) -> None:
    """A place for every 24th token: these are searched for in parts."""
    scores = torch.randn(1, 96, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores = {"ties": scores.round(), "all equal": scores * 0, "no ties": scores}[kind]
    found = ops.choose_tokens(scores, None, 1, 8, 0)
    assert torch.equal(found[0], taken_by_hand(scores[0], torch.ones(96), 4))


def test_no_expert_takes_more_tokens_than_there_are() -> None:
    assert torch.equal(ops.choose_tokens(torch.rand(1, 3, 2), None, 9, 1, 0), torch.tensor([[[0, 1]] * 3]))
    assert ops.choose_tokens(torch.rand(0, 3, 2), None, 9, 1, 0).shape == (0, 3, 2)


EXPERT_CHOICE = {"gate": "expert_choice(1.5)", "balance": "[]"}
FAULTS: dict[str, Callable[[Plan], Plan]] = {
    "more tokens": lambda p: change_op(p, BODY, "e", parts=2, whole=1),
    "another group": lambda p: change_op(p, BODY, "e", group="batch"),
    "choices by logits": lambda p: change_op(p, BODY, "e", operands=("logits",)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_plan_whose_experts_choose_otherwise_is_refused(fault: str) -> None:
    plan = moe_plan(ep=2, ranks=2, experts=4, **EXPERT_CHOICE)
    assert not verify(FAULTS[fault](plan), float32=False).ok


def test_a_choice_among_a_part_of_the_group_is_refused() -> None:
    plan = moe_plan(ranks=4, tp=2, ep=2, experts=4, **EXPERT_CHOICE)
    block = plan.program.block(BODY)
    (gathered,) = op_giving(plan, BODY, "e").operands
    assert isinstance(op_giving(plan, BODY, gathered), AllGatherAlike)
    assert str(block.scope[gathered].layout) == "dp:shard(0)"
    assert not verify(bypass(plan, BODY, gathered), float32=False).ok


def test_no_room_is_made_for_the_choices_that_are_none() -> None:
    kinds = {op.mnemonic for op in moe_plan(ranks=1, ep=1, **EXPERT_CHOICE).program.block(BODY).ops}
    assert "mixture_mlp" not in kinds
    assert {"permute", "expert_mlp"} <= kinds


@pytest.mark.parametrize(
    ("beside", "codes"),
    [
        ("", ["MOE0352"]),
        ("group = batch", ["MOE0352"]),
        ("capacity = factor(1.0)", ["MOE0352", "MOE0354"]),
        ("capacity = dynamic()", ["MOE0352", "MOE0354"]),
        ("overflow = pad", ["MOE0352", "MOE0354"]),
    ],
)
def test_a_gate_that_decides_rows_has_no_capacity_and_leaks(beside: str, codes: list[str]) -> None:
    found = load_text(moe_text(gate="expert_choice", balance="[]", beside=beside)).diagnostics
    assert sorted(d.code for d in found) == codes


def test_each_option_that_a_gate_decides_is_refused_once() -> None:
    beside = "capacity = factor(0.5, eval = 0.1, min = 9, order = random); overflow = reroute"
    for gate in ("base", "expert_choice", "soft", "smear"):
        found = load_text(moe_text(gate=gate, balance="[]", beside=beside)).diagnostics
        errors = [d for d in found if d.severity == "error"]
        assert [d.code for d in errors] == ["MOE0354"] * 2
        assert len({d.span for d in errors}) == 2
        assert [d.code for d in found if d not in errors] == ["MOE0352"]


def test_a_model_that_is_not_causal_is_not_warned() -> None:
    text = moe_text(gate="expert_choice", balance="[]", attention="mha(heads = 4, causal = false)").replace(
        "mha(heads = 4);", "mha(heads = 4, causal = false);"
    )
    assert not load_text(text).diagnostics


@pytest.mark.parametrize("gate", ["expert_choice(0)", "expert_choice(-1.0)", 'expert_choice("2")'])
def test_a_factor_that_is_no_positive_number_is_refused(gate: str) -> None:
    assert load_text(moe_text(gate=gate)).diagnostics


# ---- base ------------------------------------------------------------------------------------------------------


def best_sum(scores: Tensor) -> float:
    """The largest sum of a balanced assignment, by dynamic programming over the experts' loads."""
    tokens, num_experts = scores.shape
    least, most = tokens // num_experts, -(-tokens // num_experts)
    best = {(0,) * num_experts: 0.0}
    for row in scores.tolist():
        following: dict[tuple[int, ...], float] = {}
        for loads, total in best.items():
            for e in (e for e in range(num_experts) if loads[e] < most):
                after = (*loads[:e], loads[e] + 1, *loads[e + 1 :])
                following[after] = max(total + row[e], following.get(after, -float("inf")))
        best = following
    return max(total for loads, total in best.items() if min(loads) >= least)


@pytest.mark.parametrize("ties", [False, True])
def test_a_matching_is_balanced_and_has_the_largest_sum(ties: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        tokens, experts = (int(torch.randint(1, most, (), generator=generator)) for most in (15, 5))
        scores = torch.randn(1, tokens, experts, generator=generator, dtype=torch.float64)
        scores += 2 * torch.randn(experts, generator=generator)
        scores = scores.round() if ties else scores
        chosen = ops.balanced_assignment(scores, torch.tensor(1), None, 0)
        loads = torch.bincount(chosen.flatten(), minlength=experts)
        assert loads.min() >= tokens // experts
        assert loads.max() <= -(-tokens // experts)
        assert float(scores.gather(2, chosen).sum()) == pytest.approx(best_sum(scores[0]), abs=1e-9)


def test_equal_scores_and_one_wish_of_all_are_matched_too() -> None:
    for scores in (torch.zeros(2, 9, 4), torch.tensor([9.0, 0, 0, 0]).expand(2, 9, 4)):
        chosen = ops.balanced_assignment(scores, torch.tensor(1), None, 1).flatten()
        assert sorted(torch.bincount(chosen, minlength=4).tolist()) == [4, 4, 5, 5]


def test_scores_that_are_no_numbers_or_far_apart_end_and_padding_is_not_matched() -> None:
    real, generator = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 1]]), torch.Generator().manual_seed(0)
    for largest in (1.0, 1e8, 1e30):
        for _ in range(20):
            scores = torch.randn(1, 8, 4, generator=generator)
            scores[0, 0], scores[0, 1], scores[0, 2, 1], scores[0, 3] = torch.nan, torch.inf, -torch.inf, largest
            chosen = ops.balanced_assignment(scores, torch.tensor(1), real, 0).flatten()
            assert (chosen < 0).tolist() == (real == 0).flatten().tolist()
            assert sorted(torch.bincount(chosen[chosen >= 0], minlength=4).tolist()) == [1, 1, 2, 2]
    none = ops.balanced_assignment(scores, torch.tensor(1), torch.zeros_like(real), 0)
    assert bool((none == -1).all())


def test_evaluation_takes_the_best_expert() -> None:
    scores = torch.randn(2, 7, 5)
    assert torch.equal(ops.balanced_assignment(scores, torch.tensor(0), None, 0)[..., 0], scores.argmax(-1))


@pytest.mark.parametrize("group", ["rank", "batch"])
def test_a_plan_that_matches_another_group_is_refused(group: str) -> None:
    plan = moe_plan(ep=2, ranks=2, experts=4, gate="base", balance="[]")
    assert not verify(change_op(plan, BODY, "e", group=group), float32=False).ok


def test_base_warns_of_training_alone_and_has_no_capacity() -> None:
    (found,) = load_text(moe_text(gate="base", balance="[]")).diagnostics
    assert (found.code, "evaluation" in found.message) == ("MOE0352", False)
    codes = {d.code for d in load_text(moe_text(gate="base", beside="capacity = factor(1.0)")).diagnostics}
    assert "MOE0354" in codes


# ---- soft ------------------------------------------------------------------------------------------------------

SOFT = {"gate": "soft(2)", "balance": "[]"}


def test_padding_has_no_part_in_a_slot_and_gets_nothing() -> None:
    spec = moe_spec(ranks=1, ep=1, model="embedding = tokens(padding = 3)", **SOFT)
    model = reference(spec, seed=0, dtype=torch.float64)
    tokens = torch.randint(4, 32, (2, 8), generator=torch.Generator().manual_seed(0))
    alone = model(tokens[:, :5]).logits
    tokens[:, 5:] = 3
    torch.testing.assert_close(model(tokens).logits[:, :5], alone, rtol=1e-12, atol=1e-12)
    padding = torch.full((2, 8), 3)
    padding[0] = tokens[0]
    output = model(padding, padding)
    output.loss.backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


SOFT_FAULTS: dict[str, Callable[[Plan], Plan]] = {
    "weights of the other kind": lambda p: change_op(p, BODY, "combine.1", operands=("dispatch",)),
    "means of a part of the tokens": lambda p: bypass(p, BODY, "inputs.1"),
    "the softmax of a part": lambda p: bypass(p, BODY, op_giving(p, BODY, "dispatch").operands[0]),
    "slots of other experts": lambda p: bypass(p, BODY, "rows.1"),
}


def test_a_plan_with_other_slots_is_refused() -> None:
    plan = moe_plan(ranks=4, tp=2, ep=2, **SOFT)
    require_equal(plan)
    for fault, planted in SOFT_FAULTS.items():
        assert not verify(planted(plan), float32=False).ok, fault


def test_every_expert_has_a_row_of_each_slot_and_sequence() -> None:
    model = reference(moe_spec(ranks=1, ep=1, **SOFT), seed=0)
    with torch.no_grad():
        model(torch.randint(32, (3, 8)))
    assert {tuple(counts.flatten().tolist()) for counts in model.expert_counts.values()} == {(6,) * 8}


@pytest.mark.parametrize(
    ("beside", "balance", "codes"),
    [
        ("", "[]", {"MOE0352"}),
        ("group = batch", "[]", {"MOE0352", "MOE0354"}),
        ("group = rank", "[]", {"MOE0352", "MOE0354"}),
        ("capacity = factor(1.0)", "[]", {"MOE0352", "MOE0354"}),
        ("", "[switch_loss(0.1)]", {"MOE0325", "MOE0352"}),
        ("", "[z_loss(0.1)]", {"MOE0325", "MOE0352"}),
    ],
)
def test_soft_has_no_capacity_no_balance_terms_and_no_other_group(beside: str, balance: str, codes: set[str]) -> None:
    found = load_text(moe_text(gate="soft(2)", balance=balance, beside=beside)).diagnostics
    assert {d.code for d in found} == codes


def test_slots_that_tp_does_not_divide_are_refused() -> None:
    with pytest.raises(DiagnosticError) as refused:
        moe_plan(ranks=4, tp=2, ep=2, gate="soft(3)", balance="[]")
    assert [d.code for d in refused.value.diagnostics] == ["MOE0318"]
    assert "3 slots" in refused.value.diagnostics[0].labels[0].message


# ---- smear -----------------------------------------------------------------------------------------------------

SMEAR = {"gate": "smear", "balance": "[]"}
SMEAR_FAULTS: dict[str, Callable[[Plan], Plan]] = {
    "the mean of a part of the tokens": lambda p: bypass(p, BODY, op_giving(p, BODY, "shares").operands[0]),
    "one merged matrix for both": lambda p: change_op(p, BODY, "mixed", operands=("active", "merged.2")),
    "gradients of experts summed over tp": lambda p: change_sums(p, "experts.up.weight", ("dp", "tp")),
    "gradients of experts not summed": lambda p: change_sums(p, "experts.down.weight", ()),
}


def test_a_plan_with_other_merged_experts_is_refused() -> None:
    plan = moe_plan(ranks=4, tp=2, ep=2, expert="gelu(16)", dim=16, **SMEAR)
    require_equal(plan)
    for fault, planted in SMEAR_FAULTS.items():
        assert not verify(planted(plan), float32=False).ok, fault


def test_a_sequence_of_padding_has_finite_gradients_and_padding_changes_no_merged_expert() -> None:
    model = reference(moe_spec(ranks=1, ep=1, model="embedding = tokens(padding = 3)", **SMEAR), dtype=torch.float64)
    tokens = torch.randint(4, 32, (2, 8), generator=torch.Generator().manual_seed(0))
    alone = model(tokens[:, :5]).logits
    tokens[:, 5:] = 3
    torch.testing.assert_close(model(tokens).logits[:, :5], alone, rtol=1e-12, atol=1e-12)
    tokens[1] = 3
    model(tokens, tokens).loss.backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_every_rank_has_all_merged_experts_and_zero_cuts_them() -> None:
    def layout(zero: int) -> str:
        plan = moe_plan(ranks=4, ep=4, zero=zero, **SMEAR)
        return str(plan.parameters["layers.1.moe.experts.up.weight"].weight)

    assert layout(0) == "replicate"
    assert layout(3) == "dp:shard(0)"


def test_merged_experts_have_no_rows() -> None:
    with moec.launch(moe_plan(ranks=1, ep=1, **SMEAR), device="cpu") as job:
        model = job.build()
        tokens = torch.randint(32, (8, 8))
        job.step(model, tokens, tokens)
        assert model.expert_counts == {}
        assert job.expert_loads(model) == {}


@pytest.mark.parametrize("gate", ["soft(2)", "expert_choice(2)", "base"])
def test_these_gates_work_in_the_file_of_one_layer(gate: str) -> None:
    plan = layer_plan(gate=gate, balance="[]", ep=2)
    require_equal(plan)


def test_merged_experts_in_the_file_of_one_layer_are_refused() -> None:
    with pytest.raises(DiagnosticError) as refused:
        layer_plan(balance="[]", gate="smear")
    assert [d.code for d in refused.value.diagnostics] == ["MOE0202"]


@pytest.mark.parametrize("group", ["batch", "rank"])
def test_smear_has_no_other_group(group: str) -> None:
    found = load_text(moe_text(beside=f"group = {group}", **SMEAR)).diagnostics
    assert {d.code for d in found} == {"MOE0352", "MOE0354"}


@pytest.mark.parametrize(
    ("gate", "beside", "alike"),
    [
        ("soft(2)", "", True),
        ("smear", "", False),
        ("base", "", False),
        ("base", "group = batch", True),
        ("expert_choice", "group = batch", True),
        ("expert_choice", "group = rank", False),
        ("topk(2)", "capacity = factor(1.0, order = priority)", True),
    ],
)
def test_ranks_must_have_batches_of_one_shape_where_places_or_a_gather_follow_from_it(
    gate: str, beside: str, alike: bool
) -> None:
    assert counts_own_tokens(moe_plan(gate=gate, beside=beside, balance="[]").program) == alike
