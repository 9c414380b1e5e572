"""`job.checkpoint`, `job.resume`, `moec.latest`: checkpoints at the right steps, and a way back."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.ranks.checkpoints import plan_of, train
from support.ranks.gloo_pool import GlooPool

import moec
from moec.runtime.checkpoint import schedule
from moec.runtime.checkpoint.format import temporary
from moec.runtime.checkpoint.format.temporary import MARK, Temporary
from moec.runtime.errors import JobError

ALONE = {"ranks": 1, "ep": 1}
TWO = {"ranks": 2, "ep": 2}


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def train_and_stop(folder: Path, stop: int, last: int) -> tuple[int, list[float]]:
    """Resumes and trains up to step `stop`, with a checkpoint every 2 steps."""
    with moec.launch(plan_of(TWO), device="cpu") as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        first, losses = job.resume(folder, model, optimizer), []
        for step in range(first, min(stop, last)):
            losses += train(job, model, optimizer, step, 1)
            job.checkpoint(folder, model, optimizer, every=2, keep=2)
        return first, losses


def test_a_run_that_stops_and_resumes_has_the_losses_of_one_that_does_not(gloo: GlooPool, tmp_path: Path) -> None:
    ((first, whole), _) = gloo.run(2, train_and_stop, tmp_path / "whole", 7, 7)
    assert first == 0
    assert names_in(tmp_path / "whole") == ["4", "6"]
    found = {}
    for stop in (3, 5, 7):
        for rank, (first, losses) in enumerate(gloo.run(2, train_and_stop, tmp_path / "stopped", stop, 7)):
            assert first == max(0, stop // 2 * 2 - 2)
            assert losses == whole[first:stop], f"rank {rank}"
            found |= dict(enumerate(losses, start=first))
    assert [found[step] for step in range(7)] == whole


def by_the_clock_of_rank_0(folder: Path) -> list[bool]:
    """Rank 1's clock stands still; rank 0's goes 10 s per step."""
    saved = []
    with moec.launch(plan_of(TWO), device="cpu") as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        now = [time.monotonic()]
        clock = type("Clock", (), {"monotonic": staticmethod(lambda: now[0])})
        plain, schedule.time = schedule.time, clock
        try:
            for step in range(4):
                train(job, model, optimizer, step, 1)
                now[0] += 10.0 if job.rank == 0 else 0.0
                saved.append(job.checkpoint(folder, model, optimizer, seconds=15.0) is not None)
        finally:
            schedule.time = plain
    return saved


def test_seconds_are_those_of_rank_0(gloo: GlooPool, tmp_path: Path) -> None:
    assert gloo.run(2, by_the_clock_of_rank_0, tmp_path) == [[False, True, False, True]] * 2
    assert names_in(tmp_path) == ["2", "4"]


@pytest.mark.parametrize(
    ("often", "message"),
    [
        ({}, "`job.checkpoint` does not know when to save"),
        ({"every": True}, "every must be a number of steps, at least 1, not True"),
        ({"seconds": True}, "seconds must be a number above 0, not True"),
        ({"on_signal": "SIGTERM"}, "on_signal must be the number of a signal, not 'SIGTERM'"),
        ({"every": 1, "keep": True}, "keep must be a number of checkpoints, at least 1, not True"),
        ({"every": 1, "kep": 1}, "`job.checkpoint` has no argument `kep`"),
        ({"evry": 1}, "`job.checkpoint` has no argument `evry`"),
        ({"every": 0}, "every must be a number of steps, at least 1, not 0"),
        ({"every": "2"}, "every must be a number of steps, at least 1, not '2'"),
        ({"seconds": 0.0}, "seconds must be a number above 0"),
        ({"every": 1, "keep": 0}, "keep must be a number of checkpoints, at least 1, not 0"),
        ({"every": 1, "keep": "all"}, "keep must be a number of checkpoints, at least 1, not 'all'"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(often: dict[str, Any], message: str, tmp_path: Path) -> None:
    with moec.launch(plan_of(ALONE), device="cpu") as job:
        model = job.build(seed=1)
        train(job, model, job.optimizer(model), 0, 1)
        with pytest.raises(ValueError, match=message):
            job.checkpoint(tmp_path, model, **often)


def test_of_two_jobs_that_save_to_one_name_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both pass the first check, write, and meet at the rename."""
    both = threading.Barrier(2)
    publish = Temporary.publish

    def together(folder: Temporary) -> None:
        both.wait(30)
        publish(folder)

    monkeypatch.setattr(Temporary, "publish", together)
    plan = plan_of(ALONE)
    with moec.launch(plan, device="cpu") as one, moec.launch(plan, device="cpu") as two:
        savings = [job.save(tmp_path / "a", job.build(seed=seed)) for job, seed in ((one, 1), (two, 2))]
        outcomes = []
        for saving in savings:
            try:
                outcomes.append(str(saving.wait()))
            except JobError as error:
                outcomes.append(str(error))
        (lost,) = [said for said in outcomes if "MOE0803" in said]
        assert "a: exists" in lost
        assert names_in(tmp_path) == ["a"]
        winner = [one, two][1 - outcomes.index(lost)]
        winner.load(tmp_path / "a", winner.build(seed=3))


