"""Traces of loads: what is read, how experts are placed by them, and what a plan makes of them."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.plans import FOUR, moe_text
from support.traces import trace_of, write_traced

import moec
from moec.commands.planning.loads import Placing
from moec.commands.planning.plan import run
from moec.driver import check, to_spec
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.spec import Measured
from moec.measured_loads import with_loads
from moec.passes.cost.rates import ClusterRates
from moec.passes.ir.work.workload import Workload
from moec.passes.loads.figures import measured, over_mean
from moec.passes.loads.placed_loads import PlacedLoads, Placement
from moec.passes.loads.placements import greedy, replicated, rows_of_copies, rows_of_homes
from moec.passes.loads.trace_file import MOST_ITERATIONS, read_trace
from moec.passes.search.choose import choose
from moec.passes.search.ranking import rank

PIPELINE = "pp = 2; microbatches = 4;"


def planned(file: Path, capsys: pytest.CaptureFixture[str], *placing: Any) -> dict[str, Any]:
    run(file, {}, "json", placing=Placing(*placing))
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def bad_counts(value: float) -> Any:
    counts = trace_of().astype(float)
    counts[2, 1, 0, 3] = value
    return counts


def without_choices() -> Any:
    counts = trace_of()
    counts[2, 1] = 0
    return counts


ARRAYS: dict[str, tuple[str, Any]] = {
    "not a number": ("MOE0512", bad_counts(np.nan)),
    "infinite": ("MOE0512", bad_counts(np.inf)),
    "negative": ("MOE0512", bad_counts(-1)),
    "all zero": ("MOE0512", without_choices()),
    "other experts": ("MOE0511", trace_of(experts=4)),
    "other layers": ("MOE0511", trace_of(layers=3)),
    "objects": ("MOE0510", np.array([[[[{}]]]], dtype=object)),
    "no iterations": ("MOE0510", trace_of()[:0]),
    "three dims": ("MOE0510", trace_of()[0]),
    "another order": ("MOE0510", np.asfortranarray(trace_of())),
}


@pytest.mark.parametrize(("code", "counts"), ARRAYS.values(), ids=ARRAYS)
def test_bad_counts_are_diagnosed_at_the_path(code: str, counts: Any, tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError) as error:
        moec.compile(write_traced(tmp_path, moe_text(), counts))
    (found,) = error.value.diagnostics
    assert (found.code, found.span and found.span.line) == (code, 17)
    assert found.help


def test_bad_files_are_diagnosed_and_nothing_is_unpickled(tmp_path: Path) -> None:
    file = write_traced(tmp_path, moe_text())
    good = (tmp_path / "loads.npz").read_bytes()
    flipped = good[:500] + bytes([good[500] ^ 1]) + good[501:]
    for content in (b"", b"no archive", good[: len(good) // 2], b"\x80\x04].", flipped):
        (tmp_path / "loads.npz").write_bytes(content)
        with pytest.raises(DiagnosticError, match="MOE0510"):
            moec.compile(file)
    np.savez(tmp_path / "loads.npz", other=trace_of())
    with pytest.raises(DiagnosticError, match="`other`"):
        moec.compile(file)
    (tmp_path / "loads.npz").unlink()
    with pytest.raises(DiagnosticError, match="No such file"):
        moec.compile(file)
    assert not check(file)  # reads no trace


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_of_many_iterations_evenly_spaced_ones_are_read(save: Any, tmp_path: Path) -> None:
    counts = np.zeros((1500, 1, 1, 4), np.uint16)
    counts[:] = 1 + np.arange(1500)[:, None, None, None]
    save(tmp_path / "long.npz", counts=counts)
    trace = read_trace(tmp_path / "long.npz", None)
    assert (trace.every, trace.iterations) == (3, 1500)
    assert len(trace.counts) == 500 <= MOST_ITERATIONS
    assert trace.counts[:, 0, 0].tolist() == list(range(1, 1501, 3))


def test_greedy_is_near_the_best_placement_and_copies_keep_every_row() -> None:
    loads = trace_of(6, 3).sum(2).reshape(-1, 8).astype(float)
    rows = rows_of_homes(loads, greedy(loads, 2), 2)
    pairs = list(itertools.combinations(range(8), 4))
    best = np.min([np.maximum(loads[:, pair].sum(1), loads.sum(1) - loads[:, pair].sum(1)) for pair in pairs], 0)
    assert np.all(rows.max(1) <= 1.2 * best)
    copies = replicated(loads, 4, 4)
    split = rows_of_copies(loads, copies)
    assert np.all(copies.sum((1, 2)) == 12)
    assert np.all(copies.sum(1) == 3)
    assert split.sum(1) == pytest.approx(loads.sum(1))
    assert np.all(split.max(1) <= rows_of_homes(loads, greedy(loads, 4), 4).max(1))


def test_rows_are_split_so_that_ranks_are_even_where_copies_allow_it() -> None:
    copies = np.zeros((1, 3, 3), bool)
    copies[0, 0], copies[0, 1, 1], copies[0, 2, 2] = True, True, True
    assert rows_of_copies(np.array([[9.0, 2.0, 1.0]]), copies) == pytest.approx(np.full((1, 3), 4.0))
    assert rows_of_copies(np.array([[1.0, 5.0, 1.0]]), copies).max() == pytest.approx(5.0)


def test_a_rank_keeps_the_rows_of_all_its_layers_and_time_is_of_the_busiest_in_each() -> None:
    rows = np.array([[[3.0, 1.0], [1.0, 3.0]]] * 4)  # the busiest rank alternates
    table = measured("a.npz", {2: rows}, 2)
    assert (table.layers, table.time, table.kept, table.most) == ((2, 1), (1.5, 1.5), (1.0, 1.5), (1.5,))
    assert [table.load("kept", ranks, layers) for ranks, layers in ((2, 2), (2, 1), (1, 2), (2, 9))] == [1, 1.5, 1, 1]
    assert table.load("time", 4, 2) == float("inf")


def test_greedy_starts_at_another_rank_in_each_layer() -> None:
    loads = PlacedLoads(read(trace_of(40, 8)), Placement("greedy"), 8, 8)
    of_layers = loads.rows(4).argmax(-1)
    assert len(set(of_layers[0].tolist())) == 4
    kept = loads.rows(4).sum(1)
    assert (kept.max(-1) / kept.mean(-1)).max() < 1.1 < over_mean(loads.rows(4)).min()


def read(counts: Any) -> Any:
    from moec.passes.loads.trace_file import Trace

    return Trace(counts.sum(2).astype(float), len(counts), counts.shape[2], 1)


@pytest.mark.parametrize("words", ["", PIPELINE])
def test_three_figures_of_a_trace(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = moe_text(levels=FOUR, ep=2).replace("parallel {", f"parallel {{ {words}")
    document = planned(write_traced(tmp_path, text), capsys)
    load = document["loads"]
    assert load["layer_p50"] <= load["layer_p95"] <= load["one_layer"] * 1.001
    assert load["step_time_p50_s"] <= load["step_time_p95_s"] <= document["step_time_s"] * 1.001
    assert load["kept"] <= load["one_layer"]
    if not words:  # a step is a sum over layers: what a search plans for is the percentile
        assert load["step_time_p95_s"] == pytest.approx(document["step_time_s"], rel=0.01)
    greedily = planned(write_traced(tmp_path, text), capsys, "greedy", 0, 2)["loads"]
    replicated = planned(write_traced(tmp_path, text), capsys, "replicate", 2)["loads"]
    times = [of["trace"]["layer_time_p50_s"] for of in (load, greedily, replicated)]
    assert times == sorted(times, reverse=True)
    assert (greedily["trace"]["age"], replicated["trace"]["extra"]) == (2, 2)
    assert greedily["trace"]["read"] == load["trace"]["read"] - 2
    assert replicated["trace"]["copies_gb"] > 0 < replicated["trace"]["copies_time_s"]


def test_equal_iterations_are_what_the_plan_is_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = np.tile(np.array([5, 1, 1, 1, 1, 1, 1, 1]), (3, 1, 1, 1))
    document = planned(write_traced(tmp_path, moe_text(levels=FOUR, ep=4), counts), capsys)
    load = document["loads"]
    assert load["layer_p50"] == load["layer_p95"] == load["kept"] == load["one_layer"] == 2.0
    assert load["step_time_p50_s"] == pytest.approx(document["step_time_s"], rel=1e-9)


def test_a_plan_needs_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_traced(tmp_path, moe_text(levels=FOUR, ep=2))
    moec.compile(file).save(tmp_path / "moved" / "traced.plan")
    of_file = planned(file, capsys)
    (tmp_path / "loads.npz").unlink()
    file.unlink()
    of_plan = planned(tmp_path / "moved" / "traced.plan", capsys)
    for key in ("step_time_s", "memory_gb", "terms"):
        assert of_plan[key] == of_file[key]
    assert of_plan["loads"]["layer_p50"] is None
    with pytest.raises(DiagnosticError, match="MOE0513"):
        planned(tmp_path / "moved" / "traced.plan", capsys, "greedy")
    code = f"import sys, moec; moec.load({str(tmp_path / 'moved' / 'traced.plan')!r}, trust_nothing=True)"
    script = f"{code}; print('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout == b"False\n"


def test_placements_that_cannot_be_priced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_traced(tmp_path, moe_text(levels=FOUR, ep=2))
    for placing in (("greedy", 0, 12), ("replicate", 9)):
        with pytest.raises(DiagnosticError, match="MOE0513"):
            planned(file, capsys, *placing)


def test_a_placement_is_priced_for_the_plan_that_a_search_chooses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = moe_text(levels=FOUR, ep=2)
    stated = planned(write_traced(tmp_path, text), capsys, "greedy")
    found = planned(write_traced(tmp_path, text.replace("ep = 2", "ep = [2]; tp = [1]")), capsys, "greedy")
    assert found["candidates"]["number"] == 1
    for key in ("step_time_s", "memory_gb", "loads"):
        assert found[key] == stated[key]


def test_copies_of_experts_have_to_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    placed = planned(write_traced(tmp_path, moe_text(levels=FOUR, memory="1GB")), capsys, "replicate", 4)
    bytes_left = int(1e9 * (placed["memory_gb"] + placed["loads"]["trace"]["copies_gb"])) - 1000
    file = write_traced(tmp_path, moe_text(levels=FOUR, memory=f"{bytes_left}B"))
    assert planned(file, capsys)["fits"]
    assert not planned(file, capsys, "replicate", 4)["fits"]
    run(file, {}, "full", placing=Placing("replicate", 4))
    assert ": it does not fit with its copies of experts\n" in capsys.readouterr().out


def test_experts_of_several_sizes_are_not_supported_yet(tmp_path: Path) -> None:
    text = moe_text(layers=("moe { experts = [4 * gelu(16), 4 * gelu(32)] }", ""))
    assert [found.code for found in check(write_traced(tmp_path, text))] == ["MOE0202"]


def test_a_search_plans_for_the_loads_of_the_trace(tmp_path: Path) -> None:
    text = moe_text(levels=FOUR, ep=2).replace("ep = 2", "ep = auto; tp = auto; microbatches = auto")
    spec = with_loads(to_spec(file := write_traced(tmp_path, text)), file)
    assert spec.train is not None
    assert isinstance(spec.train.routing, Measured)
    ranked = rank(spec, ClusterRates(spec.cluster))
    chosen = choose(spec).chosen
    assert ranked.first[0].seconds == pytest.approx(chosen.prediction.step.total)
    assert moec.compile(file).spec.parallel == chosen.spec.parallel


def test_the_gate_bounds_every_load() -> None:
    def loads(routing: str, capacity: str = "dropless") -> list[float]:
        text = moe_text(ep=4, beside=f"capacity = {capacity}").replace("train {", f"train {{ routing = {routing};")
        plan = moec.compile(text)
        bound = Workload.of(plan.spec, plan.program).bound_to(plan.program, plan.program.block("layers[1..2]"))
        return [bound.busiest_of(8, ranks) for ranks in (4, 8)]

    assert loads("bound") == [4.0, 4.0]  # every token goes to the two experts of one rank
    assert loads("zipf(8)") == pytest.approx([4.0, 4.0], rel=0.01)
    assert loads("bound", "dynamic(max = 2.0)") == [2.0, 2.0]
