"""moec verify in the plan's own dtype: right plans pass, and one that rounds where the model does not is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from support.combinations import diagonals
from support.plans import BODY, moe_plan, moe_text
from support.verified import require_equal
from support.wrong_plans import (
    EMITTED,
    Planted,
    change_kind,
    change_ops,
    change_result,
    change_sums,
    op_giving,
    rounded_to_bf16,
)
from torch import Tensor

from moec.codegen.emit.emitter import Emitter
from moec.codegen.plan import Plan
from moec.driver import compile as compile_source
from moec.passes.ir import Op, Value
from moec.passes.ir.ops import LabelLogit, Widen
from moec.runtime.verify.cluster.virtual_weights import VirtualWeights
from moec.runtime.verify.rounding import measure_rounding, smooth
from moec.runtime.verify.verification import verify
from moec.runtime.verify.verify_report import FACTOR, STEP_BOUND

SHARDED = {"ranks": 4, "tp": 2, "ep": 2}


@pytest.mark.parametrize(
    ("options", "dtype"), diagonals([{}, SHARDED, {**SHARDED, "sequence_parallel": False}], ["bf16", "fp32"])
)
def test_a_plan_loses_no_more_in_its_own_dtype_than_the_unsharded_model(options: dict[str, object], dtype: str):
    report = require_equal(moe_plan(dtype=dtype, **options))
    found = report.rounding
    assert found is not None
    assert found.ok
    assert found.dtype == dtype
    assert found.output <= found.bound == (16 if dtype == "fp32" else FACTOR)
    assert found.mean <= found.mean_bound
    assert found.step <= STEP_BOUND
    assert found.gradient == max(found.gradients.values()) <= found.bound
    assert found.gradients.keys() == moe_plan(**options).parameters.keys() | {"confident logits"}
    assert (report.float32 is None) == (dtype == "fp32")


@pytest.mark.parametrize("unkind", [0, 2, 3])
def test_only_a_plan_that_loses_too_much_on_every_draw_is_refused(unkind: int, monkeypatch: pytest.MonkeyPatch):
    seeds: list[Tensor] = []

    def measured(plan, model, batch, **options):
        seeds.append(batch.inputs)
        return replace(measure_rounding(plan, model, batch, **options), ok=len(seeds) > unkind)

    monkeypatch.setattr("moec.runtime.verify.verification.measure_rounding", measured)
    report = verify(moe_plan(dtype="bf16", ranks=1, ep=1), float32=False)
    assert report.ok == (unkind < 3)
    assert len(seeds) == min(unkind + 1, 3)
    assert not any(torch.equal(one, other) for one, other in pairwise(seeds))


@pytest.mark.parametrize("options", [{}, {"beside": "capacity = factor(1.0)"}, {"ranks": 1, "ep": 1}])
def test_every_op_runs_a_smooth_activation(options: dict[str, object]):
    program = moe_plan(expert="relu(16)", ffn="relu(16)", **options).program
    jumps, smoothed = ([op for b in p.blocks for op in b.ops] for p in (program, smooth(program)))
    of_relu = [op for op in jumps if "relu" in op.attributes().values()]
    assert len(of_relu) == 2
    assert [type(op) for op in smoothed if "gelu" in op.attributes().values()] == [type(op) for op in of_relu]
    assert not any("relu" in op.attributes().values() for op in smoothed)
    assert smooth(moe_plan(ffn="silu(16)").program) == moe_plan(ffn="silu(16)").program


# ---- planted faults: float64 sees none of them -----------------------------------------------------


def label_logits_of_narrow_logits(plan: Plan) -> Plan:
    """The loss as it was: the gradients of its two parts are rounded before they are added."""
    right = op_giving(plan, "loss", "label_logit")
    (wide,) = right.results
    narrow = replace(wide, name="picked", dtype="bf16")
    picked = LabelLogit(operands=("logits", *right.operands[1:]), results=(narrow,), span=right.span)
    widened = Widen(operands=("picked",), results=(wide,), span=right.span)
    return _instead(plan, "loss", right, [picked, widened])


def rounded_exponentials(plan: Plan) -> Plan:
    """The sharded loss sums exponentials that were rounded."""
    return change_kind(plan, "loss", "sums", Planted, emitted="sum of rounded exponentials")


def _sum_of_rounded_exponentials(e: Emitter, op: Op) -> None:
    """What `sum_exp` is emitted as, with its exponentials in bf16 and in fp32 again."""
    aten = torch.ops.aten
    logits, largest = e.refs(op)
    below = e.call(op, aten.sub.Tensor, logits, e.call(op, aten.unsqueeze.default, largest, -1))
    rounded = e.call(op, aten.to.dtype, e.call(op, aten.exp.default, below), e.dtype("bf16"))
    e.result(op, aten.sum.dim_IntList, e.call(op, aten.to.dtype, rounded, e.dtype("fp32")), [-1])


EMITTED["sum of rounded exponentials"] = _sum_of_rounded_exponentials


def router_input_rounded_again(plan: Plan) -> Plan:
    """The router's input, which is bf16, rounded to bf16 before the router widens it."""
    router = op_giving(plan, BODY, "logits")
    x, weight = router.operands
    given: Value = plan.program.block(BODY).scope[x]
    rounded = Planted(operands=(x,), results=(replace(given, name="planted"),), emitted="rounded to bf16")
    return _instead(plan, BODY, router, [rounded, replace(router, operands=("planted", weight))])


