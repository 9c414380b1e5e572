"""`moec inspect PLAN --memory`: what it prints is what the model of memory says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from support.plans import moe_text

from moec.cli import app
from moec.codegen.plan import Plan
from moec.commands.inspecting.memory_plot import BOTTOM, HEIGHT, TOP, svg
from moec.commands.inspecting.summary import peak_line, summary
from moec.driver import compile as compile_source
from moec.passes.cost.memory import Memory, memory_of


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan, Memory]:
    made = compile_source(moe_text(depth=6))
    path = tmp_path_factory.mktemp("memory") / "tiny.plan"
    made.save(path)
    return path, made, memory_of(made.program, made.spec)


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_json_has_every_moment_and_the_peak(plan: tuple[Path, Plan, Memory]) -> None:
    path, _, memory = plan
    found = json.loads(run(path, "--memory", "--json"))
    assert found["peak"]["total"] == pytest.approx(max(moment["total"] for moment in found["moments"]))
    assert found["peak"]["total"] == pytest.approx(memory.peak.bytes.total)
    assert len(found["moments"]) == len(memory.moments)
    assert [layer["layers"] for layer in found["layers"]] == [[0], [1, 2, 3, 4, 5]]


def test_text_marks_one_peak_and_shows_equal_layers_once(plan: tuple[Path, Plan, Memory]) -> None:
    path, _, memory = plan
    lines = run(path, "--memory").splitlines()
    (marked,) = (line for line in lines if line.endswith("  peak"))
    assert marked.split("  ")[1] == memory.peak.event
    assert sum(line.startswith("  layers 1..5 ") for line in lines) == 1
    assert any("layers more" in line for line in lines)


def test_the_plot_is_xml_with_a_bar_for_each_moment_and_kind(plan: tuple[Path, Plan, Memory], tmp_path: Path) -> None:
    path, _, memory = plan
    assert run(path, "--memory", "--svg", tmp_path / "m.svg") == f"wrote {tmp_path / 'm.svg'}\n"
    titles = [node.text for node in ElementTree.parse(tmp_path / "m.svg").iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == sum(size > 0 for moment in memory.moments for size in moment.bytes.of.values())


def test_the_plot_has_a_line_at_the_device_s_memory_if_it_is_near(plan: tuple[Path, Plan, Memory]) -> None:
    _, _, memory = plan
    peak = memory.peak.bytes.total
    for capacity, top in ((peak / 2, peak), (1.5 * peak, 1.5 * peak), (3 * peak, None)):
        dashed = re.findall(r'y1="(.*?)" .* stroke-dasharray', svg("m", memory, capacity))
        height = HEIGHT - TOP - BOTTOM
        assert dashed == ([] if top is None else [f"{TOP + height * (1 - capacity / top):.1f}"])


def test_json_beside_a_plot_is_all_of_the_standard_output(plan: tuple[Path, Plan, Memory], tmp_path: Path) -> None:
    path, *_ = plan
    assert json.loads(run(path, "--memory", "--json", "--svg", tmp_path / "m.svg"))["peak"]
    assert (tmp_path / "m.svg").exists()


def test_memory_of_a_chosen_rank_is_refused_in_one_line(plan: tuple[Path, Plan, Memory]) -> None:
    path, *_ = plan
    done = CliRunner().invoke(app, ["inspect", str(path), "--memory", "--rank", "1"])
    assert done.exit_code == 2
    assert "the rank with the most rows" in " ".join(done.output.replace("│", " ").split())


def test_the_summary_and_the_table_state_the_same_peak(plan: tuple[Path, Plan, Memory]) -> None:
    path, made, memory = plan
    line = peak_line(memory, made.spec.cluster.device.memory)
    assert run(path, "--memory").splitlines()[0] == f"tiny: {line}"
    assert f"  memory    {line}" in summary(made, made.program, Path("p.plan"), 0.0).splitlines()


def test_options_of_memory_need_it(plan: tuple[Path, Plan, Memory]) -> None:
    path, *_ = plan
    assert CliRunner().invoke(app, ["inspect", str(path), "--memory", "--fx"]).exit_code == 2
