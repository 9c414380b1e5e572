"""Balance terms over the loads of experts: their values, and plans that take a rank's loads for the group's."""

from __future__ import annotations

import pytest
import torch
from support.plans import BODY, moe_plan, moe_spec, moe_text
from support.wrong_plans import bypass

import moec
from moec.codegen.plan import Plan
from moec.grammar import load_text
from moec.grammar.diagnostics import DiagnosticError
from moec.passes.ir.ops import AllReduce
from moec.runtime.host.reference import reference
from moec.runtime.verify.verification import verify


def test_even_weights_have_no_variation_and_one_busy_expert_has_the_most() -> None:
    """Of E equal weights CV² is 0; of one weight that is not 0, E − 1."""
    model = reference(moe_spec(gate="topk(8)", balance="[importance_loss(1.0)]", depth=2), seed=1)
    tokens = torch.randint(32, (4, 8))
    router = model.get_parameter("layers.1.moe.gate.weight")
    with torch.no_grad():
        router.zero_()
    assert model(tokens).aux_loss.item() == pytest.approx(0, abs=1e-9)
    spec = moe_spec(gate="topk(1)", experts=5, ep=1, balance="[importance_loss(1.0)]", depth=2)
    model = reference(spec, seed=1)
    with torch.no_grad():
        model.get_parameter("layers.1.moe.gate.weight").zero_()  # ties go to expert 0
    assert model(tokens).aux_loss.item() == pytest.approx(5 - 1, rel=1e-6)


def unreduced(plan: Plan) -> Plan:
    """Each rank takes its own sums for those of the group."""
    block = plan.program.block(BODY)
    sums = [op for op in block.ops if isinstance(op, AllReduce) and op.operands[0].startswith("totals")]
    assert sums
    for op in reversed(sums):
        plan = bypass(plan, BODY, op.results[0].name)
    return plan


@pytest.mark.parametrize(("degrees", "group"), [({"ep": 4}, "batch"), ({"tp": 2, "ep": 2}, "sequence")])
def test_verify_finds_a_rank_that_takes_its_own_loads_for_the_groups(degrees: dict[str, int], group: str) -> None:
    plan = moe_plan(balance="[importance_loss(0.5)]", beside=f"group = {group}", **degrees)
    assert verify(plan, float32=False).ok
    report = verify(unreduced(plan), float32=False)
    assert not report.ok


def test_a_gate_whose_weights_are_constant_is_refused() -> None:
    with pytest.raises(DiagnosticError) as error:
        moe_spec(gate="hash(2)", balance="[importance_loss(0.1)]")
    (found,) = error.value.diagnostics
    assert (found.code, found.message) == ("MOE0325", "`importance_loss` is over the weights of experts")


REFUSED = [
    ("topk(2)", "MOE0325", "`load_loss` is over the noise of experts"),
    ("noisy_topk(8)", "MOE0345", "each token takes all 8"),
]


@pytest.mark.parametrize(("gate", "code", "message"), REFUSED)
def test_loads_without_noise_or_without_a_choice_are_refused(gate: str, code: str, message: str) -> None:
    with pytest.raises(DiagnosticError) as error:
        moe_spec(gate=gate, balance="[load_loss(0.1)]")
    (found,) = error.value.diagnostics
    assert (found.code, found.message) == (code, message)
    assert found.span


@pytest.mark.parametrize("gate", ["expert_choice", "dselect_k(2)"])
def test_first_choices_of_a_gate_that_lists_choices_by_expert_are_refused(gate: str) -> None:
    """The first one listed is expert 0, or none: the term would be 8 times the mean probability of expert 0."""
    found = [one for one in load_text(moe_text(gate=gate, balance="[gshard_loss(0.1)]")).diagnostics if one.span]
    (error,) = [one for one in found if one.code != "MOE0352"]
    assert (error.code, error.message) == ("MOE0325", "`gshard_loss` counts first choices")
    assert [label.message for label in error.labels] == [
        f"`{gate.partition('(')[0]}` lists choices by expert, not best first"
    ]
    assert error.severity == "error"


def test_a_gate_that_has_lost_its_noise_has_finite_gradients() -> None:
    model = reference(moe_spec(gate="noisy_topk(2)", balance="[load_loss(1.0)]"), seed=1)
    with torch.no_grad():
        model.get_parameter("layers.1.moe.gate.noise.weight").mul_(1e6)  # deviations from 0 to 10^5
    tokens, labels = torch.randint(32, (2, 4, 8))
    model(tokens, labels).loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_the_scale_of_terms_depends_on_no_micro_batches() -> None:
    """am#3359: a balance term that is added once for each micro-batch is too large."""
    balance = "[gshard_loss(0.1), importance_loss(0.2), load_loss(0.3)]"
    plan = moe_plan(ranks=1, ep=1, gate="noisy_topk(2)", balance=balance)
    tokens, labels = torch.randint(32, (2, 8, 8), generator=torch.Generator().manual_seed(0))
    found = []
    with moec.launch(plan, device="cpu") as job:
        for microbatches in (1, 2, 4):
            model = job.build(seed=1)
            job.step(model, tokens, labels, microbatches=microbatches)
            found.append({name: p.grad for name, p in model.named_parameters()})
    assert found[0]["layers.1.moe.gate.noise.weight"].norm() > 0
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-6)
