"""What each kind of expert says in Programs, and faults in it that `moec verify` finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from faults import change_op, change_sums, op_giving
from models import layer_plan, layer_text, moe_plan, moe_spec, moe_text

import moec
from moec.codegen.emit import WEIGHTS, emit_function
from moec.codegen.kernels.of_plan import kernel_sources
from moec.codegen.plan import Plan
from moec.grammar import load_text
from moec.grammar.supported import unsupported
from moec.passes.cost.totals import costs_of
from moec.passes.cost.workload import Workload
from moec.passes.ir.ir_error import IrError
from moec.passes.ir.ops import ExpertMlp, NestedRoute, Scale
from moec.passes.ir.parse import parse_program
from moec.passes.ir.text import print_program
from moec.passes.ir.verifier import check_program
from moec.runtime.job.reference import layer_reference, reference, reference_program
from moec.runtime.verify.verification import verify

BODY = "layers[1..2]"
DEVICE = 'device "toy" { kind = cuda; memory = 80GB; bandwidth = 1TB/s; peak { fp32 = 1TFLOPS } }\n'

# ---- clamp and alpha -----------------------------------------------------------------------------------


def bounded(**options: object) -> Plan:
    """A clamp inside of what the small initial weights give."""
    return moe_plan(expert="swiglu(16, clamp = 0.01, alpha = 1.7)", ffn="swiglu(8, alpha = 1.5)", **options)


@pytest.mark.parametrize(("ep", "dtype"), [(1, "bf16"), (2, "fp32")])
def test_rounding_at_a_clamp_is_not_taken_for_a_fault(ep: int, dtype: str) -> None:
    report = verify(bounded(ep=ep, dtype=dtype))
    assert report.ok, report
    assert report.rounding is not None
    assert report.rounding.ok


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("forgotten", ["clamp", "alpha"])
def test_a_forgotten_clamp_or_alpha_is_found(forgotten: str, ep: int) -> None:
    value = "mixed" if ep == 1 else "weighted"
    found = verify(change_op(bounded(ep=ep), BODY, value, **{forgotten: None})).first_difference
    assert found is not None
    assert (found.layer, found.value, found.span) == ("layers.1", value, "tiny.moe:10")


def test_the_text_of_a_program_says_clamp_and_alpha() -> None:
    plan = bounded(ep=2)
    text = print_program(plan.program)
    assert "activation = swiglu, clamp = 0.01, alpha = 1.7" in text
    assert parse_program(text) == plan.program
    assert "kind = swiglu, alpha = 1.5" in text


@pytest.mark.parametrize(
    ("old", "new"), [("clamp = 0.01", "clamp = 0.0"), ("clamp = 0.01", "clamp = -1.0"), ("clamp = 0.01", "clamp = x")]
)
def test_a_clamp_that_is_not_positive_is_refused(old: str, new: str) -> None:
    text = print_program(bounded().program)
    with pytest.raises(IrError, match="clamp"):
        parse_program(text.replace(old, new, 1))


def test_an_activation_without_parameters_takes_none() -> None:
    plan = moe_plan(expert="geglu(16)")
    text = print_program(plan.program).replace("activation = geglu", "activation = geglu, alpha = 1.5")
    with pytest.raises(Exception, match="geglu has no alpha"):
        check_program(parse_program(text))


def test_kernels_hold_clamp_and_alpha_as_constants() -> None:
    text = moe_text(expert="swiglu(16, clamp = 0.01, alpha = 1.7)", ffn="swiglu(8, clamp = 3)", ranks=1, ep=1)
    sources = kernel_sources(moec.compile(text.replace("device = cpu", "device = toy") + DEVICE))
    both = [source for name, source in sources.items() if "clamp0p01_alpha1p7" in name]
    assert len(both) == 2  # up and down
    assert all("tl.sigmoid(1.7 * x)" in source and "0.01" in source for source in both)
    assert any("gated" in name and "clamp3p0" in name for name in sources)


def test_the_op_of_experts_has_the_words_numbers() -> None:
    op = op_giving(bounded(ep=2), BODY, "weighted")
    assert (op.attributes()["clamp"], op.attributes()["alpha"]) == (0.01, 1.7)


# ---- linear --------------------------------------------------------------------------------------------


def linear(beside: str = "", **options: object) -> Plan:
    return moe_plan(expert="linear(bias = true)", beside=beside, **options)


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("beside", ["", "capacity = factor(1.25)"])
def test_a_forgotten_bias_of_linear_experts_is_found(beside: str, ep: int) -> None:
    plan = linear(beside, ep=ep)
    op = op_giving(plan, BODY, "y")
    without = {name: operand for name, operand in op.named(op.operands).items() if name != "bias"}
    found = verify(change_op(plan, BODY, "y", **op.taking(without))).first_difference
    assert found is not None
    assert (found.layer, found.value, found.span) == ("layers.1", "y", "tiny.moe:10")


def test_a_gradient_of_linear_experts_that_is_not_summed_is_found() -> None:
    found = verify(change_sums(linear(ep=2), "experts.weight", ())).first_difference
    assert found is not None
    assert (found.layer, found.value) == ("layers.1", "@moe.experts.weight")


def test_linear_experts_of_a_layer_file_equal_the_unsharded_ones_in_both_dtypes() -> None:
    for dtype in ("fp32", "bf16"):
        report = verify(layer_plan(expert="linear(bias = true)", ep=2, dtype=dtype, beside="shared = linear"))
        assert report.ok, report


def test_the_kernels_of_linear_experts_are_those_of_their_rows() -> None:
    text = moe_text(expert="linear", ffn="gelu(8)", ranks=1, ep=1)
    sources = kernel_sources(moec.compile(text.replace("device = cpu", "device = toy") + DEVICE))
    assert sorted({name.split("_")[0] for name in sources}) == ["places", "queues", "route"]


# ---- lora ----------------------------------------------------------------------------------------------


def test_a_layer_of_low_rank_experts_gives_zeros_at_the_start_and_learns() -> None:
    spec = moe_spec(expert="lora(2, alpha = 8)", ranks=1, ep=1)
    model = moec.reference(spec)
    parameters = dict(model.named_parameters())
    assert not parameters["layers.1.moe.experts.up.weight"].any()
    tokens = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(0))
    model(tokens, tokens).loss.backward()
    assert parameters["layers.1.moe.experts.up.weight"].grad.abs().max() > 0


def test_both_matrices_of_a_low_rank_expert_decay_and_lie_with_their_experts() -> None:
    program = moe_plan(expert="lora(2)", ep=2).program
    down, up = (p for p in program.block(BODY).parameters if ".experts." in p.name)
    assert (down.name, down.shape, up.name, up.shape) == (
        "moe.experts.down.weight",
        (8, 1, 2, 16),
        "moe.experts.up.weight",
        (8, 16, 2),
    )
    assert (up.decays, down.decays, up.layout) == (True, True, down.layout)


@pytest.mark.parametrize("expert", ["lora(3, alpha = 6)", "linear(bias = true)"])
def test_experts_without_a_hidden_width_are_right_at_toy_widths(expert: str) -> None:
    report = verify(moe_plan(expert=expert, dim=64, ep=2, beside=f"shared = {expert}"), scale=True)
    assert report.ok, report


@pytest.mark.parametrize("ep", [1, 2])
def test_another_factor_of_low_rank_experts_is_found(ep: int) -> None:
    plan = moe_plan(expert="lora(2, alpha = 8)", ep=ep)
    (op,) = (op for op in plan.program.block(BODY).ops if isinstance(op, Scale))
    # At the start the results are zeros, and so is every difference: only gradients show it.
    report = verify(change_op(plan, BODY, op.results[0].name, factor=8.0))
    assert not report.ok


# ---- experts of several kinds and sizes ----------------------------------------------------------------

PARTS = "[4 * swiglu(8, bias = true), 2 * gelu(24), 2 * lora(4, alpha = 8)]"


def in_parts(experts: str = PARTS, **options: object) -> Plan:
    text = moe_text(expert="gelu(3)", **options).replace("8 * gelu(3)", experts)
    return moec.compile(text)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_plan_of_several_kinds_of_experts_is_right_in_both_dtypes_and_at_toy_widths(dtype: str) -> None:
    plan = in_parts(ep=2, tp=2, dtype=dtype, beside="capacity = factor(1.25, eval = 2.0)")
    for report in (verify(plan), verify(plan, scale=True)):
        assert report.ok, report


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


@pytest.mark.parametrize("ep", [1, 2])
def test_the_choices_of_other_experts_are_found(ep: int) -> None:
    report = verify(change_op(in_parts(ep=ep), BODY, "selected.1", first=3))
    assert not report.ok
    assert report.first_difference is not None
    assert report.first_difference.layer == "layers.1"


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("part", [0, 1])
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


# ---- conv ----------------------------------------------------------------------------------------------


def test_a_window_ends_at_the_text_and_leaves_out_padding_and_later_tokens() -> None:
    """With a separator and a padding id, a token's logits are those that it has without the rest of the sequence."""
    text = moe_text(
        expert="conv(4)", ffn="conv(3)", ranks=1, ep=1, model="embedding = tokens(padding = 0, separator = 5)"
    )
    model = reference(moec.compile(text).spec, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, dtype=torch.float64)
    one, other = torch.tensor([[7, 8, 5, 9, 10, 11, 0, 0]]), torch.tensor([[3, 6, 5, 9, 10, 11, 12, 13]])
    torch.testing.assert_close(model(one).logits[:, 3:6], model(other).logits[:, 3:6])
    alone = torch.tensor([[9, 10, 11, 0, 0, 0, 0, 0]])
    torch.testing.assert_close(model(one).logits[:, 3:6], model(alone).logits[:, :3])
    earlier = torch.tensor([[7, 8, 5, 9, 12, 11, 0, 0]])
    assert not torch.allclose(model(one).logits[:, 5], model(earlier).logits[:, 5])


