"""An op that chooses by scores declares them: then its choices can be repeated, and NaN scores are reported."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from support.plans import moe_plan
from torch import Tensor

import moec
from moec.codegen.emit import WEIGHTS
from moec.codegen.emit.emitter import Emitter
from moec.codegen.emit.functions import EMISSIONS
from moec.passes.ir import Meshes, Op, Placing, Program, Value
from moec.passes.ir.op import Type, operand_names
from moec.passes.ir.ops.gating.gate_ops import Route
from moec.passes.ir.ops.token_layouts import Blocks, own_tokens
from moec.runtime import ops
from moec.runtime.errors import JobError
from moec.runtime.host.reference import reference_program
from moec.runtime.verify.cluster.prepared_graphs import Graphs
from moec.runtime.verify.cluster.routes import Routes
from moec.runtime.verify.inputs import global_batch
from moec.runtime.verify.rounding_runs import UnshardedRun
from moec.runtime.verify.unsharded import unsharded

MODES = list(itertools.product(("softmax", "sigmoid"), ("before", "after"), (False, True)))
every_mode = pytest.mark.parametrize(("score", "order", "normalize"), MODES)
EXPERTS, K = 8, 2


def test_an_op_with_scores_has_weights_of_given_choices():
    scored = {kind for kind in Op.registry.values() if kind.scores}
    weighing = {kind for kind in scored if "weights" in kind.gives.split()}
    assert weighing == WEIGHTS.keys()
    assert Route in scored
    for kind in scored:
        required, _ = operand_names(kind)
        assert kind.scores in required
        assert "experts" in kind.gives.split()


def route(score: str, order: str, normalize: bool, scale: float = 1.0) -> Route:
    how = {"score": score, "order": order, "normalize": normalize, "scale": scale}
    return Route(operands=("logits",), k=K, **how)  # type: ignore[arg-type]


@every_mode
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_its_own_choices_get_the_weights_and_gradients_that_route_gives(
    score: str, order: str, normalize: bool, scale: float
):
    logits, grad = torch.randn(3, 5, EXPERTS, dtype=torch.float64, requires_grad=True), torch.randn(3, 5, K)
    _, weights, experts = ops.route(logits, None, K, score, order, normalize, scale)
    (expected,) = torch.autograd.grad(weights, logits, grad.double())
    repeated = WEIGHTS[Route](route(score, order, normalize, scale), logits, experts)
    (found,) = torch.autograd.grad(repeated, logits, grad.double())
    torch.testing.assert_close(repeated, weights, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@every_mode
def test_other_choices_get_the_weights_of_the_definition(score: str, order: str, normalize: bool):
    logits = torch.randn(1, 1, EXPERTS, dtype=torch.float64)
    (found,) = WEIGHTS[Route](route(score, order, normalize), logits, torch.tensor([[[6, 1]]])).flatten(0, 1)
    whole = logits.flatten()
    scored = {"softmax": lambda x: x.exp() / x.exp().sum(), "sigmoid": lambda x: 1 / (1 + (-x).exp())}[score]
    kept = scored(whole[[6, 1]]) if order == "after" else scored(whole)[[6, 1]]
    torch.testing.assert_close(found, kept / kept.sum() if normalize else kept, rtol=1e-12, atol=1e-14)


# ---- a gate of another op ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRoute(Op):
    """`topk(2, normalize = true)` as a composition: the softmax of all logits, its largest parts over their sum."""

    mnemonic: ClassVar[str] = "other_route"
    takes: ClassVar[str] = "numbers"
    gives: ClassVar[str] = "probabilities weights experts"
    scores: ClassVar[str] = "numbers"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        return tuple(Type(shape=v.shape, dtype=v.dtype) for v in self.results)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 1, meshes)


def _other_route(e: Emitter, op: Op) -> None:
    aten = torch.ops.aten
    probabilities = e.call(op, aten.softmax.int, e.note_scores(op, *e.refs(op)), -1)
    found = e.call(op, aten.topk.default, probabilities, K)
    largest, experts = (e.item(op, found, index) for index in range(2))
    weights = e.call(op, aten.div.Tensor, largest, e.call(op, aten.sum.dim_IntList, largest, [-1], True))
    e.set_results(op, probabilities, weights, experts)


def _other_weights(op: Op, numbers: Tensor, experts: Tensor) -> Tensor:
    kept = numbers.softmax(-1).gather(-1, experts)
    return kept / kept.sum(-1, keepdim=True)


@pytest.fixture
def another_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EMISSIONS, OtherRoute, _other_route)
    monkeypatch.setitem(WEIGHTS, OtherRoute, _other_weights)


def with_other_routes(program: Program) -> Program:
    def other(op: Op) -> Op:
        given = {"operands": op.operands, "results": op.results, "span": op.span}
        return OtherRoute(**given) if isinstance(op, Route) else op  # type: ignore[arg-type]

    return replace(program, blocks=tuple(replace(b, ops=tuple(map(other, b.ops))) for b in program.blocks))


@pytest.mark.usefixtures("another_gate")
def test_choices_of_another_op_are_repeated(monkeypatch: pytest.MonkeyPatch):
    plan = moe_plan(depth=2)
    program, model = reference_program(plan.spec), unsharded(plan.spec, dtype=torch.float64)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    inputs = global_batch(plan, 0).to(torch.float64)

    def run(program: Program, routes: Routes) -> UnshardedRun:
        made = UnshardedRun(Graphs(program, float64=True), parameters, {}, routes, parameters)
        made.run(inputs)
        return made

    chosen = run(program, Routes()).routes.experts
    assert chosen
    others = {path: [(experts + 1) % EXPERTS] for path, (experts,) in chosen.items()}
    expected, found = (run(p, Routes(others)) for p in (program, with_other_routes(program)))
    assert all(torch.equal(found.routes.experts[path][0], experts) for path, (experts,) in others.items())
    own = run(with_other_routes(program), Routes())
    assert all(torch.equal(own.routes.experts[path][0], experts) for path, (experts,) in chosen.items())
    torch.testing.assert_close(found.result, expected.result, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(found.result, own.result, rtol=1e-3)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-9, atol=1e-12, msg=name)
    monkeypatch.setitem(WEIGHTS, OtherRoute, lambda *given: 0 * _other_weights(*given))
    unweighted = run(with_other_routes(program), Routes(others)).gradients
    experts = [gradient for name, gradient in unweighted.items() if "moe.experts" in name]
    assert experts
    assert not any(gradient.any() for gradient in experts)


@pytest.mark.usefixtures("another_gate")
def test_nan_scores_of_another_op_are_reported():
    plan = moe_plan(ranks=1, ep=1, batch=2)
    tokens = torch.arange(16).reshape(2, 8)
    with moec.launch(replace(plan, program=with_other_routes(plan.program)), device="cpu") as job:
        model = job.build(seed=1)
        assert job.step(model, tokens, tokens).isfinite()
        model.get_parameter("layers.2.moe.gate.weight").data[3] = torch.nan
        message = r"MOE0708.*: the router logits of layer 2 \(tiny.moe:11\) are NaN or infinite for 16 of 16 tokens"
        with pytest.raises(JobError, match=message):
            job.step(model, tokens, tokens)
