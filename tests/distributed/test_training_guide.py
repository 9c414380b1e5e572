"""docs/training.md: every Python snippet runs on four ranks as it stands, and gives the numbers of plain PyTorch."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import guide_jobs
from support.ranks.gloo_pool import GlooPool

import moec
from moec import entry

ROUNDING = 1e-4
"""Of fp32 over a few steps, as a fraction of the largest weight or gradient."""
OTHER_PLAN = "tp = 2; ep = 2"
"""In place of the page's `ep = 2`: two ranks have the same tokens, and a part of the logits each."""

OnRanks = Callable[..., list[Any]]
"""`on_ranks(function)`: what it returned on each of the four ranks, which work in the folder of the plan."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's plan."""
    path = tmp_path_factory.mktemp("guide")
    moec.compile(guide_jobs.moe_file()).save(path / "guide.plan")
    return path


@pytest.fixture
def on_ranks(gloo: GlooPool, folder: Path) -> OnRanks:
    return partial(gloo.run, 4, _inside, str(folder))


@pytest.fixture(params=["with tp", pytest.param("the page's plan", marks=pytest.mark.slow)])
def under_both(request: pytest.FixtureRequest, gloo: GlooPool, folder: Path, tmp_path: Path) -> OnRanks:
    """`on_ranks` under the page's plan, and under one that cuts attention and the vocabulary too."""
    if request.param == "with tp":
        folder = tmp_path
        moec.compile(guide_jobs.moe_file().replace("ep = 2", OTHER_PLAN)).save(folder / "guide.plan")
    return partial(gloo.run, 4, _inside, str(folder))


def _inside(folder: str, function: Callable[..., Any], *arguments: Any) -> Any:
    with contextlib.chdir(folder):
        return function(*arguments)


def test_the_script_trains_as_plain_pytorch_does(on_ranks: OnRanks) -> None:
    (said, _), *others = found = on_ranks(guide_jobs.script)
    losses = [float(number) for line in said for number in re.findall(r"loss (\S+)", line)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 1
    assert not any(lines for lines, _ in others)
    assert max(off for _, off in found) < ROUNDING


def test_the_sampler_gives_every_sequence_to_one_data_rank(under_both: OnRanks) -> None:
    found = under_both(guide_jobs.data)
    parts = {data_rank: seen for seen, _, data_rank in found}
    for seen, _, data_rank in found:
        assert all(torch.equal(a, b) for a, b in zip(seen, parts[data_rank], strict=True))
    for epoch in range(2):
        given = torch.cat([seen[epoch] for seen in parts.values()]).tolist()
        assert sorted(given) == sorted(found[0][1].tolist())


def test_the_loss_is_over_global_labels_and_no_mean_of_means(under_both: OnRanks) -> None:
    for (of_model, of_sums, of_means), plain in under_both(guide_jobs.the_loss):
        assert of_model == pytest.approx(plain, rel=1e-5)
        assert of_sums == pytest.approx(plain, rel=1e-5)
        assert abs(of_means - plain) > 1e-4


@pytest.mark.parametrize("function", [guide_jobs.smoothed, guide_jobs.reinforced])
def test_a_loss_of_ones_own_is_that_of_plain_pytorch(under_both: OnRanks, function: Any) -> None:
    for loss, plain, off in under_both(function):
        assert loss == pytest.approx(plain, rel=1e-5)
        assert off < ROUNDING


def test_a_loss_outside_of_a_step_has_the_gradient_of_plain_pytorch(under_both: OnRanks) -> None:
    assert max(under_both(guide_jobs.by_hand)) < ROUNDING


def test_accumulated_gradients_are_those_of_one_step(under_both: OnRanks) -> None:
    assert max(under_both(guide_jobs.accumulated)) < ROUNDING


def test_the_norm_counts_every_parameter_once(under_both: OnRanks) -> None:
    for norm, plain, off, off_without_clipping in under_both(guide_jobs.clipped):
        assert norm == pytest.approx(plain, rel=1e-4)
        assert off < ROUNDING < off_without_clipping


def test_the_schedule_gives_the_rates_of_its_formula(on_ranks: OnRanks) -> None:
    for rates, off in on_ranks(guide_jobs.scheduled):
        assert rates[:4] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01, 0.01])
        assert rates[-1] == pytest.approx(0.01 * (0.1 + 0.9 * (1 + torch.cos(torch.tensor(torch.pi * 8 / 9))) / 2))
        assert off < ROUNDING


