"""Folders of checkpoints: schedules beside each other, links, broken neighbours, large extras."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest import mock

import pytest
from support.ranks.checkpoints import plan_of, train
from support.ranks.gloo_pool import GlooPool

import moec
from moec.runtime.checkpoint import writing
from moec.runtime.checkpoint.format import index
from moec.runtime.errors import JobError

ALONE = {"ranks": 1, "ep": 1}
TWO = {"ranks": 2, "ep": 2}


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_two_folders_have_schedules_of_their_own(tmp_path: Path) -> None:
    with moec.launch(plan_of(ALONE), device="cpu") as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        for step in range(4):
            train(job, model, optimizer, step, 1)
            job.checkpoint(tmp_path / "recent", model, optimizer, every=1, keep=1)
            job.checkpoint(tmp_path / "archive", model, optimizer, every=2)
    assert names_in(tmp_path / "recent") == ["4"]
    assert names_in(tmp_path / "archive") == ["2", "4"]


def test_a_step_that_goes_back_is_saved_again(tmp_path: Path) -> None:
    with moec.launch(plan_of(ALONE), device="cpu") as job:
        model = job.build(seed=1)
        model.set(step=100)
        job.save(tmp_path / "100", model).wait()
        job.load(tmp_path / "100", model)
        model.set(step=0)
        train(job, model, job.optimizer(model), 0, 2)
        assert job.checkpoint(tmp_path, model, every=2) is not None
    assert names_in(tmp_path) == ["100", "2"]


def test_a_link_and_a_broken_neighbour_are_no_checkpoints(tmp_path: Path) -> None:
    for name, head in (("infinite", '{"format": 1, "x": 1e999}'), ("surrogate", '{"format": 1, "x": "\\ud800"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoint.json").write_text(head)
    with moec.launch(plan_of(ALONE), device="cpu") as job:
        model = job.build(seed=1)
        job.save(tmp_path / "1", model).wait()
        (tmp_path / "best").symlink_to("1")
        assert moec.latest(tmp_path) == tmp_path / "1"
        model.set(step=2)
        job.save(tmp_path / "2", model, keep=1).wait()
        with pytest.warns(UserWarning, match=r"(infinite|surrogate) is left out: it has no valid checkpoint.json"):
            assert job.resume(tmp_path, model) == 2
    assert names_in(tmp_path) == ["2", "best", "infinite", "surrogate"]
    with pytest.raises(JobError, match="MOE0801"):
        index.parse_head(tmp_path, (tmp_path / "infinite" / "checkpoint.json").read_bytes())


def test_an_incomplete_checkpoint_is_no_fresh_start(tmp_path: Path) -> None:
    with moec.launch(plan_of(ALONE), device="cpu") as job:
        job.save(tmp_path / "1", job.build(seed=1))
    (tmp_path / "1" / "rank-00000.safetensors").unlink()
    assert moec.latest(tmp_path) is None
    with moec.launch(plan_of(ALONE), device="cpu") as job:
        model = job.build(seed=1)
        with pytest.raises(JobError, match=r"MOE0801.*rank-00000.safetensors: it is missing"):
            job.resume(tmp_path, model)


def test_a_script_that_exits_has_its_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moec.runtime.checkpoint.saves.LEAVING_SECONDS", 0.0)

    def script() -> None:
        with moec.launch(plan_of(ALONE), device="cpu") as job:
            job.save(tmp_path / "1", job.build(seed=1), numbers=list(range(300_000)))
            sys.exit()

    with pytest.raises(SystemExit):
        script()
    assert moec.latest(tmp_path) == tmp_path / "1"


def test_what_no_reader_would_take_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MAX_INDEX_BYTES", 100_000)
    with moec.launch(plan_of(ALONE), device="cpu") as job:
        model = job.build(seed=1)
        with pytest.raises(JobError, match=r"MOE0804.*limit is 100000"):
            job.save(tmp_path / "1", model, numbers=list(range(100_000))).wait()
        job.save(tmp_path / "2", model).wait()
    assert names_in(tmp_path) == ["2"]


def save_a_long_list(path: Path) -> int:
    with moec.launch(plan_of(TWO), device="cpu") as job:
        model = job.build(seed=1)
        numbers = list(range(10**6, 10**6 + 1_500_000))
        job.save(path, model, order={"of": numbers, "rank": job.rank}).wait()
        found = job.load(path, model)["order"]
        assert found["rank"] == job.rank
        return len(found["of"]) if found["of"] == numbers else 0


def test_an_extra_of_any_length_reaches_rank_0(gloo: GlooPool, tmp_path: Path) -> None:
    """Torch's store drops a connection that sends more than 8 MiB at once."""
    assert gloo.run(2, save_a_long_list, tmp_path / "a", initialize=False, timeout=120.0) == [1_500_000] * 2


def fail_on_rank_1(path: Path) -> str:
    with moec.launch(plan_of(TWO), device="cpu") as job:
        model = job.build(seed=1)
        failing = mock.Mock(side_effect=RuntimeError("no memory on this rank"))
        with mock.patch.object(writing, "write_shard", failing if job.rank == 1 else writing.write_shard):
            try:
                job.save(path, model).wait()
            except JobError as error:
                return str(error)
    return ""


def test_an_unexpected_error_of_one_rank_ends_the_save_on_all(gloo: GlooPool, tmp_path: Path) -> None:
    words = gloo.run(2, fail_on_rank_1, tmp_path / "a", initialize=False)
    assert words[0] == words[1]
    assert "MOE0812" in words[0]
    assert "rank 1" in words[0]
    assert "no memory on this rank" in words[0]
    assert names_in(tmp_path) == []
