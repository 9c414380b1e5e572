"""Mixtures with experts of several kinds, of mixtures, and of different numbers per layer: plans, faults, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.combinations import diagonals, some
from support.plans import BODY, layer_text, moe_text
from support.verified import require_equal
from support.wrong_plans import change_op

import moec
from moec.codegen.emit import WEIGHTS, emit_function, emit_graph
from moec.codegen.plan import Plan
from moec.grammar import load_text
from moec.grammar.checking.supported import unsupported
from moec.passes.cost.totals import costs_of
from moec.passes.ir import Output
from moec.passes.ir.ops import ExpertMlp, NestedRoute
from moec.passes.ir.work.workload import Workload
from moec.runtime import ops
from moec.runtime.host.reference import layer_reference, reference_program
from moec.runtime.verify.verification import verify

# ---- experts of several kinds and sizes ----------------------------------------------------------------

PARTS = "[4 * swiglu(8, bias = true), 2 * gelu(24), 2 * lora(4, alpha = 8)]"


def in_parts(experts: str = PARTS, **options: object) -> Plan:
    text = moe_text(expert="gelu(3)", **options).replace("8 * gelu(3)", experts)
    return moec.compile(text)


@pytest.mark.parametrize("dtype", some(["fp32", "bf16"], ["bf16"]))
def test_a_plan_of_several_kinds_of_experts_is_right_in_both_dtypes_and_at_toy_widths(dtype: str) -> None:
    plan = in_parts(ep=2, tp=2, dtype=dtype, beside="capacity = factor(1.25, eval = 2.0)")
    require_equal(plan)
    require_equal(plan, scale=True)


def test_a_list_of_equal_parts_gives_the_same_as_one_part() -> None:
    """Eight experts are eight experts, however they are listed."""
    tokens = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(0))
    listed, one = (
        moec.reference(moec.compile(moe_text(expert="gelu(3)", ranks=1, ep=1).replace("8 * gelu(3)", experts)).spec)
        for experts in ("[5 * gelu(9), 3 * gelu(9)]", "8 * gelu(9)")
    )
    theirs = dict(one.named_parameters())
    with torch.no_grad():
        for name, parameter in listed.named_parameters():
            _, _, part = name.partition(".experts.")
            whole = theirs[name.replace(f".experts.{part[0]}", ".experts") if part else name]
            parameter.copy_((whole[:5] if part[0] == "0" else whole[5:]) if part else whole)
    torch.testing.assert_close(listed(tokens, tokens).loss, one(tokens, tokens).loss, rtol=1e-6, atol=0)
    counts, of_one = listed.expert_counts[1], one.expert_counts[1]
    assert torch.equal(counts, of_one)


@pytest.mark.parametrize("ep", some([1, 2], [2]))
def test_the_choices_of_other_experts_are_found(ep: int) -> None:
    report = verify(change_op(in_parts(ep=ep), BODY, "selected.1", first=3))
    assert not report.ok
    assert report.first_difference is not None
    assert report.first_difference.layer == "layers.1"


@pytest.mark.parametrize(("part", "ep"), diagonals([0, 1], [1, 2]))
def test_a_wrong_activation_is_blamed_on_its_part(part: int, ep: int) -> None:
    value, other = ("weighted", "geglu") if part == 0 else ("weighted.1" if ep == 1 else "weighted.2", "silu")
    found = verify(change_op(in_parts(ep=ep), BODY, value, activation=other)).first_difference
    assert found is not None
    assert (found.layer, found.value) == ("layers.1", value)


def test_the_rows_of_a_part_are_its_share_of_all() -> None:
    plan = in_parts("[6 * swiglu(16), 2 * swiglu(16)]", ep=2)
    cost = costs_of(plan.program, Workload.of(plan.spec, plan.program))[BODY]
    ups = [of_op.work.forward.products[0] for op, of_op in cost.costs if isinstance(op, ExpertMlp)]
    tokens, k, ranks = 64, 2, 4
    assert [product.m for product in ups] == [tokens * k / ranks * 6 / 8, tokens * k / ranks * 2 / 8]


def test_a_plan_of_several_kinds_of_experts_is_saved_and_loaded(tmp_path: Path) -> None:
    plan = in_parts(ep=2)
    plan.save(tmp_path / "parts.plan")
    loaded = moec.load(tmp_path / "parts.plan")
    assert loaded.program == plan.program
    assert "layers.1.moe.experts.2.up.weight" in loaded.parameters


def test_the_experts_of_a_layer_are_numbered_through_its_parts() -> None:
    text = layer_text(ranks=1, ep=1, expert="gelu(3)").replace("8 * gelu(3)", PARTS)
    layer = layer_reference(moec.compile(text).spec)
    assert layer.local_experts == range(8)
    layer(torch.randn(3, 4, 16))
    assert layer.expert_counts.shape == (8,)


# ---- mixtures of mixtures ------------------------------------------------------------------------------

INNER = 'layer "inner" {{ moe {{ experts = 3 * {}; gate = topk(2, normalize = true); {} }} }}'


def nested(
    experts: str = "gelu(5)",
    inner: str = "",
    gate: str = "topk(2)",
    balance: str = "[switch_loss(0.1)]",
    **options: Any,
) -> str:
    text = moe_text(expert="gelu(3)", gate=gate, balance=balance, **options)
    return text.replace("8 * gelu(3)", '8 * mixture("inner")') + INNER.format(experts, inner)


@pytest.mark.parametrize("dtype", some(["fp32", "bf16"], ["bf16"]))
def test_mixtures_of_mixtures_are_right_in_both_dtypes_and_at_toy_widths(dtype: str) -> None:
    plan = moec.compile(nested(ep=4, dtype=dtype))
    require_equal(plan)
    require_equal(plan, scale=True)


def test_pairs_that_are_given_get_the_weights_that_the_op_gives() -> None:
    plan = moec.compile(nested(ranks=1, ep=1))
    op = next(op for op in plan.program.block(BODY).ops if isinstance(op, NestedRoute))
    function = emit_function(reference_program(plan.spec), BODY, float64=True)
    assert {type(router) for router in function.routers} == {NestedRoute}
    logits = torch.randn(2, 3, 8 * 4, dtype=torch.float64)
    outer, of_inner = logits[..., :8].softmax(-1), logits[..., 8:].unflatten(-1, (8, 3)).softmax(-1)
    pairs = torch.tensor([[[6, 8, 21, 22]]]).expand(2, 3, 4)  # 2 with 0 and 2, 7 with 0 and 1
    expected = [outer[..., i] * of_inner[..., i, j] / of_inner[..., i, list(both)].sum(-1)
                for i, j, both in ((2, 0, (0, 2)), (2, 2, (0, 2)), (7, 0, (0, 1)), (7, 1, (0, 1)))]  # fmt: skip
    torch.testing.assert_close(WEIGHTS[NestedRoute](op, logits, pairs), torch.stack(expected, -1))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("logit", [0.0, -1e3])
def test_nested_gates_break_ties_and_divide_as_route_does(logit: float, score: str, normalize: bool) -> None:
    """Equal logits go to the lower index; sigmoids that are all 0 divided by their sum make no NaN."""
    how = f"score = {score}, normalize = {str(normalize).lower()}"
    text = moe_text(ranks=1, ep=1, expert="gelu(3)", gate=f"topk(2, {how})", balance="[]")
    text = text.replace("8 * gelu(3)", '8 * mixture("inner")')
    text += f'layer "inner" {{ moe {{ experts = 3 * gelu(5); gate = topk(2, {how}) }} }}'
    program = reference_program(moec.compile(text).spec)
    block = program.block(BODY)
    (op,) = (op for op in block.ops if isinstance(op, NestedRoute))
    outputs = tuple(Output(value.name, "residual") for value in op.results)
    inputs = tuple(block.operands(op))
    alone = replace(block, inputs=inputs, parameters=(), settings=(), states=(), ops=(op,), outputs=outputs)
    graph = emit_graph(program, alone, float64=True)
    logits = torch.full((2, 3, 8 * 4), logit, dtype=torch.float64).requires_grad_()
    probabilities, weights, experts = torch.fx.GraphModule(torch.nn.Module(), graph)(logits, torch.tensor(1))
    assert experts.tolist() == [[[0, 1, 3, 4]] * 3] * 2
    p, w, _ = ops.route(torch.full((2, 3, 8), logit).double(), None, 2, score, "before", normalize)
    _, v, _ = ops.route(torch.full((2, 3, 3), logit).double(), None, 2, score, "before", normalize)
    torch.testing.assert_close(probabilities, p)
    torch.testing.assert_close(weights, (w[..., None] * v[..., None, :]).flatten(-2))
    (gradient,) = torch.autograd.grad(weights.sum() + probabilities.square().sum(), logits)
    assert gradient.isfinite().all()
    repeated = WEIGHTS[NestedRoute](op, logits, experts)
    torch.testing.assert_close(repeated, weights)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"gate": "topk(2, jitter = 0.1)"}, "`jitter` of a gate in a mixture of mixtures"),
        ({"gate": "hash(2)", "balance": "[]"}, "`hash` in a mixture of mixtures"),
        ({"beside": "capacity = factor(1.0)"}, "a capacity of a mixture of mixtures"),
        ({"balance": "[z_loss(0.1)]"}, "`z_loss` of a mixture of mixtures"),
        ({"inner": "capacity = dynamic()"}, "`capacity` of an inner mixture"),
        ({"inner": "balance = [switch_loss(0.1)]"}, "`balance` of an inner mixture"),
        ({"inner": "shared = gelu(4)"}, "`shared` of an inner mixture"),
        ({"experts": "lora(4)"}, "these experts of an inner mixture"),
    ],
)
def test_what_the_flat_form_cannot_express_is_refused(given: dict[str, str], what: str) -> None:
    text = nested(**given)
    found = [one for one in unsupported(load_text(text).unwrap()) if one.code == "MOE0202"]
    assert any(one.message.startswith(f"moec cannot compile {what}") and one.span is not None for one in found), found


@pytest.mark.parametrize("ep", some([1, 2], [2]))
def test_the_inner_experts_of_another_outer_one_are_found(ep: int) -> None:
    plan = moec.compile(nested(ep=ep))
    op = next(op for op in plan.program.block(BODY).ops if isinstance(op, NestedRoute))
    report = verify(change_op(plan, BODY, op.results[2].name, inner_score="sigmoid"))
    assert not report.ok
    assert report.first_difference is not None
    assert report.first_difference.layer == "layers.1"


def test_a_layer_file_of_a_mixture_of_mixtures_is_right_at_toy_widths() -> None:
    text = layer_text(ep=2, dim=64, expert="gelu(3)", balance="[]").replace("8 * gelu(3)", '8 * mixture("inner")')
    plan = moec.compile(text + INNER.format("swiglu(40)", ""))
    require_equal(plan)
    require_equal(plan, scale=True)


def test_a_plan_of_mixtures_of_mixtures_is_saved_and_loaded(tmp_path: Path) -> None:
    plan = moec.compile(nested(ep=2))
    plan.save(tmp_path / "nested.plan")
    loaded = moec.load(tmp_path / "nested.plan")
    assert loaded.program == plan.program
    require_equal(loaded)


# ---- different numbers of experts per layer ------------------------------------------------------------


def test_a_pyramid_of_odd_numbers_kinds_and_sizes_equals_the_unsharded_model() -> None:
    """Rajbhandari et al. 2022, section 4.1: more experts in later layers; here of other kinds too."""
    text = moe_text(depth=5, ep=1, expert="gelu(3)", ranks=6, batch=6, gate="topk(1)", beside="residual = gelu(5)")
    later = """  layers 2 { moe { experts = 9 * swiglu(5) } }
  layers 3 { moe { experts = [3 * lora(2), 12 * swiglu(7)] } }
  layers 4 { moe { experts = 21 * linear } }
}
cluster"""
    degrees = "parallel {\n  layers 2..3 { ep = 3 }\n"
    plan = moec.compile(text.replace("}\ncluster", later, 1).replace("parallel {\n", degrees, 1))
    counts = [plan.parameters[f"layers.{layer}.moe.gate.weight"].shape[0] for layer in range(1, 5)]
    assert counts == [8, 9, 15, 21]
    require_equal(plan)
