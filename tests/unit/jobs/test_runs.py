"""A run and its checkpoints: what `keep` removes and what a restart goes on from where a folder has several runs."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.plans import moe_plan

import moec
from moec.commands.checkpoints.checkpoint_list import checkpoints_of, lines
from moec.runtime.checkpoint import resuming
from moec.runtime.checkpoint.format.index import HEAD, head_bytes
from moec.runtime.checkpoint.format.reading import read_head
from moec.runtime.errors import JobError
from moec.runtime.job.job import Job
from moec.runtime.model.module import PlanModule


@pytest.fixture
def job() -> Iterator[Job]:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        yield job


def saved(job: Job, folder: Path, *steps: int, model: PlanModule | None = None) -> PlanModule:
    """A model that has saved at these steps."""
    model = model or job.build()
    for step in steps:
        model.set(step=step)
        job.save(folder / str(step), model).wait()
    return model


def said_by(act: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = act()
    assert all(warning.filename == __file__ for warning in caught)
    return result, [str(warning.message) for warning in caught]


def test_keep_counts_the_checkpoints_of_its_own_run(job: Job, tmp_path: Path) -> None:
    saved(job, tmp_path, 100, 200)
    model = job.build(seed=2)
    model.set(step=1)
    _, (said,) = said_by(lambda: job.checkpoint(tmp_path, model, every=50, keep=2))
    assert "has checkpoints of another run, the last of them 200: `keep` leaves them" in said
    assert said.endswith(f"The save at step 100 will fail: {tmp_path}/100 exists")
    for step in (30, 60, 90):
        model.set(step=step)
        assert said_by(lambda: job.checkpoint(tmp_path, model, every=30, keep=2))[1] == []
    assert moec.latest(tmp_path) in (tmp_path / "60", tmp_path / "90")
    other = job.build(seed=3)
    step, (said,) = said_by(lambda: job.resume(tmp_path, other))
    assert (step, other.settings["seed"]) == (90, 2)
    assert "200 is of another run, and has a higher step" in said
    assert sorted(os.listdir(tmp_path)) == ["100", "200", "60", "90"]
    other.set(step=91)
    job.save(tmp_path / "91", other, keep=1).wait()
    assert sorted(os.listdir(tmp_path)) == ["100", "200", "91"]


def test_a_first_save_under_a_name_that_is_taken_is_refused_at_the_first_step(job: Job, tmp_path: Path) -> None:
    saved(job, tmp_path, 4, 8)
    model = job.build()
    model.set(step=1)
    with pytest.raises(JobError, match=r"MOE0803.*/4: exists, and the first save") as raised:
        job.checkpoint(tmp_path, model, every=4)
    assert f"`job.resume({str(tmp_path)!r}, …)` before the first step" in (raised.value.diagnostics[0].help or "")
    model = job.build()
    job.resume(tmp_path, model)
    assert said_by(lambda: job.checkpoint(tmp_path, model, every=4)) == (None, [])


def test_a_run_that_goes_on_from_an_earlier_checkpoint_is_resumed_as_itself(job: Job, tmp_path: Path) -> None:
    model = saved(job, tmp_path, 2, 4, 8)
    job.load(tmp_path / "4", model)
    saved(job, tmp_path, 5, model=model)
    assert moec.latest(tmp_path) == tmp_path / "5"
    step, said = said_by(lambda: job.resume(tmp_path, job.build()))
    assert (step, len(said)) == (5, 1)
    # Its ancestors are those before it has branched.
    os.truncate(tmp_path / "5" / "rank-00000.safetensors", 0)
    assert said_by(lambda: job.resume(tmp_path, job.build()))[0] == 4
    assert sorted(os.listdir(tmp_path)) == ["2", "4", "5.damaged", "8"]


def test_a_load_in_the_middle_looks_at_the_folder_again(job: Job, tmp_path: Path) -> None:
    model = job.build()
    for step in range(1, 8):
        model.set(step=step)
        job.checkpoint(tmp_path, model, every=2)
    job.load(tmp_path / "4", model)
    model.set(step=5)
    with pytest.raises(JobError, match=r"MOE0803.*/6: exists, and the first save") as raised:
        job.checkpoint(tmp_path, model, every=2)
    assert raised.value.diagnostics[0].help == "save into another folder; or move it away"


@pytest.mark.parametrize("at_once", [False, True])
def test_two_trainings_from_one_checkpoint_are_two_runs(job: Job, tmp_path: Path, at_once: bool) -> None:
    """In one folder, the second one's `keep` removed the first one's checkpoints."""
    base = saved(job, tmp_path / "base", 2)
    runs, models = {base.run.id}, [job.build(), job.build()]
    for model in models if at_once else ():
        job.load(tmp_path / "base" / "2", model)
    for model, steps in zip(models, ((4, 6), (5, 7)), strict=True):
        if not at_once:
            job.load(tmp_path / "base" / "2", model)
        for step in steps:
            model.set(step=step)
            job.save(tmp_path / "apart" / f"{steps[0]}-{step}", model).wait()  # later than what the first has saved
            job.save(tmp_path / "out" / f"{step}", model, keep=1).wait()
        runs.add(model.run.id)
    assert sorted(os.listdir(tmp_path / "out")) == ["6", "7"]
    assert len(runs) == 2


def test_the_list_of_a_folder_has_runs_and_the_checkpoint_that_is_resumed(job: Job, tmp_path: Path) -> None:
    one = saved(job, tmp_path, 4, 8)
    other = saved(job, tmp_path, 2)
    found = checkpoints_of(tmp_path)
    assert [(each.name, each.run, each.latest) for each in found] == [
        ("2", other.run.id, True), ("8", one.run.id, False), ("4", one.run.id, False),
    ]  # fmt: skip
    assert any(line.split()[-3:] == [other.run.id[:8], "complete,", "latest"] for line in lines(tmp_path, found))


def test_to_load_the_last_checkpoint_is_to_go_on_with_its_run(job: Job, tmp_path: Path) -> None:
    saved(job, tmp_path, 2, 4)
    model = job.build()
    job.load(tmp_path / "4", model)
    model.set(step=6)
    job.save(tmp_path / "6", model, keep=1).wait()
    assert os.listdir(tmp_path) == ["6"]


def test_a_model_whose_step_goes_back_begins_a_run(job: Job, tmp_path: Path) -> None:
    model = saved(job, tmp_path, 8)
    model.set(step=0)
    for step, kept in ((9, {"8", "9"}), (2, {"2", "8", "9"})):
        model.set(step=step)
        job.save(tmp_path / f"{step}", model, keep=1).wait()
        assert set(os.listdir(tmp_path)) == kept
        other = job.build()
        assert said_by(lambda: job.resume(tmp_path, other))[0] == step  # noqa: B023 - called at once


def test_metrics_of_a_run_that_begins_with_loaded_weights_begin_anew(job: Job, tmp_path: Path) -> None:
    tokens = torch.arange(64).view(8, 8) % 32
    model = job.build()
    job.step(model, tokens, tokens.roll(1))
    job.save(tmp_path / "weights", model).wait()
    model = job.build()
    job.load(tmp_path / "weights", model)
    assert (job.steps, job.total_tokens) == (1, 64)
    model.set(step=0)
    with job.metrics(tmp_path / "run.jsonl") as metrics:
        metrics.step(model, job.step(model, tokens, tokens.roll(1)))
    record = json.loads((tmp_path / "run.jsonl").read_text())
    assert (record["step"], record["total_tokens"]) == (1, 64)


def test_only_the_last_run_is_resumed_even_if_it_is_damaged(job: Job, tmp_path: Path) -> None:
    saved(job, tmp_path, 8)
    saved(job, tmp_path, 2)
    os.truncate(tmp_path / "2" / "rank-00000.safetensors", 0)
    with pytest.raises(JobError, match=r"MOE0801.*/2/") as raised:
        job.resume(tmp_path, job.build())
    assert "load another by `job.load`" in (raised.value.diagnostics[0].help or "")


def test_checkpoints_of_format_1_are_resumed_by_their_steps(job: Job, tmp_path: Path) -> None:
    saved(job, tmp_path, 8)
    saved(job, tmp_path, 4)
    for path in tmp_path.iterdir():
        head = read_head(path).model_dump(exclude={"run", "ancestors", "saved", "digest"}) | {"format": 1}
        (path / HEAD).write_bytes(head_bytes(head))
    assert moec.latest(tmp_path) == tmp_path / "8"
    model = job.build()
    assert job.resume(tmp_path, model) == 8
    saved(job, tmp_path, 9, model=model)
    assert job.resume(tmp_path, model) == 9
    os.truncate(tmp_path / "9" / "rank-00000.safetensors", 0)
    assert said_by(lambda: job.resume(tmp_path, model))[0] == 8


def test_a_resume_waits_for_the_save_of_its_own_job(job: Job, tmp_path: Path) -> None:
    model = saved(job, tmp_path, 1)
    model.set(step=2)
    job.save(tmp_path / "2", model, numbers=list(range(200_000)), keep=1)
    assert said_by(lambda: job.resume(tmp_path, model))[0] == 2


def test_a_resume_looks_again_where_a_trainer_removes_checkpoints(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, tried, load = saved(job, tmp_path, 1, 2), list[str](), resuming.load

    def load_while_it_trains(job: Job, path: Path, *rest: Any, **named: Any) -> Any:
        tried.append(path.name)
        if path.name != "4":
            saved(job, tmp_path, int(path.name) + 1, model=trainer)
            shutil.rmtree(path)
        return load(job, path, *rest, **named)

    monkeypatch.setattr(resuming, "load", load_while_it_trains)
    step, said = said_by(lambda: job.resume(tmp_path, job.build()))
    assert (step, said, tried) == (4, [], ["2", "3", "4"])


def test_gradients_of_the_weights_before_a_load_join_no_step(job: Job, tmp_path: Path) -> None:
    model = saved(job, tmp_path, 1)
    tokens = torch.arange(64).view(8, 8) % 32
    job.step(model, tokens, tokens.roll(1))
    job.load(tmp_path / "1", model)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_options_that_the_checkpoint_replaces_are_named(job: Job, tmp_path: Path) -> None:
    def made(lr: float, **options: Any) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, **options)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    model = job.build()
    optimizer, scheduler = made(1e-3, weight_decay=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a scheduler before the first step of its optimizer
        scheduler.step()
    job.save(tmp_path / "1", model, optimizer, scheduler=scheduler).wait()

    def resume(*made: Any) -> list[str]:
        optimizer, scheduler = made
        said = said_by(lambda: job.resume(tmp_path, model, optimizer, scheduler=scheduler))[1]
        assert [group["lr"] for group in optimizer.param_groups] == [5e-4]
        return said

    assert resume(*made(1e-3, weight_decay=0.1)) == []
    told = "made with other options: lr 0.001, here 0.0003; weight_decay 0.1, here 0.2. Those of the checkpoint"
    for number in (2, 3):  # what a run goes on with does not become what it was made with
        optimizer, scheduler = made(3e-4, weight_decay=0.2)
        (said,) = resume(optimizer, scheduler)
        assert told in said
        job.save(tmp_path / str(number), model, optimizer, scheduler=scheduler).wait()
    assert resume(*made(1e-3, weight_decay=0.1)) == []
    for group in optimizer.param_groups:  # by hand, as one who has read it
        group["weight_decay"] = 0.2
    job.save(tmp_path / "4", model, optimizer, scheduler=scheduler).wait()
    (said,) = resume(*made(1e-3, weight_decay=0.1))
    assert "made with other options: weight_decay 0.2, here 0.1. Those of the checkpoint" in said
    # The scheduler alone: its optimizer's rate would stay wrong.
    _, alone = made(1e-3, weight_decay=0.1)
    _, (said,) = said_by(lambda: job.load(tmp_path / "1", model, scheduler=alone))
    assert "scheduler is at lr 0.0005, and its optimizer at lr 0.001: load the optimizer that" in said