def _instead(plan: Plan, block: str, right: Op, wrong: list[Op]) -> Plan:
    return change_ops(plan, block, lambda ops: [each for op in ops for each in (wrong if op is right else [op])])


@pytest.mark.parametrize(
    ("plant", "worst"),
    [
        (label_logits_of_narrow_logits, "the gradient of confident logits"),
        (rounded_exponentials, "the gradient of confident logits"),
        (lambda p: rounded_to_bf16(p, "loss", "label_logit.1"), "the gradient of confident logits"),
        (lambda p: rounded_to_bf16(p, BODY, "logits"), "the router logits of layers.1, rounded to bf16"),
        (router_input_rounded_again, None),
        (lambda p: rounded_to_bf16(p, "loss", "wide_logits"), None),
    ],
    ids=["label's logit", "exponentials", "sums", "router logits", "router's input is bf16", "logits are bf16"],
)
def test_what_rounds_where_the_model_does_not_is_refused(plant, worst: str | None):
    report = verify(plant(moe_plan(dtype="bf16", **SHARDED)), float32=False)
    assert report.ok == (worst is None)
    assert report.max_gradient_error < 1e-12
    if worst is not None:
        assert report.worst == worst
        assert not report.rounding.ok


def test_an_operator_that_refuses_the_narrow_dtype_is_named():
    report = verify(change_result(moe_plan(dtype="bf16"), BODY, "logits", dtype="bf16"), float32=False)
    assert not report.ok
    assert (
        report.worst
        == "a pass that stopped, at layers.1.p: moec::route: logits must be float32 or float64, not torch.bfloat16"
    )


def test_gradients_that_many_ranks_sum_in_bf16_are_refused(monkeypatch: pytest.MonkeyPatch):
    summed = VirtualWeights.summed

    def in_bf16(self: VirtualWeights, name: str, of_leaves: list[Tensor]) -> list[Tensor]:
        if of_leaves[0].dtype == torch.float64:
            return summed(self, name, of_leaves)
        gradients = [of_leaves[leaf].bfloat16() for leaf in self._leaf_of_rank[name]]
        for group in self._plan.parameters[name].sum_over:
            for ranks in self._plan.groups[group]:
                total = gradients[ranks[0]]
                for rank in ranks[1:]:
                    total = total + gradients[rank]
                for rank in ranks:
                    gradients[rank] = total
        return gradients

    plan = moe_plan(ranks=64, ep=4, batch=64, dtype="bf16", depth=2)
    require_equal(plan, float32=False)
    monkeypatch.setattr(VirtualWeights, "summed", in_bf16)
    report = verify(plan, float32=False)
    assert not report.ok
    assert report.rounding.mean > report.rounding.mean_bound
    assert report.worst == "the mean over all gradients"


def test_masters_in_bf16_lose_the_step(monkeypatch: pytest.MonkeyPatch):
    from moec.runtime.verify import rounding_errors

    make = rounding_errors.make_optimizer

    class Narrow:
        def __init__(self, *arguments) -> None:
            self.optimizer, self.parameters = make(*arguments), [master.parameter for master in arguments[1]]

        def step(self) -> None:
            self.optimizer.step()
            for p in self.parameters:
                if p.dtype == torch.float32:
                    p.data = p.data.bfloat16().float()

    monkeypatch.setattr(rounding_errors, "make_optimizer", Narrow)
    report = verify(moe_plan(dtype="bf16"), float32=False)
    assert not report.ok
    assert report.rounding.step > STEP_BOUND
    assert report.worst.startswith("the step of ")


# ---- gradients that are zero -----------------------------------------------------------------------


def narrow_model(norm: str, dim: int, dtype: str = "fp32") -> Plan:
    text = moe_text(**{**SHARDED, "ep": 4}, dim=dim, model=f"norm = {norm}", balance="[]", dtype=dtype)
    heads = "mha(heads = 2, head_dim = 2)"
    text = text.replace("mha(heads = 4)", heads)
    return compile_source(text.replace("gqa(heads = 4, kv_heads = 2, rope = rope(theta = 1e4), bias = none)", heads))


@pytest.mark.parametrize(
    ("norm", "dim", "dtype"),
    diagonals(["layer_norm(bias = false)", "layer_norm(bias = true)", "rms"], [1, 2], ["fp32", "bf16"]),
)
def test_a_plan_whose_true_gradients_are_zero_is_right(norm: str, dim: int, dtype: str):
    """A layer norm of one number gives its bias: what is left of gradients before it is rounding."""
    require_equal(narrow_model(norm, dim, dtype), float32=False)


def test_rounding_that_an_epsilon_multiplies_is_no_difference():
    require_equal(narrow_model("layer_norm(bias = true, eps = 1e-12)", 1, "bf16"), float32=False)


def test_a_wrong_plan_of_zero_gradients_is_refused():
    plan = narrow_model("layer_norm(bias = true)", 1)
    assert not verify(change_sums(plan, "norm.bias", ()), float32=False).ok
