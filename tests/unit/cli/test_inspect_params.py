"""`moec inspect --params`: of a file and its plan, as text and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.plans import moe_text

from moec.cli import app
from moec.driver import compile as compile_source
from moec.passes.cost.totals import tally


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.moe"
    path.write_text(moe_text(depth=6), encoding="utf-8")
    return path


def run(*arguments: object, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    assert done.exit_code == status, done.output
    return done.output


def test_a_file_and_its_plan_have_the_same_counts(file: Path, tmp_path: Path) -> None:
    plan = compile_source(file)
    plan.save(tmp_path / "tiny.plan")
    found = json.loads(run(file, "--params", "--json"))
    assert found == json.loads(run(tmp_path / "tiny.plan", "--params", "--json"))
    tallied = tally(plan.program, plan.spec)
    assert (found["total"], found["active"]) == (tallied.parameters, tallied.active_parameters)
    assert (found["per_rank"], found["ranks"]) == (tallied.local_parameters, plan.world_size)
    assert [layer["layers"] for layer in found["layers"]] == [[0], [1, 2, 3, 4, 5]]
    for layer in found["layers"]:
        assert layer["total"] == sum(part["total"] for part in layer["parts"].values())


def test_text_has_the_notation_and_the_sums(file: Path) -> None:
    found = json.loads(run(file, "--params", "--json"))
    first, *_, last = run(file, "--params").splitlines()
    assert first.startswith(f"{found['name']}: {found['notation']}, on {found['ranks']} ranks")
    assert last.split() == ["all", *(f"{found[key]:,}" for key in ("total", "active", "per_rank"))]


def test_lets_change_the_counts(tmp_path: Path) -> None:
    file = tmp_path / "a.moe"
    file.write_text("let experts = 4\n" + moe_text(experts="experts"), encoding="utf-8")
    few, many = (json.loads(run(file, "--params", "--json", *let)) for let in ((), ("--let", "experts=8")))
    assert "-4E-" in few["notation"]
    assert "-8E-" in many["notation"]
    assert few["active"] < many["active"] < many["total"]


def test_what_does_not_fit_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "a.moe"
    file.write_text(moe_text(ranks=1, ep=1, memory="1KB"), encoding="utf-8")
    assert run(file, "--params").startswith("tiny: ")
    assert "MOE0501" in str(CliRunner().invoke(app, ["compile", str(file)]).exception.diagnostics[0].code)


def test_mistakes_are_refused(file: Path) -> None:
    run(file, "--params", "--memory", status=2)
    run(file, "--params", "--svg", file.with_suffix(".svg"), status=2)