def test_latest_is_the_highest_step_of_the_complete_ones(tmp_path: Path) -> None:
    assert moec.latest(tmp_path) is None
    assert moec.latest(tmp_path / "missing") is None
    with moec.launch(plan_of(ALONE), device="cpu") as job:
        model = job.build(seed=1)
        for step, name in ((2, "b"), (10, "a"), (30, "c"), (40, "d")):
            model.set(step=step)
            job.save(tmp_path / name, model).wait()
    (tmp_path / "d" / "checkpoint.json").unlink()
    with (tmp_path / "c" / "rank-00000.safetensors").open("ab") as stream:
        stream.write(b"x")
    (tmp_path / "note.txt").write_text("")
    assert moec.latest(tmp_path) == tmp_path / "a"


def test_keep_leaves_checkpoints_of_other_models_and_folders_that_are_being_written(tmp_path: Path) -> None:
    with moec.launch(plan_of({**ALONE, "depth": 2}), device="cpu") as job:
        model = job.build()
        for step in (5, 6, 7):
            model.set(step=step)
            job.save(tmp_path / str(step), model).wait()
        (tmp_path / "6" / "checkpoint.json").write_text("{}")
        written = Temporary(tmp_path / "8")
        left_over = tmp_path / f".4{MARK}x"
        left_over.mkdir()
        (left_over / "rank-00000.safetensors").write_text("x")
        model.set(step=9)
        job.save(tmp_path / "9", model, keep=1).wait()
    assert names_in(tmp_path) == [written.path.name, "6", "9"]
    written.discard()


def test_a_folder_without_locks_is_left_over_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(temporary.fcntl, "flock", no_locks)
    young, old = tmp_path / f".1{MARK}y", tmp_path / f".1{MARK}o"
    for path, age in ((young, 0.0), (old, 2 * temporary.STALE_SECONDS)):
        path.mkdir()
        os.utime(path, (time.time() - age,) * 2)
    with moec.launch(plan_of(ALONE), device="cpu") as job:
        job.save(tmp_path / "2", job.build(), keep=1)
    assert names_in(tmp_path) == [young.name, "2"]


def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    user, nobody = os.geteuid(), 65534
    tmp_path.chmod(0o555)
    try:
        with moec.launch(plan_of(ALONE), device="cpu") as job:
            model = job.build()
            os.seteuid(nobody if user == 0 else user)  # root may write to any folder
            with pytest.raises(JobError, match=r"MOE0804.*Permission denied"):
                job.save(tmp_path / "a", model).wait()
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o755)
    assert not names_in(tmp_path)
