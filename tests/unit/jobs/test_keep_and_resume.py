"""What `keep` removes, and what `job.resume` says where it finds nothing that it can load."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import moec
from moec.runtime.errors import JobError
from moec.runtime.job.job import Job


def test_keep_removes_no_checkpoint_that_a_script_has_named(job: Job, tmp_path: Path) -> None:
    model = job.build()
    job.save(tmp_path / "pretrained", model)
    for step in range(1, 5):
        model.set(step=step)
        job.checkpoint(tmp_path, model, every=1, keep=1)
        if step == 2:
            job.save(tmp_path / "best", model)
            job.save(tmp_path / "before-3-layers", model)
    job.save(tmp_path / "step-4", model, keep=1).wait()
    assert sorted(os.listdir(tmp_path)) == ["4", "before-3-layers", "best", "pretrained", "step-4"]


def test_keep_removes_older_checkpoints_whose_names_differ_in_the_last_number_alone(job: Job, tmp_path: Path) -> None:
    model = job.build()
    for step in (8, 9, 10, 11):
        model.set(step=step)
        job.save(tmp_path / f"step-{step}", model, keep=2)
        job.save(tmp_path / f"{step:06}", model, keep=1).wait()
    assert sorted(os.listdir(tmp_path)) == ["000011", "step-10", "step-11"]


def test_a_checkpoint_that_is_due_comes_at_the_first_call_after_its_step(job: Job, tmp_path: Path) -> None:
    model = job.build()
    for step in (3, 7, 8):
        model.set(step=step)
        if saving := job.checkpoint(tmp_path, model, every=4):
            saving.wait()
    assert sorted(os.listdir(tmp_path)) == ["7", "8"]


def test_a_damaged_checkpoint_is_none_of_those_that_are_kept(job: Job, tmp_path: Path) -> None:
    model = job.build()
    for step in (1, 2):
        job.save(tmp_path / str(step), model).wait()
    next((tmp_path / "2").glob("*.safetensors")).write_bytes(b"")
    job.save(tmp_path / "3", model, keep=2).wait()
    assert (tmp_path / "1").is_dir()


class Drawing:
    """An extra whose loading draws."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        torch.rand(3)


def test_what_an_extra_draws_while_it_is_loaded_changes_no_later_number(job: Job, tmp_path: Path) -> None:
    model = job.build()
    job.save(tmp_path / "1", model, loader=Drawing()).wait()
    drawn = torch.rand(4)
    job.load(tmp_path / "1", model, loader=Drawing())
    assert torch.equal(torch.rand(4), drawn)


def test_a_keep_of_a_save_that_is_no_number_is_refused(job: Job, tmp_path: Path) -> None:
    with pytest.raises(moec.DiagnosticError, match="keep must be a number of checkpoints, at least 1, not 0"):
        job.save(tmp_path / "1", job.build(), keep=0)
    assert os.listdir(tmp_path) == []


def test_keep_leaves_the_checkpoints_of_other_runs(job: Job, tmp_path: Path) -> None:
    model = job.build(seed=1)
    for name in ("seed1-100", "lr0.1", "#"):
        job.save(tmp_path / name, model)
    for name in ("seed2-7", "seed2-8", "lr0.01-3", "20"):
        job.save(tmp_path / name, model, keep=1).wait()
    assert sorted(os.listdir(tmp_path)) == ["#", "20", "lr0.01-3", "lr0.1", "seed1-100", "seed2-8"]


def test_a_resume_that_finds_nothing_warns_of_the_step_of_loaded_weights(job: Job, tmp_path: Path) -> None:
    model = job.build()
    model.set(step=6)
    job.save(tmp_path / "weights", model).wait()
    model = job.build()
    optimizer = job.optimizer(model)
    job.load(tmp_path / "weights", model)
    with pytest.warns(UserWarning, match=r"no checkpoint in .*tuned: training goes on from step 6") as said:
        assert job.resume(tmp_path / "tuned", model, optimizer) == 6
    assert [warning.filename for warning in said] == [__file__]


