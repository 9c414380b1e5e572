"""moec verify at toy widths: the plan's own ops, only smaller, and nothing else in them may differ."""

from __future__ import annotations

import pytest
import torch
from support.combinations import diagonals, some
from support.plans import BODY, moe_plan, moe_text
from support.verified import require_equal
from support.wrong_plans import bypass, change_op, change_parameter, change_result, change_sums, op_giving

import moec
from moec.passes.ir.ops import Rope
from moec.runtime.errors import JobError
from moec.runtime.verify.toy import at_toy_widths
from moec.runtime.verify.verification import verify
from moec.runtime.verify.verify_report import BOUND, Report

LARGE = {"dim": 4096, "expert": "swiglu(14336)", "experts": 16, "ffn": "swiglu(8192)", "memory": "1TB"}


def widths(report: Report) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for width in report.widths:
        found.setdefault(width.name, []).append(width.before)
    return found


def test_a_plan_too_large_is_verified_at_toy_widths_and_says_which():
    report = require_equal(moe_plan(**LARGE))
    assert report.scaled
    assert max(report.max_output_error, report.max_gradient_error) < BOUND
    assert widths(report) == {"dim": [4096], "head_dim": [1024], "hidden": [8192, 14336]}
    assert str(report.widths[0]) == "dim 4096 → 16"


HEADS = {
    (32, 8, 1): {"heads 32 → 4", "kv_heads 8 → 2"},
    (32, 8, 4): {"heads 32 → 16"},
    (12, 2, 4): {"heads 12 → 4"},
    (16, 1, 2): {"heads 16 → 2"},
    (8, 8, 2): {"heads 8 → 4", "kv_heads 8 → 4"},
}
"""Heads, kv heads and `tp`, and the toy widths."""


@pytest.mark.parametrize("given", some(list(HEADS), [(32, 8, 1), (12, 2, 4), (8, 8, 2)]))
def test_heads_become_few_and_stay_grouped_and_divided_as_they_were(given: tuple[int, int, int]):
    heads, kv_heads, tp = given
    text = moe_text(dim=4 * heads, tp=tp, ranks=4).replace("mha(heads = 4)", f"mha(heads = {heads})")
    text = text.replace("gqa(heads = 4, kv_heads = 2", f"gqa(heads = {heads}, kv_heads = {kv_heads}")
    report = require_equal(moec.compile(text), scale=True)
    assert HEADS[given] <= {str(width) for width in report.widths}


def test_scaling_can_be_asked_for():
    plan = moe_plan(dim=64)
    assert not verify(plan).scaled
    assert verify(plan, scale=True).scaled


def test_a_plan_too_large_at_its_own_widths_is_refused_where_scaling_is_not_wanted():
    with pytest.raises(JobError, match=r"MOE0703.*about \d+ GB"):
        verify(moe_plan(**LARGE), scale=False)


@pytest.mark.parametrize(
    ("beside", "model"),
    diagonals(
        ["", "shared = swiglu(4096)", "residual = gelu(4096); shared = relu2(2048)"],
        ["norm = layer_norm()", "embedding = tokens(tied = true, positions = learned)"],
    ),
)
def test_every_kind_of_layer_shrinks(beside: str, model: str):
    report = require_equal(moe_plan(ranks=8, ep=4, beside=beside, model=model, **LARGE))
    assert report.scaled


def test_a_head_whose_width_is_stated_in_parts_stays_as_wide():
    mla = "mla(heads = 8, kv_rank = 32, nope_dim = 8, rope_dim = 4, value_dim = 8, rope = rope())"
    report = require_equal(moe_plan(ranks=2, **LARGE | {"attention": mla}), scale=True)
    assert (widths(report)["heads"], widths(report)["head_dim"]) == ([4, 8], [1024])


def test_experts_become_fewer_only_where_memory_wants_it():
    plan = moe_plan(experts=4096, ep=4)
    assert plan.spec.model.layers[1].moe.num_experts == 4096
    few = at_toy_widths(plan, fewer_experts=True)
    assert few.plan.spec.model.layers[1].moe.num_experts == 4
    assert few.plan.spec.model.layers[1].moe.gate.k == 2
    require_equal(few.plan)


@pytest.mark.parametrize(
    ("capacity", "group"),
    diagonals(["factor(0.5, eval = 1.5, min = 2)", "dynamic(max = 0.7)"], ["sequence", "batch", "rank"]),
)
def test_capacities_of_fewer_experts_are_those_of_their_number(capacity: str, group: str):
    """An op says the factor, and how many experts there are is seen from its operands: no number depends on it."""
    plan = moe_plan(experts=64, ep=2, beside=f"capacity = {capacity}; group = {group}")
    few = at_toy_widths(plan, fewer_experts=True)
    assert "experts 64 → 2" in map(str, few.widths)
    require_equal(few.plan)


def test_the_toy_plan_runs_the_ops_that_were_given():
    toy = at_toy_widths(change_op(moe_plan(**LARGE), BODY, "q.1", theta=20_000.0))
    rope = op_giving(toy.plan, BODY, "q.1")
    assert isinstance(rope, Rope)
    assert rope.theta == 20_000.0


@pytest.mark.parametrize("width", some([16, 17, 4097], [16, 4097]))
def test_a_width_that_somebody_changed_is_found_even_where_it_is_the_toy_one(width: int):
    report = verify(change_parameter(moe_plan(**LARGE), "forward", "norm.weight", shape=(width,)))
    assert not report.ok
    assert report.scaled
    assert (report.first_difference.op, report.first_difference.value) == ("parameter", "@norm.weight")
    assert report.first_difference.unlike
    assert "is not what moec compiles" in str(report.first_difference)


@pytest.mark.parametrize("width", some([16, 17, 4097], [16, 4097]))
def test_so_is_a_width_that_an_op_gives(width: int):
    report = verify(change_result(moe_plan(**LARGE), "forward", "h", shape=("batch", "sequence", width)))
    assert not report.ok
    assert report.scaled
    assert (report.first_difference.op, report.first_difference.unlike) == ("rms_norm", True)


@pytest.mark.parametrize(
    ("plant", "value", "line"),
    [
        (lambda p: bypass(p, BODY, "x.2"), "x.2", 7),
        (lambda p: change_sums(p, "experts.up.weight", ()), "@moe.experts.up.weight", 10),
        (lambda p: bypass(p, "loss", "loss.1"), "loss.1", 1),
    ],
)
def test_a_planted_fault_is_found_and_named_at_toy_widths_by_its_numbers_too(plant, value: str, line: int):
    report = verify(plant(moe_plan(**LARGE)))
    assert max(report.max_output_error, report.max_gradient_error) > 1e-6
    assert not report.ok
    assert (report.first_difference.value, report.first_difference.span) == (value, f"tiny.moe:{line}")


def test_layers_computed_again_for_their_gradients_give_the_same_ones(monkeypatch):
    monkeypatch.setattr("moec.runtime.verify.memory.ACTIVATION_BYTES", 0)
    require_equal(moe_plan(ranks=4, ep=2))


@pytest.mark.parametrize(("dim", "threads"), [(16, 1), (256, 3)])
def test_small_models_run_on_one_thread_and_the_number_is_restored(dim: int, threads: int, monkeypatch):
    seen: list[int] = []
    from moec.runtime.verify import verification as module

    compare = module.compare
    monkeypatch.setattr(module, "SMALL", 100_000)
    monkeypatch.setattr(module, "compare", lambda *a, **k: (seen.append(torch.get_num_threads()), compare(*a, **k))[1])
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        verify(moe_plan(dim=dim, expert=f"swiglu({dim})"))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {threads}
