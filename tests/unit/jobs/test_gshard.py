"""The gate `gshard`: how often the second expert is taken, and plans that draw wrongly."""

from __future__ import annotations

import pytest
import torch
from support.plans import BODY, layer_text, moe_plan, moe_spec
from support.wrong_plans import bypass, change_op
from torch import Tensor

from moec.grammar import load_text
from moec.grammar.diagnostics import DiagnosticError
from moec.passes.lower.lower_model import lower
from moec.runtime.host.reference import reference, reference_program
from moec.runtime.verify.cluster.prepared_graphs import Graphs
from moec.runtime.verify.cluster.routes import Routes
from moec.runtime.verify.inputs import global_batch
from moec.runtime.verify.rounding_runs import UnshardedRun
from moec.runtime.verify.unsharded import unsharded
from moec.runtime.verify.verification import verify

GATE = {"gate": "gshard"}


def test_evaluation_takes_both_experts_as_topk_does() -> None:
    model, plain = reference(moe_spec(**GATE), seed=1), reference(moe_spec(), seed=1)
    tokens = torch.randint(32, (6, 8), generator=torch.Generator().manual_seed(0))
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(tokens).logits, plain.eval()(tokens).logits)
    assert not torch.equal(model.train()(tokens).logits, plain.train()(tokens).logits)


def test_the_second_expert_is_taken_with_twice_its_weight() -> None:
    """A router scaled up to make weights far from 1/2: the share of second experts is the mean of min(1, 2·g₂)."""
    spec = moe_spec(depth=2, **GATE)
    model = reference(spec, seed=1)
    with torch.no_grad():
        model.get_parameter("layers.1.moe.gate.weight").mul_(60)
    program = reference_program(spec)
    inputs = global_batch(moe_plan(depth=2, batch=512, **GATE), 0).to(torch.float64)
    routes = Routes()
    parameters = {name: p.detach().double() for name, p in model.named_parameters()}
    UnshardedRun(Graphs(program, float64=True), parameters, {}, routes, parameters).run(inputs)
    (key,) = routes.scores
    best = routes.scores[key][0].softmax(-1).topk(2, -1)[0]
    expected = (2 * best[..., 1] / best.sum(-1)).clamp_max(1)
    taken = (routes.experts["layers.1.e.1"][0][..., 1] >= 0).double()
    assert 0.1 < expected.mean() < 0.9
    assert abs(taken.mean() - expected.mean()) < 3 * 0.5 / taken.numel() ** 0.5
    likely = expected > expected.median()
    assert taken[likely].mean() > taken[~likely].mean() + 0.2


def test_verify_repeats_which_second_experts_are_taken() -> None:
    plan = moe_plan(depth=2, **GATE)
    program, model = reference_program(plan.spec), unsharded(plan.spec, dtype=torch.float64)
    parameters, inputs = {n: p.detach() for n, p in model.named_parameters()}, global_batch(plan, 0).to(torch.float64)

    def run(routes: Routes) -> Tensor:
        made = UnshardedRun(Graphs(program, float64=True), parameters, {}, routes, parameters)
        made.run(inputs)
        return made.result

    recorded = Routes()
    exact = run(recorded)
    repeated = {key: list(of_ranks) for key, of_ranks in recorded.experts.items()}
    assert sorted(repeated) == ["layers.1.e", "layers.1.e.1"]
    torch.testing.assert_close(run(Routes(repeated)), exact, rtol=1e-13, atol=1e-13)
    taken = "layers.1.e.1"
    repeated[taken] = [torch.where(torch.tensor([True, False]), x, -1) for x in repeated[taken]]
    assert not torch.allclose(run(Routes(repeated)), exact)


@pytest.mark.parametrize("fault", ["bypassed", "another stream"])
def test_verify_finds_a_plan_that_draws_otherwise(fault: str) -> None:
    plan = moe_plan(ep=2, tp=2, **GATE)
    wrong = bypass(plan, BODY, "e.1") if fault == "bypassed" else change_op(plan, BODY, "u", stream=2)
    report = verify(wrong, float32=False)
    assert not report.ok
    assert report.first_difference


def test_one_expert_is_too_few() -> None:
    with pytest.raises(DiagnosticError) as error:
        moe_spec(experts=1, ep=1, **GATE)
    (found,) = error.value.diagnostics
    assert (found.code, found.message) == ("MOE0304", "each token wants 2")
    assert found.span


def test_the_file_of_one_layer_is_refused() -> None:
    with pytest.raises(DiagnosticError) as error:
        lower(load_text(layer_text(gate="gshard"), name="ffn.moe").unwrap())
    (found,) = error.value.diagnostics
    assert found.code == "MOE0202"
    assert found.message.startswith("moec cannot compile `gshard` in the file of one `layer`")
    assert found.span
