"""The gate `sparsemixer`: what it samples, what it reports, and plans that sample otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.plans import BODY, moe_plan, moe_spec
from support.wrong_plans import change_op

from moec.codegen.plan import Plan
from moec.runtime.errors import JobError
from moec.runtime.host.reference import reference, reference_program
from moec.runtime.verify.cluster.prepared_graphs import Graphs
from moec.runtime.verify.cluster.routes import Routes
from moec.runtime.verify.inputs import global_batch
from moec.runtime.verify.rounding_runs import UnshardedRun
from moec.runtime.verify.verification import verify


def test_first_choices_are_drawn_from_the_softmax_of_candidates() -> None:
    """With `jitter = 1` and positive logits every expert is a candidate: the softmax is of all of them."""
    spec = moe_spec(gate="sparsemixer(2, jitter = 1)", depth=2, batch=512)
    model = reference(spec, seed=1)
    parameters = {name: p.detach().double() for name, p in model.named_parameters()}
    inputs, routes = global_batch(moe_plan(gate="sparsemixer(2, jitter = 1)", depth=2, batch=512), 0), Routes()
    UnshardedRun(Graphs(reference_program(spec), float64=True), parameters, {}, routes, parameters).run(
        inputs.to(torch.float64)
    )
    experts, outside, full = (routes.experts[f"layers.1.{name}"][0] for name in ("e", "outside", "full"))
    assert (experts[..., 0] != experts[..., 1]).all()
    gates = torch.where(outside & 1 == 0, routes.scores["layers.1.e"][0], -torch.inf).softmax(-1)
    drawn = torch.nn.functional.one_hot(experts[..., 0], 8).double()
    tokens = drawn[..., 0].numel()
    assert ((drawn - gates).flatten(0, 1).mean(0).abs() < 4 * 0.5 / tokens**0.5).all()
    best = gates.argmax(-1) == experts[..., 0]
    assert (full[..., 0][best] == 1).all()
    assert 0.2 < full[..., 0][~best].double().mean() < 0.3


def test_evaluation_takes_the_best() -> None:
    model = reference(moe_spec(gate="sparsemixer(2, jitter = 1)"), seed=1)
    tokens = torch.randint(32, (6, 8), generator=torch.Generator().manual_seed(0))
    first, second = model.eval()(tokens).logits, model(tokens).logits
    assert torch.equal(first, second)
    assert not torch.equal(model.train()(tokens).logits, first)


def test_nan_logits_are_reported_with_their_layer() -> None:
    model = reference(moe_spec(gate="sparsemixer(3)"), seed=1)
    with torch.no_grad():
        model.get_parameter("layers.2.moe.gate.weight")[0, 0] = torch.nan
    for training in (True, False):
        with pytest.raises(JobError, match=r"MOE0708.*layer 2"):
            model.train(training)(torch.randint(32, (2, 8)))


def another_stream(plan: Plan) -> Plan:
    return change_op(plan, BODY, "u", stream=2)


def fewer_candidates(plan: Plan) -> Plan:
    return change_op(plan, BODY, "e", jitter=0.01)


def never_full(plan: Plan) -> Plan:
    """Choices that are not full where the first one is."""
    return change_op(plan, BODY, "w", operands=("logits", "e", "outside", "e"))


@pytest.mark.parametrize("fault", [another_stream, fewer_candidates, never_full])
def test_verify_finds_a_plan_that_samples_otherwise(fault: Callable[[Plan], Plan]) -> None:
    plan = moe_plan(ep=2, tp=2, gate="sparsemixer(2, jitter = 0.5)")
    assert not verify(fault(plan), float32=False).ok