def test_a_resume_from_a_misspelt_folder_warns_of_the_one_beside_it(job: Job, tmp_path: Path) -> None:
    model = job.build()
    job.save(tmp_path / "checkpoints" / "4", model).wait()
    words = r"no .*chekpoints: training begins at step 0; did you mean .*checkpoints, which"
    with pytest.warns(UserWarning, match=words) as said:
        assert job.resume(tmp_path / "chekpoints", model) == 0
    assert [warning.filename for warning in said] == [__file__]
    with pytest.warns(UserWarning, match=r"no .*latest: training begins at step 0; did you mean .*checkpoints, which"):
        assert job.resume(tmp_path / "checkpoints" / "latest", model) == 0
    (tmp_path / "run1").mkdir()
    job.save(tmp_path / "run1" / "4", model).wait()
    for new in ("run2", "checkpoints-of-b"):  # names of other runs: nothing to warn of
        assert job.resume(tmp_path / new, model) == 0


def test_a_plan_is_no_folder_of_checkpoints(job: Job, tmp_path: Path) -> None:
    job.plan.save(tmp_path / "a.plan")
    with pytest.raises(JobError, match=r"MOE0800.*a\.plan is a plan"):
        job.resume(tmp_path / "a.plan", job.build())


def test_an_optimizer_with_parameters_of_others_is_refused_before_the_first_step(job: Job, tmp_path: Path) -> None:
    model = job.build()
    job.save(tmp_path / "weights" / "0", model).wait()
    optimizer = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.zeros(3))])
    refused = re.escape("the optimizer has a parameter of shape [3] that is not in the model")
    for act in (
        lambda: job.resume(tmp_path / "nothing", model, optimizer),
        lambda: job.resume(tmp_path / "weights", model, optimizer),
        lambda: job.load(tmp_path / "weights" / "0", model, optimizer),
    ):
        with pytest.raises(JobError, match=f"MOE0807.*{refused}") as raised:
            act()
        assert "a second one" in (raised.value.diagnostics[0].help or "")


def test_a_second_optimizer_is_an_extra(job: Job, tmp_path: Path) -> None:
    model, own = job.build(), nn.Linear(2, 2)
    optimizer, second = job.optimizer(model), torch.optim.AdamW(own.parameters())
    own(torch.ones(2)).sum().backward()
    second.step()
    job.save(tmp_path / "1", model, optimizer, own=own, second=second).wait()
    wanted = own.weight.detach().clone(), second.state[own.weight]["exp_avg"].clone()
    other = nn.Linear(2, 2)
    its = torch.optim.AdamW(other.parameters())
    job.resume(tmp_path, model, optimizer, own=other, second=its)
    assert torch.equal(other.weight, wanted[0])
    assert torch.equal(its.state[other.weight]["exp_avg"], wanted[1])


def test_weights_without_an_optimizer_do_not_resume_and_the_help_has_a_way_out(job: Job, tmp_path: Path) -> None:
    model = job.build(seed=1)
    job.save(tmp_path / "run" / "0", model).wait()
    other = job.build(seed=2)
    optimizer = job.optimizer(other)
    with pytest.raises(JobError, match=r"MOE0806.*the checkpoint has no optimizer") as raised:
        job.resume(tmp_path / "run", other, optimizer)
    help = raised.value.diagnostics[0].help or ""
    assert "move it to another folder, and load it from there before job.resume" in help
    (tmp_path / "run" / "0").rename(tmp_path / "weights")
    job.load(tmp_path / "weights", other)
    assert job.resume(tmp_path / "run", other, optimizer) == 0
    assert torch.equal(other.head.weight, model.head.weight)


def test_folders_of_torch_are_named_and_their_way_out_works(job: Job, tmp_path: Path) -> None:
    model = job.build(seed=1)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "torch")
    other = job.build(seed=2)
    for act in (job.load, job.resume):
        with pytest.raises(JobError, match=r"MOE0800.*torch is a folder of torch.distributed.checkpoint") as raised:
            act(tmp_path / "torch", other)
        assert "`model.load_state_dict`" in (raised.value.diagnostics[0].help or "")
    state = other.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "torch")
    other.load_state_dict(state)
    assert torch.equal(other.head.weight, model.head.weight)
    job.save(tmp_path / "torch" / "1", other).wait()
    assert job.resume(tmp_path / "torch", other) == 0


def test_a_file_in_place_of_a_checkpoint_is_named(job: Job, tmp_path: Path) -> None:
    (tmp_path / "o.safetensors").write_bytes(b"")
    with pytest.raises(JobError, match=r"MOE0800.*o.safetensors is a file, and a checkpoint is a folder") as raised:
        job.load(tmp_path / "o.safetensors", job.build())
    assert "moec.latest" not in (raised.value.diagnostics[0].help or "")
