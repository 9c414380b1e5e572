"""The gate `noisy_topk`: evaluation draws nothing, and plans with wrong noise are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.plans import BODY, moe_plan, moe_spec
from support.wrong_plans import change_op, change_sums

from moec.codegen.plan import Plan
from moec.runtime.host.reference import reference
from moec.runtime.verify.verification import verify

GATE = {"gate": "noisy_topk(2)"}


def test_evaluation_is_topk_of_the_clean_logits() -> None:
    model = reference(moe_spec(**GATE), seed=1)
    plain = reference(moe_spec(gate="topk(2, order = after)"), seed=1)
    tokens = torch.randint(32, (6, 8), generator=torch.Generator().manual_seed(0))
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if "noise" not in name})
    assert torch.equal(model.eval()(tokens).logits, plain.eval()(tokens).logits)
    assert not torch.equal(model.train()(tokens).logits, plain.train()(tokens).logits)


def another_stream(plan: Plan) -> Plan:
    return change_op(plan, BODY, "noise", stream=2)


def unsummed(plan: Plan) -> Plan:
    return change_sums(plan, "moe.gate.noise.weight", ())


def exchanged(plan: Plan) -> Plan:
    """The clean logits spread the noise."""
    return change_op(plan, BODY, "logits", operands=("spread", "clean", "noise"))


@pytest.mark.parametrize("fault", [another_stream, unsummed, exchanged])
def test_verify_finds_a_plan_with_wrong_noise(fault: Callable[[Plan], Plan]) -> None:
    assert not verify(fault(moe_plan(ep=2, **GATE)), float32=False).ok