def test_evaluation_weighs_batches_by_their_labels(on_ranks: OnRanks) -> None:
    for loss, plain, off, training in on_ranks(guide_jobs.evaluated):
        assert loss == pytest.approx(plain, rel=1e-4)
        assert off < ROUNDING
        assert training


def test_only_what_is_not_frozen_changes(on_ranks: OnRanks) -> None:
    for off, only_mixtures in on_ranks(guide_jobs.frozen):
        assert off < ROUNDING
        assert only_mixtures


def test_averaged_weights_equal_an_average_made_by_hand(on_ranks: OnRanks, folder: Path) -> None:
    for of_average, of_weights, loss, plain in on_ranks(guide_jobs.averaged):
        assert max(of_average, of_weights) < ROUNDING
        assert loss == pytest.approx(plain, rel=1e-4)


def test_rank_0_writes_the_figures_of_every_second_step(on_ranks: OnRanks, folder: Path) -> None:
    assert max(on_ranks(guide_jobs.logged)) < ROUNDING
    lines = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert all({"loss", "grad_norm", "lr", "perplexity", "load"} <= line.keys() for line in lines)


@pytest.mark.parametrize("function", [guide_jobs.resumed, guide_jobs.completed])
def test_a_resumed_run_ends_with_the_bits_of_one_that_nobody_stopped(
    on_ranks: OnRanks, folder: Path, tmp_path: Path, function: Any
) -> None:
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "guide.plan").symlink_to(folder / "guide.plan")
    for equal, checkpoints, off in on_ranks(function, str(tmp_path)):
        assert equal
        assert checkpoints == ["4", "6"]
        assert off < ROUNDING
    if function is guide_jobs.completed:
        for name in ("whole", "stopped"):
            lines = [json.loads(line) for line in (tmp_path / name / "run.jsonl").read_text().splitlines()]
            assert [line["step"] for line in lines] == [2, 4, 6]
            assert [line.get("resumed") for line in lines] == [None, None, 4 if name == "stopped" else None]


def test_the_file_for_several_nodes_has_the_command_of_moec_launch_and_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = moec.compile(guide_jobs.file_for_nodes())
    plan.save("guide.plan")
    command, shown = re.findall(r"```console\n\$ (moec launch .*)\n(.*?)```", guide_jobs.PAGE, re.DOTALL)[0]
    monkeypatch.setattr(sys, "argv", command.split())
    with pytest.raises(SystemExit):
        entry.main()
    assert capsys.readouterr().out == shown
    names: dict[str, Any] = {}
    exec(guide_jobs.sections()["A script in three parts"][0], names)  # noqa: S102 - our own page
    tokens, labels = names["batch"](0)
    assert tokens.shape == labels.shape == (plan.world_size, 32)


def snippets_with_a_test() -> set[tuple[str, int]]:
    """Section and number of the snippets that functions of guide_jobs run, if a test here runs the function."""
    here = Path(__file__).read_text(encoding="utf-8")
    functions = ast.parse(Path(guide_jobs.__file__).read_text(encoding="utf-8")).body
    found = {("A script in three parts", number) for number in range(3)}  # `run` runs them around every other one
    for function in functions:
        if isinstance(function, ast.FunctionDef) and f"guide_jobs.{function.name}" in here:
            runs = [
                node for node in ast.walk(function) if isinstance(node, ast.Call) and ast.unparse(node.func) == "run"
            ]
            given = [[ast.literal_eval(argument) for argument in call.args] for call in runs]
            found |= {(section, number[0] if number else 0) for section, *number in filter(None, given)}
    return found


def test_every_snippet_has_its_test() -> None:
    sections = guide_jobs.sections()
    assert snippets_with_a_test() == {(name, number) for name in sections for number in range(len(sections[name]))}