@pytest.mark.parametrize("update", [{"before": 1, "after": 1}, {"before": 0, "after": 2}])
def test_another_window_is_found(update: dict[str, int]) -> None:
    plan = moe_plan(expert="conv(4, kernel = 2)", ep=2, tp=2)
    found = verify(change_op(plan, BODY, "window", **update)).first_difference
    assert found is not None
    assert (found.layer, found.value) == ("layers.1", "window")


def test_windows_are_of_whole_sequences_under_tensor_parallelism() -> None:
    for sequence_parallel in (True, False):
        plan = moe_plan(expert="conv(4)", ffn="conv(3)", ep=4, tp=4, sequence_parallel=sequence_parallel)
        window = op_giving(plan, BODY, "window").results[0]
        assert window.layout is not None
        assert window.layout.axes == ("dp",) or not window.layout.axes
        report = verify(plan)
        assert report.ok, report
    assert verify(plan, scale=True).ok


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


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_mixtures_of_mixtures_are_right_in_both_dtypes_and_at_toy_widths(dtype: str) -> None:
    plan = moec.compile(nested(ep=4, dtype=dtype))
    for report in (verify(plan), verify(plan, scale=True)):
        assert report.ok, report


def test_pairs_that_are_given_get_the_weights_that_the_op_gives() -> None:
    plan = moec.compile(nested(ranks=1, ep=1))
    op = next(op for op in plan.program.block(BODY).ops if isinstance(op, NestedRoute))
    function = emit_function(reference_program(plan.spec), BODY, float64=True)
    assert [type(router) for router in function.routers] == [NestedRoute]
    logits = torch.randn(2, 3, 8 * 4, dtype=torch.float64)
    outer, of_inner = logits[..., :8].softmax(-1), logits[..., 8:].unflatten(-1, (8, 3)).softmax(-1)
    pairs = torch.tensor([[[6, 8, 21, 22]]]).expand(2, 3, 4)  # 2 with 0 and 2, 7 with 0 and 1
    expected = [outer[..., i] * of_inner[..., i, j] / of_inner[..., i, list(both)].sum(-1)
                for i, j, both in ((2, 0, (0, 2)), (2, 2, (0, 2)), (7, 0, (0, 1)), (7, 1, (0, 1)))]  # fmt: skip
    torch.testing.assert_close(WEIGHTS[NestedRoute](op, logits, pairs), torch.stack(expected, -1))


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
    assert any(one.message.startswith(what) and one.span is not None for one in found), found


@pytest.mark.parametrize("ep", [1, 2])
def test_the_inner_experts_of_another_outer_one_are_found(ep: int) -> None:
    plan = moec.compile(nested(ep=ep))
    op = next(op for op in plan.program.block(BODY).ops if isinstance(op, NestedRoute))
    report = verify(change_op(plan, BODY, op.results[2].name, inner_score="sigmoid"))
    assert not report.ok
    assert report.first_difference is not None
    assert report.first_difference.layer == "layers.1"


def test_a_plan_of_mixtures_of_mixtures_is_saved_and_loaded(tmp_path: Path) -> None:
    plan = moec.compile(nested(ep=2))
    plan.save(tmp_path / "nested.plan")
    loaded = moec.load(tmp_path / "nested.plan")
    assert loaded.program == plan.program
    assert verify(loaded, float32=False).ok


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
    report = verify(plan)
    assert report.ok, report
