"""`job.resume` goes back past damaged checkpoints, and past nothing else."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.plans import moe_plan, moe_text

import moec
from moec.driver import compile as compile_source
from moec.runtime.checkpoint.format.index import HEAD, INDEX, shard_name
from moec.runtime.errors import JobError
from moec.runtime.job.job import Job
from moec.runtime.model.module import PlanModule

SHARD = shard_name(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of steps 1, 2 and 3, each with weights of its own."""
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        for step in (1, 2, 3):
            model.set(step=step)
            with torch.no_grad():
                model.get_parameter("norm.weight").fill_(step)
            job.save(tmp_path / str(step), model, optimizer).wait()
    return tmp_path


def resumed(folder: Path, job: Job, **extras: Any) -> tuple[int, float, list[str]]:
    """The step, a weight, and the warnings."""
    return resumed_in(job.build(seed=2), folder, job, **extras)


def resumed_in(model: PlanModule, folder: Path, job: Job, **extras: Any) -> tuple[int, float, list[str]]:
    """`resumed`, in this model."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = job.resume(folder, model, job.optimizer(model), **extras)
    assert all(warning.filename == __file__ for warning in caught)
    return step, model.get_parameter("norm.weight")[0].item(), [str(warning.message) for warning in caught]


def flip(path: Path, place: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped byte of a tensor": (lambda path: flip(path / SHARD), "rng/cpu: a digest does not match"),
    "a flipped byte of the index": (lambda path: flip(path / INDEX, 300), "index.json"),
    "a flipped byte of the head": (lambda path: flip(path / HEAD, 300), "checkpoint.json"),
    "a truncated shard": (lambda path: truncate(path / SHARD), "bytes, but .* were written"),
    "no shard": (lambda path: (path / SHARD).unlink(), f"{SHARD}: it is missing"),
    "no index": (lambda path: (path / INDEX).unlink(), "index.json: it is missing"),
    "no head": (lambda path: (path / HEAD).unlink(), "checkpoint.json: it is missing"),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_the_newest_checkpoint_without_damage_is_resumed(folder: Path, damage: str) -> None:
    act, words = DAMAGES[damage]
    act(folder / "3")
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build(seed=2)
        step, weight, said = resumed_in(model, folder, job)
        assert (step, weight) == (2, 2.0)
        (warning,) = said
        assert re.search(f"3 is damaged and is kept as .*3.damaged; .*2 is .*MOE0801.*{words}", warning)
        assert sorted(os.listdir(folder)) == ["1", "2", "3.damaged"]
        # The run saves under the name of the damaged one, and `keep` counts checkpoints without damage.
        model.set(step=3)
        job.checkpoint(folder, model, every=1, keep=2)
    assert sorted(os.listdir(folder)) == ["2", "3", "3.damaged"]
    assert moec.latest(folder) == folder / "3"


def test_several_damaged_ones_are_passed_and_further_copies_kept(folder: Path) -> None:
    (folder / "3.damaged").mkdir()
    flip(folder / "3" / SHARD)
    truncate(folder / "2" / SHARD)
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        step, weight, said = resumed(folder, job)
    assert (step, weight, len(said)) == (1, 1.0, 2)
    assert sorted(os.listdir(folder)) == ["1", "2.damaged", "3.damaged", "3.damaged-2"]


def test_if_all_are_damaged_the_newest_ones_error_is_raised_and_nothing_changes(folder: Path) -> None:
    for name in "123":
        flip(folder / name / SHARD)
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build(seed=2)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(JobError, match=r"MOE0801.*/3/rank-00000.*rng/cpu") as error:
            job.resume(folder, model, job.optimizer(model))
        assert "move them away to start over" in error.value.diagnostics[0].help
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert sorted(os.listdir(folder)) == ["1", "2", "3"]


def newer_format(path: Path) -> None:
    head = path / HEAD
    head.write_bytes(head.read_bytes().replace(b'"format":2', b'"format":3'))


def test_a_newer_format_another_model_and_another_optimizer_are_raised(folder: Path) -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build(seed=2)
        with pytest.raises(JobError, match="MOE0806"):
            job.resume(folder, model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(JobError, match="MOE0809"):
            job.resume(folder, model, job.optimizer(model), progress={})
    with moec.launch(moe_plan(ranks=1, ep=1, experts=4), device="cpu") as job:
        model = job.build(seed=2)
        with pytest.raises(JobError, match="MOE0805") as raised:
            job.resume(folder, model)
        assert "added-tokens" not in str(raised.value)
    larger = compile_source(moe_text(ranks=1, ep=1).replace("vocab = 32", "vocab = 40"))
    with moec.launch(larger, device="cpu") as job, pytest.raises(JobError, match="MOE0805") as raised:
        job.resume(folder, job.build(seed=2))
    assert "docs/huggingface.md#added-tokens" in str(raised.value)
    newer_format(folder / "3")
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build(seed=2)
        with pytest.raises(JobError, match="MOE0802"):
            job.resume(folder, model)
    assert sorted(os.listdir(folder)) == ["1", "2", "3"]


def refusal(folder: Path) -> str:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build(seed=2)
        with pytest.raises(JobError) as error:
            job.resume(folder, model)
    return f"{error.value} {error.value.diagnostics[0].help}"


def test_a_checkpoint_or_a_file_in_place_of_the_folder_is_no_new_run(folder: Path) -> None:
    assert "is a checkpoint itself" in refusal(folder / "3")
    assert f"job.resume('{folder}'" in refusal(folder / "3")
    (folder / "file").write_text("", encoding="utf-8")
    assert "MOE0800" in refusal(folder / "file")
    loop = folder / "loop"
    loop.symlink_to(loop)
    assert "MOE0800" in refusal(loop)


@pytest.mark.parametrize("name", ["link", "best", "3.damaged"])
def test_a_folder_with_nothing_that_can_be_resumed_is_no_new_run(folder: Path, tmp_path: Path, name: str) -> None:
    parent = tmp_path / "of its own"
    parent.mkdir()
    if name == "link":
        (parent / name).symlink_to(folder / "3")
    else:
        (folder / "3").rename(parent / name)
    if name == "best":
        truncate(parent / name / HEAD)
    assert f"but {name}: " in refusal(parent)


def test_a_folder_without_a_valid_head_is_named_when_another_is_resumed(folder: Path) -> None:
    (folder / "3").rename(folder / "best")
    truncate(folder / "best" / HEAD)
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        step, weight, said = resumed(folder, job)
    assert (step, weight) == (2, 2.0)
    assert len(said) == 1
    assert "best is left out" in said[0]


def test_names_that_contain_damaged_are_checkpoints(folder: Path) -> None:
    (folder / "3").rename(folder / "before.damaged.disk")
    assert moec.latest(folder) == folder / "before.damaged.disk"
