"""Words that a file leaves open: a plan has values for all of them, and commands say what was chosen and why."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from support.plans import moe_text
from support.tables import each_row

from moec.codegen.folder import PlanError
from moec.commands.planning.plan import run
from moec.commands.schemas import type_of
from moec.driver import check, compile, load, reference, to_spec
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.source import Source, Span
from moec.grammar.spec.parallel import ParallelLayers
from moec.grammar.stated import open_words
from moec.open_words import allows
from moec.passes.search.candidate import candidate_of
from moec.passes.search.choose import best

WORDS = "tp = [1, 2]; zero = auto; microbatches = [2, 4]"


def text(words: str = WORDS, **options: object) -> str:
    """A file with these words of `parallel` and no `ep`."""
    return moe_text(ep=None, memory="1GB", **options).replace("parallel {\n", f"parallel {{\n  {words}\n")  # type: ignore[arg-type]


def file_of(folder: Path, words: str = WORDS) -> Path:
    file = folder / "open.moe"
    file.write_text(text(words))
    return file


def test_a_plan_states_every_word_and_is_the_same_each_time(tmp_path: Path) -> None:
    plan = compile(text())
    assert open_words(plan.spec) == ()
    assert plan.spec.parallel.tp in (1, 2)
    assert plan.spec.parallel.microbatches in (2, 4)
    plan.save(tmp_path / "a.plan")
    assert load(tmp_path / "a.plan", trust_nothing=True).spec_text == compile(text()).spec_text


def test_a_plan_keeps_the_report_of_its_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text_of_file = text("schedule = auto; pp = [2]; ep = auto; microbatches = [4]", depth=4)
    plan, file, folder = compile(text_of_file), tmp_path / "open.moe", tmp_path / "a.plan"
    file.write_text(text_of_file)
    report = plan.save(folder) / "report.json"
    kept = report.read_bytes()
    assert compile(text_of_file).save(tmp_path / "b.plan").joinpath("report.json").read_bytes() == kept
    TypeAdapter(type_of("plan-report")).validate_json(kept)
    assert load(folder).report == plan.report
    shown = []
    for source in (file, folder):
        run(source, {}, "full")
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    report.write_bytes(kept.replace(b'"fits": true', b'"fits": false', 1))
    with pytest.raises(PlanError, match=r"report\.json: its digest does not match plan\.json"):
        load(folder)
    stated = compile(plan.spec)
    assert stated == plan
    assert not stated.save(folder).joinpath("report.json").exists()
    assert load(folder).report is None
    report.write_bytes(kept)
    with pytest.raises(PlanError, match="MOE0601"):
        load(folder)


def test_a_search_is_of_the_ranks_that_a_plan_is_for() -> None:
    assert compile(text("ep = auto"), world_size=2).spec.parallel.ep in (1, 2)


def test_a_file_that_allows_a_plan_has_not_changed() -> None:
    plan = compile(text()).spec
    assert allows(to_spec(text()), plan)
    assert not allows(to_spec(text("tp = [4]; zero = auto; microbatches = [2, 4]")), plan)
    assert not allows(to_spec(text(batch=16)), plan)
    assert not allows(to_spec(text("tp = 4; zero = auto; microbatches = [2, 4]")), plan)
    for words in (
        "pp = [2]; schedule = auto",
        "pp = 2; schedule = interleaved; ep = auto",
        "pp = [1, 2]; schedule = auto",
        "pp = [1]; schedule = [one_f_one_b, interleaved]",
        "recompute = [experts, layer]",
    ):
        free = to_spec(text(words, depth=4))
        assert allows(free, compile(free).spec), words


def test_words_of_layers_that_the_file_does_not_allow_are_a_change() -> None:
    file = to_spec(text("recompute = [none, layer]"))
    plan = compile(file).spec
    for word, is_allowed in (("layer", True), ("experts", False)):
        block = ParallelLayers(layers=(1,), recompute=word)
        assert allows(file, plan.replace(parallel=plan.parallel.replace(layers=(block,)))) is is_allowed


def test_a_word_that_is_stated_is_kept() -> None:
    plan = compile(text("pp = [1, 2]; schedule = interleaved; virtual = 1; ep = auto", depth=4)).spec.parallel
    assert (plan.virtual, plan.schedule) == (1, "interleaved")
    assert compile(text("pp = auto; stages = [0..1, 2..3]; ep = 1", depth=4)).spec.parallel.pp == 2
    words = "pp = [2, 4]; schedule = interleaved; microbatches = auto"  # four ranks with two stages each are too many
    assert compile(text(words, depth=4)).spec.parallel.pp == 2


def test_no_result_depends_on_open_words() -> None:
    model, stated = reference(text()), reference(text("tp = 2"))
    assert model.state_dict().keys() == stated.state_dict().keys()
    with pytest.raises(DiagnosticError, match="MOE0503"):
        reference(text("microbatches = auto", beside="group = batch"))


@each_row(
    ("words", "codes"),
    [
        (WORDS, []),
        ("tp = [3, 5]", ["MOE0312"]),
        ("offload = auto", ["MOE0202"]),
        ("ep = auto; layers 1 { ep = [2, 4] }", []),
        ("ep = auto; layers 1 { recompute = auto }", ["MOE0202"]),
        ("ep = auto; layers 1 { recompute = layer }", ["MOE0503"]),
        ("etp = auto; layers 1 { etp = 2 }", ["MOE0503"]),
    ],
)
def test_check_finds_what_keeps_a_search_from_its_plan(words: str, codes: list[str], tmp_path: Path) -> None:
    assert [found.code for found in check(file_of(tmp_path, words))][:1] == codes


def test_why_not_adds_up_to_the_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(file_of(tmp_path), {}, "full", "tp = 4, zero = 3")[0]
    lines = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("`tp = 4, zero = 3` takes "))
    signed = [re.match(r" +([+-]) ([\d.]+) s  ", line) for line in lines[start:]]
    added = sum(float(f"{found[1]}{found[2]}") for found in signed if found)
    run(file_of(tmp_path), {}, "json", "tp = 4, zero = 3")
    found = json.loads(capsys.readouterr().out)
    difference = found["why_not"]["best"]["step_time_s"] - found["step_time_s"]
    assert added == pytest.approx(difference, abs=2e-3 * found["step_time_s"])
    assert sum(found["why_not"]["best"]["terms"].values()) == pytest.approx(found["why_not"]["best"]["step_time_s"])
    assert [line.split(":")[0] for line in lines if " only" in line] == ["  with tp = 4 only", "  with zero = 3 only"]


def test_why_not_searches_only_for_words_that_the_plan_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, searches = file_of(tmp_path), list[object]()
    run(file, {}, "json")
    chosen = json.loads(capsys.readouterr().out)["parallel"]
    monkeypatch.setattr("moec.passes.search.why_not.best", lambda spec: searches.append(spec) or best(spec))
    run(file, {}, "json", f"tp = {chosen['tp']}, zero = {3 - chosen['zero']}")
    found = json.loads(capsys.readouterr().out)["why_not"]
    assert found["with_one_word"]["tp"]["words"]["zero"] == chosen["zero"]
    assert len(searches) == 3  # both words, one of them, and all else as in the plan
    run(file, {}, "json", f"tp = {chosen['tp']}, zero = {chosen['zero']}")
    assert len(searches) == 3


def test_runners_up_are_told_by_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(file_of(tmp_path), {}, "json")
    found = json.loads(capsys.readouterr().out)
    times = [found["step_time_s"], *(other["step_time_s"] for other in found["runners_up"])]
    assert times == sorted(times)
    assert found["candidates"]["number"] >= found["candidates"]["fit"] >= len(found["runners_up"]) > 1
    assert all(set(other["words"]) == {"tp", "zero", "microbatches"} for other in found["runners_up"])


def test_values_that_no_plan_has_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = file_of(tmp_path, "tp = [2, 3]; zero = auto")
    run(file, {}, "full")
    assert re.search(r"\n  no plan has tp = 3 \(MOE03\d\d, .*\)\n$", capsys.readouterr().out)
    with pytest.raises(DiagnosticError, match=r"MOE0600.*this folder has no plan\.json"):
        run(file, {}, "full", None, tmp_path)
    with pytest.raises(DiagnosticError, match=r"MOE0600.*there is no such folder"):
        run(file, {}, "full", None, tmp_path / "old.plan")


@each_row(
    ("other", "code"),
    [("epp = 2", "MOE0201"), ("ep = 3", "MOE0505"), ("layers 1 { ep = 2 }", "MOE0101"), ("ep = 2, ep = 4", "MOE0204")],
)
def test_words_that_no_plan_has_are_refused(other: str, code: str, tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError) as refused:
        run(file_of(tmp_path), {}, "full", other)
    problems = refused.value.diagnostics
    assert code in {problem.code for problem in problems}
    assert {problem.span and problem.span.source for problem in problems} == {Source("--why-not", other)}


def test_a_rule_that_given_words_break_has_its_place_in_the_argument(tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError) as refused:
        run(file_of(tmp_path, "tp = 2"), {}, "full", "zero = 1, tp = 3")
    assert ("MOE0312", Span(Source("--why-not", "zero = 1, tp = 3"), 15, 16)) in {
        (problem.code, problem.span) for problem in refused.value.diagnostics
    }


def test_words_of_a_stated_file_are_compared_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(file_of(tmp_path, "tp = 2"), {}, "full", "zero = 1")
    out = capsys.readouterr().out
    assert "`zero = 1` takes " in out
    assert "plans" not in out


def test_what_does_not_fit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, file = "recompute = auto; microbatches = [1, 8]", tmp_path / "open.moe"
    peak = int(candidate_of(to_spec(text("ep = 4"))).prediction.memory.peak.bytes.total)
    file.write_text(text(words).replace("1GB", f"{peak - 1000}B"))
    run(file, {}, "full", "recompute = none, microbatches = 1")
    assert "\n  it does not fit: " in capsys.readouterr().out
    file.write_text(text("microbatches = 1").replace("1GB", f"{peak - 1000}B"))
    assert not run(file, {}, "json")[0]
    ways = json.loads(capsys.readouterr().out)["ways_out"]
    assert {"zero", "recompute", "microbatches"} <= {way["word"] for way in ways}
    assert all(way["memory_gb"] * 1e9 <= peak - 1000 for way in ways)
    assert [way["ranks"] for way in ways if not way["word"]] == [8]
    file.write_text(text(words).replace("1GB", "1KB"))
    assert not run(file, {}, "full")[0]
    assert re.search(r": it does not fit\n.*, of which none fits\n  no plan has ", capsys.readouterr().out, re.DOTALL)
    with pytest.raises(DiagnosticError, match=r"MOE0501.*; no plan of .* fits, and this one takes"):
        compile(file)


def test_a_plan_against_another_names_each_word_and_second(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before.moe", tmp_path / "after.moe"
    before.write_text(text("tp = 2; recompute = layer"))
    after.write_text(text("tp = 4; zero = 1"))
    run(after, {}, "json", None, before)
    found = json.loads(capsys.readouterr().out)
    changes = {(c["kind"], c["word"]): c["reshards"] for c in found["against"]["changes"]}
    assert changes == {("-", "dp"): True, ("~", "tp"): True, ("+", "zero"): True, ("-", "recompute"): False}
    run(after, {}, "full", None, before)
    added = [
        float(x.replace(" ", "")) for x in re.findall(r"^ +([+-] [\d.]+) s  ", capsys.readouterr().out, re.MULTILINE)
    ]
    difference = found["step_time_s"] - found["against"]["step_time_s"]
    assert sum(added) == pytest.approx(difference, abs=3e-3 * found["step_time_s"])


def test_a_file_without_a_cluster_is_for_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.moe"
    file.write_text(re.sub(r"^cluster .*\n", "", text("tp = 1", ranks=1), flags=re.MULTILINE))
    run(file, {}, "full")
    out = capsys.readouterr().out
    assert " on 1 × cpu (one_rank)" in out
    assert "\nno `cluster` in the file: one CPU process counts" in out
