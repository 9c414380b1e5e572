"""`moec plan`: the prediction of a step, whose terms add up, and what it says of plans that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.plans import moe_plan, moe_text

from moec.commands.planning.plan import run
from moec.driver import run_passes, to_spec
from moec.passes.cost.parameter_time import HIDDEN, ParameterWork
from moec.passes.cost.prediction import predict, step_of, workload_of_skew
from moec.passes.cost.totals import costs_of, tally
from moec.passes.cost.weight_traffic import sendings
from moec.passes.ir.work.workload import Workload

NODES = 'level "node" { size = 2; bandwidth = 4GB/s }; level "rail" { size = 2; bandwidth = 1GB/s }'
PIPELINE = "parallel {"


def planned(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], style: str = "full") -> tuple[bool, str]:
    """Whether `moec plan` says that a file's step fits, and its output."""
    (tmp_path / "a.moe").write_text(text)
    fits, _ = run(tmp_path / "a.moe", {}, style)
    return fits, capsys.readouterr().out


@pytest.mark.parametrize("words", ["", "recompute = layer; ", "pp = 2; microbatches = 4; "])
def test_terms_add_up_to_the_step(words: str) -> None:
    text = moe_text(ranks=4, levels=NODES, ep=2).replace(PIPELINE, f"{PIPELINE} {words}")
    spec = to_spec(text)
    program = run_passes(spec, "schedule").program
    prediction = predict(program, spec)
    assert sum(prediction.step.of.values()) == pytest.approx(prediction.step.total)
    assert prediction.tokens_per_second * prediction.step.total * 4 == pytest.approx(8 * 8)
    assert prediction.mfu * prediction.peak == pytest.approx(4 * prediction.flops_per_second)
    assert ("again" in prediction.step.of and prediction.step.of["again"] > 0) == ("recompute" in words)
    assert ("bubble" in prediction.step.of) == ("pp" in words)


def test_twice_the_rows_take_longer_and_a_rank_without_others_has_no_load() -> None:
    plan = moe_plan(ranks=4, ep=2)
    uneven = workload_of_skew(plan.program, plan.spec, 1.5)
    assert uneven is not None
    costs = costs_of(plan.program, uneven)
    assert max(cost.skew() for cost in costs.values()) == pytest.approx(1.5, rel=1e-3)
    even = Workload.of_microbatch(plan.spec, plan.program)
    assert step_of(plan.program, plan.spec, uneven).total > step_of(plan.program, plan.spec, even).total
    alone = moe_plan(ranks=4, ep=1)
    assert workload_of_skew(alone.program, alone.spec, 1.5) is None


def test_the_document_has_what_the_text_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = moe_text(ranks=4, levels=NODES, ep=2)
    fits, printed = planned(text, tmp_path, capsys, "json")
    document = json.loads(printed)
    assert fits
    assert document["fits"]
    assert not document["calibrated"]
    assert sum(document["terms"].values()) == pytest.approx(document["step_time_s"])
    assert document["exposed_communication_s"] == pytest.approx(
        sum(
            document["terms"][term]
            for term in ("all_to_all", "gradients", "other_sends", "weights")
            if term in document["terms"]
        )
    )
    fits, printed = planned(text, tmp_path, capsys)
    assert fits
    assert f"MFU {document['mfu']:.3f}" in printed
    assert "all_to_all        2 ranks of ep over node" in printed
    assert "not measured here: device cpu, level node, level rail have no `achieved`" in printed


def test_a_plan_that_does_not_fit_is_predicted_and_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fits, printed = planned(moe_text(memory="100KB"), tmp_path, capsys)
    assert not fits
    assert "it does not fit" in printed
    fits, printed = planned(moe_text(memory="100KB"), tmp_path, capsys, "json")
    assert (fits, json.loads(printed)["fits"]) == (False, False)


def test_what_is_guessed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    levels = 'level "node" { size = 2 }; level "rail" { size = 2; bandwidth = 1GB/s; achieved { } }'
    _, printed = planned(moe_text(ranks=4, levels=levels, ep=2, memory="1GB"), tmp_path, capsys)
    assert "not measured here: device roomy, level node have no `achieved`" in printed
    assert "guessed: node has no `bandwidth`, and 25% of the memory's counts: state it" in printed
    assert "guessed: roomy has no `peak` in fp32" in printed


def test_what_every_pass_sends_hides_beside_all_passes_and_what_a_step_sends_beside_one() -> None:
    every = ParameterWork({"weights": {}, "gradients": {True: 1.0}}, 0.0, 0.0).seconds(1.0, 4)
    once = ParameterWork({"weights": {}, "gradients": {False: 1.0}}, 0.0, 0.0).seconds(1.0, 4)
    assert every.of["gradients"] == pytest.approx(1 - HIDDEN)
    assert once.of["gradients"] == pytest.approx(1 - HIDDEN / 4)
    for zero, is_per_pass in ((1, False), (2, True), (3, True)):
        plan = moe_plan(ranks=4, ep=2, zero=zero, microbatches=2)
        costs = costs_of(plan.program, Workload.of_microbatch(plan.spec, plan.program))
        sent = [s for c in costs.values() for s in sendings(c.block, c.workload, 2, c.saved_parameters())]
        assert {s.is_per_pass for s in sent if s.collective == "reduce_scatter"} == {is_per_pass}


def test_a_tokens_choices_are_of_different_experts() -> None:
    """With k = 2 of 8 experts on 8 ranks no rank gets more than half of the choices: 4 times the mean."""
    spec = to_spec(moe_text(ranks=8, ep=8).replace("sequence = 8;", "sequence = 8; routing = zipf(8);"))
    program = run_passes(spec, "schedule").program
    assert tally(program, spec).imbalance == 4.0


def test_recomputed_collectives_stay_collectives() -> None:
    steps = {}
    for word in ("none", "layer"):
        spec = to_spec(moe_text(ranks=4, levels=NODES, ep=2).replace(PIPELINE, f"{PIPELINE} recompute = {word};"))
        steps[word] = predict(run_passes(spec, "schedule").program, spec).step.of
    assert steps["layer"]["all_to_all"] == pytest.approx(1.5 * steps["none"]["all_to_all"], rel=0.1)
