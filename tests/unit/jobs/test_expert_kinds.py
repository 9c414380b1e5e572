"""What each kind of expert says in Programs, and faults in it that `moec verify` finds."""

from __future__ import annotations

import pytest
import torch
from support.combinations import diagonals
from support.plans import BODY, layer_plan, moe_plan, moe_spec, moe_text
from support.verified import require_equal
from support.wrong_plans import change_op, change_sums, op_giving

import moec
from moec.codegen.kernels.plan_kernels import kernel_sources
from moec.codegen.plan import Plan
from moec.grammar import load_text
from moec.passes.ir.ir_error import IrError
from moec.passes.ir.ops import Scale
from moec.passes.ir.texts.parse import parse_program
from moec.passes.ir.texts.text import print_program
from moec.passes.ir.verifier import check_program
from moec.runtime.host.reference import reference
from moec.runtime.verify.verification import verify

DEVICE = 'device "toy" { kind = cuda; memory = 80GB; bandwidth = 1TB/s; peak { fp32 = 1TFLOPS } }\n'

# ---- clamp and alpha -----------------------------------------------------------------------------------


def bounded(**options: object) -> Plan:
    """A clamp inside of what the small initial weights give."""
    return moe_plan(expert="swiglu(16, clamp = 0.01, alpha = 1.7)", ffn="swiglu(8, alpha = 1.5)", **options)


@pytest.mark.parametrize(("ep", "dtype"), [(1, "bf16"), (2, "fp32")])
def test_rounding_at_a_clamp_is_not_taken_for_a_fault(ep: int, dtype: str) -> None:
    report = require_equal(bounded(ep=ep, dtype=dtype))
    assert report.rounding is not None
    assert report.rounding.ok


@pytest.mark.parametrize(("forgotten", "ep"), diagonals(["clamp", "alpha"], [1, 2]))
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


@pytest.mark.parametrize(("beside", "ep"), diagonals(["", "capacity = factor(1.25)"], [1, 2]))
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
        require_equal(layer_plan(expert="linear(bias = true)", ep=2, dtype=dtype, beside="shared = linear"))


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
    require_equal(moe_plan(expert=expert, dim=64, ep=2, beside=f"shared = {expert}"), scale=True)


@pytest.mark.parametrize("ep", [1, 2])
def test_another_factor_of_low_rank_experts_is_found(ep: int) -> None:
    plan = moe_plan(expert="lora(2, alpha = 8)", ep=ep)
    (op,) = (op for op in plan.program.block(BODY).ops if isinstance(op, Scale))
    # At the start the results are zeros, and so is every difference: only gradients show it.
    report = verify(change_op(plan, BODY, op.results[0].name, factor=8.0))
    assert not report.ok


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
        require_equal(plan)
    require_equal(plan, scale=True)


@pytest.mark.parametrize("causal", ["false", "true"])
def test_a_window_lies_around_its_token_unless_attention_is_causal(causal: str) -> None:
    """Without positions a model that looks both ways, read backwards, is the model with its kernels turned round."""
    text = moe_text(
        ranks=1,
        ep=1,
        attention=f"mha(heads = 4, causal = {causal})",
        ffn="conv(5, kernel = 3)",
        expert="conv(4, kernel = 2)",
        depth=2,
        batch=2,
    ).replace("layers { attention = mha(heads = 4)", f"layers {{ attention = mha(heads = 4, causal = {causal})")
    model = reference(load_text(text).unwrap(), dtype=torch.float64)
    tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(1))
    kernels = [p for n, p in model.named_parameters() if "attention" not in n and (".up." in n or ".down." in n)]
    assert len(kernels) == 4
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)), alpha=0.2)
        forwards = model(tokens).logits
        for kernel in kernels:
            kernel.copy_(kernel.flip(-2))
        backwards = model(tokens.flip(1)).logits.flip(1)
    assert torch.allclose(forwards, backwards, rtol=1e-10, atol=1e-10) == (causal == "false")
