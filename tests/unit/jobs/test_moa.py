"""`moa`, mixtures of attention heads: plans in every mode, wrong plans, two gates in a layer, counts, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from support.combinations import some
from support.plans import moe_plan, moe_spec
from support.verified import require_equal
from support.wrong_plans import bypass, change_op, change_sums

import moec
from moec.codegen.plan import Plan
from moec.driver import compile as compile_source
from moec.grammar import load_text
from moec.grammar.diagnostics import DiagnosticError
from moec.passes.cost.totals import tally
from moec.passes.ir import Shard
from moec.passes.pipeline import compile_program
from moec.runtime.errors import JobError
from moec.runtime.host.reference import reference
from moec.runtime.verify.verification import verify

BODY = "layers[1]"
TP = {"ranks": 4, "tp": 2, "ep": 2, "depth": 2}
MOA = "moa(heads = 4, experts = 5, gate = topk(2), {})"
FULL = MOA.format(
    "kv_heads = 2, head_dim = 6, bias = all, qk_norm = head, clip = 0.05, normalize = true, rope = rope(), "
    "window = 5, multiplier = 0.3, balance = [switch_loss(0.1), z_loss(0.01)]"
)
PACKED = {"model": "embedding = tokens(separator = 2, padding = 3, positions = learned)"}
PLANS: dict[str, dict[str, Any]] = {
    "every option, packed and padded, bf16": {**TP, "attention": FULL, **PACKED, "dtype": "bf16"},
    "tokens whole": {**TP, "sequence_parallel": False, "attention": FULL},
    "repeated kv heads, tokens whole": {
        "ranks": 4, "tp": 4, "ep": 1, "depth": 2, "sequence_parallel": False, "attention": FULL
    },
    "repeated kv heads": {"ranks": 4, "tp": 4, "ep": 1, "depth": 2, "attention": FULL},
    "zero 3, recomputed, micro-batches": {
        **TP, "zero": 3, "recompute": "layer", "microbatches": 2, "attention": FULL
    },
    "zero 1, experts recomputed": {
        "ranks": 2, "ep": 2, "depth": 2, "zero": 1, "recompute": "experts", "attention": FULL
    },
    "side by side, both ways, padding given": {
        **TP, "attention": MOA.format("causal = false, group = batch, balance = [importance_loss(0.1)]"),
        "model": "parallel_residual = one_norm; embedding = tokens(padding = given)",
    },
    "two gates that draw": {
        **TP, "gate": "noisy_topk(2)",
        "attention": "moa(heads = 4, experts = 5, gate = noisy_topk(2), balance = [load_loss(0.1)])",
    },
}  # fmt: skip


IN_OTHERS = {"tokens whole", "repeated kv heads", "zero 1, experts recomputed"}


@pytest.mark.parametrize("name", some(list(PLANS), [name for name in PLANS if name not in IN_OTHERS]))
def test_a_plan_equals_the_unsharded_model(name: str) -> None:
    require_equal(moe_plan(**PLANS[name]))


def test_a_wide_plan_is_verified_at_toy_widths() -> None:
    attention = MOA.format("head_dim = 32, rope = rope()").replace("heads = 4", "heads = 16")
    for kv_heads in ("", ", kv_heads = 2"):
        wide = attention.replace("experts = 5", f"experts = 5{kv_heads}")
        plan = moe_plan(tp=2, ep=2, dim=64, expert="swiglu(64)", depth=2, attention=wide)
        report = require_equal(plan, scale=True)
        assert {width.name for width in report.widths} >= {"heads", "head_dim", "hidden"}


def test_a_plan_that_counts_padding_is_refused() -> None:
    wrong = change_op(moe_plan(**TP, attention=FULL, **PACKED), BODY, "head_counts", operands=("e",))  # not masked
    assert not verify(wrong, float32=False).ok


# ---- wrong plans -----------------------------------------------------------------------------------------


class Fault(NamedTuple):
    """How a plan is made wrong, and the op and value that `moec verify` names."""

    plant: Callable[[Plan], Plan]
    op: str
    value: str


FAULTS = {
    "the sum's gradient is not detached": Fault(lambda p: bypass(p, BODY, "shares"), "mix_heads", "o"),
    "queries are turned at other angles": Fault(
        lambda p: change_op(p, BODY, "q.3", interleaved=True), "rope", "q.3"
    ),
    "heads attend to another window": Fault(
        lambda p: change_op(p, BODY, "attended", window=4), "attention", "attended"
    ),
    "gradients of the groups' biases are not summed over dp": Fault(
        lambda p: change_sums(p, "attention.q.bias", ()), "chosen_heads", "@attention.q.bias"
    ),
    "gradients of the router are not summed over tp": Fault(
        lambda p: change_sums(p, "attention.gate.weight", ("dp",)), "router", "@attention.gate.weight"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refused_with_its_op(fault: str) -> None:
    planted = FAULTS[fault]
    report = verify(planted.plant(moe_plan(**TP, attention=FULL)), float32=False)
    assert not report.ok
    found = report.first_difference
    assert found is not None
    assert (found.op, found.value) == (planted.op, planted.value)


# ---- what a plan does ------------------------------------------------------------------------------------


def test_tp_cuts_the_heads_of_every_group_and_ep_cuts_no_group() -> None:
    plan = moe_plan(**TP, attention=FULL)
    layouts = {name.split(".", 3)[-1]: p.layout for name, p in plan.parameters.items() if name.startswith("layers.1.")}
    cuts = {name: layout.placements for name, layout in layouts.items() if name.startswith(("q.", "o.", "gate."))}
    assert cuts == {
        "q.weight": (("tp", Shard(1)),),
        "q.bias": (("tp", Shard(1)),),
        "o.weight": (("tp", Shard(2)),),
        "o.bias": (),
        "gate.weight": (),
    }


def test_counts_agree_with_arithmetic_by_hand() -> None:
    dim, groups, heads, kv_heads, width, k, sequence = 16, 5, 4, 2, 6, 2, 8
    counts = {}
    for attention in (
        f"gqa(heads = {heads}, kv_heads = {kv_heads}, head_dim = {width})",
        MOA.format("kv_heads = 2, head_dim = 6"),
    ):
        spec = moe_spec(ranks=4, ep=2, dim=dim, depth=2, batch=8, sequence=sequence, attention=attention)
        counts[attention[:3]] = tally(compile_program(spec).program, spec)
    usual, mixed = counts["gqa"], counts["moa"]
    projections, router = 2 * heads * width * dim, groups * dim
    assert mixed.parameters - usual.parameters == (groups - 1) * projections + router
    assert mixed.active_parameters - usual.active_parameters == (k - 1) * projections + router
    scores = 2 * 2 * heads * width * (sequence / 2)  # of one choice's heads, the causal half
    more = 2 * ((k - 1) * projections + router) + (k - 1) * scores
    assert mixed.flops_per_token - usual.flops_per_token == pytest.approx(3 * more)


def test_two_gates_of_a_layer_draw_other_numbers() -> None:
    plan = moe_plan(**PLANS["two gates that draw"])
    ops = plan.program.block(BODY).ops
    streams = [op.stream for op in ops if op.mnemonic == "normal_noise"]
    assert len(set(streams)) == 2


def test_router_logits_that_are_nan_are_refused_at_the_line_of_the_heads() -> None:
    spec = moe_spec(ranks=1, ep=1, depth=2, attention=MOA.format("rope = rope()"))
    model = reference(spec)
    with torch.no_grad():
        model.get_parameter("layers.1.attention.gate.weight")[0, 0] = torch.nan
    tokens = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(0))
    with pytest.raises(JobError, match=r"layer 1 \(tiny.moe:8\)") as error:
        model(tokens, tokens)
    assert "NaN" in str(error.value)


def test_a_job_counts_the_choices_of_each_group_of_all_tokens_but_padding() -> None:
    model = "embedding = tokens(padding = 3)"
    plan = moe_plan(ranks=1, ep=1, batch=6, sequence=5, model=model, attention=MOA.format("balance = [z_loss(0.1)]"))
    tokens = torch.randint(4, 32, (6, 5), generator=torch.Generator().manual_seed(0))
    tokens[0, 2:] = 3
    with moec.launch(plan, device="cpu") as job, job.metrics("/dev/null") as metrics:
        built = job.build(seed=1)
        record = metrics.step(built, job.step(built, tokens, tokens))
        loads = job.head_loads(built)
        assert set(job.expert_loads(built)) == {1, 2}
    assert [(layer, load.shape, int(load.sum())) for layer, load in loads.items()] == [(1, (5,), 54), (2, (5,), 54)]
    assert record is not None
    assert record["head_load"] == pytest.approx({layer: float(load.max()) * 5 / 54 for layer, load in loads.items()})


def test_padding_tokens_choose_no_group() -> None:
    """Their vectors go nowhere: what they are changes no gradient of the groups."""
    spec = moe_spec(
        ranks=1, ep=1, depth=2, attention=MOA.format("rope = rope()"), model="embedding = tokens(padding = 3)"
    )
    tokens = torch.randint(4, 32, (8, 8), generator=torch.Generator().manual_seed(0))
    tokens[:, 5:] = 3
    found = []
    for scale in (1.0, 100.0):
        model = reference(spec, seed=1, dtype=torch.float64)
        with torch.no_grad():
            model.get_parameter("embedding.weight")[3] *= scale
        logits = model(tokens).logits
        logits[:, :5].square().sum().backward()
        found.append([model.get_parameter(f"layers.1.attention.{name}.weight").grad for name in ("q", "o", "gate")])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


# ---- what is refused -------------------------------------------------------------------------------------

REFUSED = {
    "gate = expert_choice(2)": "MOE0333",
    "gate = base": "MOE0333",
    "gate = soft": "MOE0333",
    "gate = smear": "MOE0333",
    "gate = batch_priority(2)": "MOE0333",
    "gate = topk(6)": "MOE0304",
    "gate = topk(2, groups = 2)": "MOE0317",
    "gate = dselect_k(2)": "MOE0346",
    "gate = hash(2), balance = [switch_loss(0.1)]": "MOE0325",
    "gate = noisy_topk(5), balance = [load_loss(0.1)]": "MOE0345",
    "gate = topk(2), balance = [device_loss(0.1, groups = 5)]": "MOE0334",
    "gate = topk(2), kv_heads = 3": "MOE0301",
    "gate = topk(2), window = 65": "MOE0362",
    "gate = topk(2), sinks = true": "MOE0202",
    "gate = topk(2), qk_norm = projection": "MOE0202",
    "gate = topk(2, bias = online(0.1))": "MOE0202",
    "gate = topk(2), grid = windows(2), causal = false": "MOE0369",
}


@pytest.mark.parametrize("options", REFUSED)
def test_what_heads_cannot_have_is_refused_at_its_place(options: str) -> None:
    attention = f"moa(heads = 4, experts = 5, {options})"
    with pytest.raises(DiagnosticError) as error:
        compile_source(moe_spec(attention=attention, model="context = 64"))
    assert [found.code for found in error.value.diagnostics] == [REFUSED[options]]
    (found,) = error.value.diagnostics
    assert found.span is not None
    assert found.span.source.text[found.span.start : found.span.end] in attention


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"tp": 8, "ranks": 8, "ep": 1}, "MOE0318"),
        ({"optimizer": "sgd(lr = 0.1); replay = true"}, "MOE0202"),
    ],
)
def test_degrees_and_replay_that_do_not_fit_are_refused(options: dict[str, Any], code: str) -> None:
    with pytest.raises(DiagnosticError) as error:
        compile_source(moe_spec(attention=MOA.format("head_dim = 4"), ffn="gelu(8)", **options))
    assert code in [found.code for found in error.value.diagnostics]


@pytest.mark.parametrize("group", ["sequence", "batch"])
def test_terms_that_cannot_count_a_packed_text_are_refused(group: str) -> None:
    term = "importance_loss(0.1)" if group == "sequence" else "sequence_loss(0.1)"
    attention = MOA.format(f"balance = [{term}], group = {group}")
    with pytest.raises(DiagnosticError, match="MOE0202"):
        compile_source(moe_spec(attention=attention, model="embedding = tokens(separator = 2)"))


def test_a_gate_of_patches_may_not_choose_by_ids() -> None:
    text = """
        model "v" {
          dim = 16; depth = 1; embedding = patches(image = 8, size = 2); head = classes(3)
          layers { attention = moa(heads = 4, experts = 4, gate = hash(2), causal = false); ffn = gelu(8) }
        }
    """
    assert [found.code for found in load_text(text).diagnostics] == ["MOE0367"]


def test_one_group_with_a_constant_weight_is_warned_of() -> None:
    loaded = load_text(
        'model "m" { vocab = 8; dim = 8; depth = 1; context = 8; layers { ffn = gelu(8); '
        "attention = moa(heads = 2, experts = 3, gate = topk(1, normalize = true)) } }"
    )
    assert [found.code for found in loaded.diagnostics] == ["MOE0321"]


def test_sigmoids_that_are_all_0_make_no_nan() -> None:
    gate = "topk(2, score = sigmoid, bias = learned)"
    attention = MOA.replace("topk(2)", gate).format("normalize = true")
    model = reference(moe_spec(ranks=1, ep=1, depth=2, attention=attention), seed=1)
    with torch.no_grad():
        model.get_parameter("layers.1.attention.gate.bias").fill_(-110.0)
    tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(0))
    output = model(tokens, tokens)
    output.loss.backward()
    assert output.logits.isfinite().all()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
