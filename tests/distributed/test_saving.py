"""Saving over several ranks: one error on every rank, nothing half-written, extras by data rank."""

from __future__ import annotations

import gc
import os
import re
import resource
import signal
import warnings
from collections import UserDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks.checkpoints import plan_of, train
from support.ranks.gloo_pool import GlooPool

import moec
from moec.runtime.errors import JobError

TWO = {"ranks": 2, "ep": 2}
FOUR = {"ranks": 4, "ep": 2, "tp": 2}
FOUR_OF_DATA = {"ranks": 4, "ep": 2}


def fail_on_rank_one(folder: Path) -> list[str]:
    """Rank 1 may write no file above 32 kB, as on a full disk, until the second save. The ranks' store is smaller."""
    said = []
    with moec.launch(plan_of(TWO), device="cpu") as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        train(job, model, optimizer, 0, 1)
        gc.collect()  # a store of an earlier job writes to its file when it goes
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if job.rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (32768, limits[1]))
        try:
            job.save(folder / "1", model, optimizer).wait()
        except JobError as error:
            said.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        train(job, model, optimizer, 1, 1)
        job.save(folder / "2", model, optimizer)
    return said


def test_half_a_save_raises_on_every_rank_and_leaves_nothing(gloo: GlooPool, tmp_path: Path) -> None:
    """am#3261: rank 0 raised and the others waited."""
    first, second = gloo.run(2, fail_on_rank_one, tmp_path)
    assert first == second
    assert len(first) == 1
    assert "MOE0804" in first[0]
    assert "rank 1: " in first[0]
    assert "File too large" in first[0]
    assert os.listdir(tmp_path) == ["2"]


def refused_on_every_rank(folder: Path) -> list[str]:
    said = []
    with moec.launch(plan_of(TWO), device="cpu") as job:
        model = job.build(seed=1)
        job.save(folder / "a", model).wait()

        def refuse(path: Path, **extras: Any) -> None:
            with pytest.raises(JobError) as error:
                job.save(path, model, **extras).wait()
            said.append(str(error.value))

        refuse(folder / "a")
        refuse(folder / f"of rank {job.rank}")
        refuse(folder / "b", only=object() if job.rank == 1 else 1)
        refuse(folder / "c", **({"more": 1} if job.rank == 1 else {}))
        refuse(folder / "c", keep=1 + job.rank)
        refuse(folder / "e", state=Large() if job.rank == 1 else Position(1))
        refuse(folder / "f", state=Broken() if job.rank == 1 else Position(1))
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        parameter = model.get_parameter("norm.weight")
        if job.rank == 1:
            plain.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        with pytest.raises(JobError) as error:
            job.save(folder / "d", model, plain)
        said.append(str(error.value))
        plain.state[parameter]["momentum_buffer"] = torch.zeros(parameter.shape)
        with pytest.raises(JobError) as error:
            job.save(folder / "d", model, plain)
        said.append(str(error.value))
        own = [torch.nn.Parameter(torch.zeros(3))] if job.rank == 1 else []
        with pytest.raises(JobError) as error:
            job.resume(folder / "nothing", model, torch.optim.SGD([*model.parameters(), *own]))
        said.append(str(error.value))
    return said


def test_ranks_agree_on_what_is_refused(gloo: GlooPool, tmp_path: Path) -> None:
    first, second = gloo.run(2, refused_on_every_rank, tmp_path)
    assert first == second
    exists, paths, kind, names, keep, memory, broken, states, state, foreign = first
    assert "MOE0803" in exists
    assert "MOE0811" in paths
    assert "ranks called job.save with different paths" in paths
    assert "MOE0808" in kind
    assert "rank 1" in kind
    for said, words in (
        (names, "extras of different names"), (keep, "different values of `keep`"), (states, "different optimizers"),
    ):  # fmt: skip
        assert re.search(f"MOE0811.*ranks called job.save with {words}", said)
    assert "MOE0812" in memory
    assert re.search("rank 1.*OutOfMemoryError: a copy of the state needs 1 TB", memory)
    assert re.search("MOE0812.*rank 1.*KeyError: 'cursor'", broken)
    assert "MOE0807" in state
    assert "momentum_buffer of norm.weight is a plain tensor [16], but the parameter is a DTensor [16] over 2" in state
    assert re.search(r"MOE0807.*rank 1.*has a parameter of shape \[3\] that is not in the model", foreign)
    assert os.listdir(tmp_path) == ["a"]


class Position:
    """A part of the data at which a rank is."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "state": torch.full((3,), self.position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["state"].tolist() == [state["position"]] * 3
        self.position = state["position"]


class Large(Position):
    """Its state does not fit into memory."""

    def __init__(self) -> None:
        super().__init__(1)

    def state_dict(self) -> dict[str, Any]:
        raise torch.OutOfMemoryError("a copy of the state needs 1 TB")


class Broken(Position):
    """Its state cannot be had."""

    def __init__(self) -> None:
        super().__init__(1)

    def state_dict(self) -> dict[str, Any]:
        raise KeyError("cursor")


def save_extras(folder: Path) -> None:
    with moec.launch(plan_of(FOUR), device="cpu") as job:
        model = job.build(seed=1)
        job.save(folder / "a", model, loader=Position(10 + job.data_rank), same=Position(3), by_rank=job.data_rank)
        with pytest.raises(JobError, match=r"MOE0808.*by_rank differs between ranks 0 and 1, .* `job.data_rank` 0"):
            job.save(folder / "b", model, by_rank=job.rank).wait()


def load_extras(options: dict[str, Any], folder: Path) -> Any:
    with moec.launch(plan_of(options), device="cpu") as job:
        model, loader, same = job.build(seed=1), Position(0), Position(0)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            plain = job.load(folder / "a", model, same=same)
        words = " ".join(str(warning.message) for warning in said)
        assert ("not loaded: " in words, "same: saved with 2 data ranks, and here are 1" in words) == (
            (job.rank == 0, job.data_size == 1)
        )
        try:
            job.load(folder / "a", model, loader=loader, same=same)
        except JobError as error:
            return job.data_rank, same.position, plain, str(error)
        return job.data_rank, same.position, plain, loader.position


def test_extras_that_differ_load_by_data_rank_and_under_as_many_only(gloo: GlooPool, tmp_path: Path) -> None:
    gloo.run(4, save_extras, tmp_path)
    for options in (FOUR, TWO):
        for data_rank, same, plain, position in gloo.run(options["ranks"], load_extras, options, tmp_path):
            assert (same, plain, position) == (3, {"by_rank": data_rank}, 10 + data_rank)
    ((_, same, plain, said),) = gloo.run(1, load_extras, {"ranks": 1, "ep": 1}, tmp_path)
    assert (same, plain) == (3, {})
    assert "MOE0809" in said
    assert "data_size 2, and here data_size is 1" in said


def load_other_things(folder: Path) -> list[str]:
    said = []
    with moec.launch(plan_of(TWO), device="cpu") as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        job.save(folder / "a", model, optimizer, epoch=1)
        for path, given, extras in (
            (f"a{job.rank}", optimizer, {}),
            ("a", optimizer if job.rank else None, {}),
            ("a", optimizer, {"epoch": {}} if job.rank else {}),
        ):
            with pytest.raises(JobError) as error:
                job.load(folder / path, model, given, **extras)
            said.append(str(error.value))
    return said


def test_ranks_that_load_other_things_say_so(gloo: GlooPool, tmp_path: Path) -> None:
    first, second = gloo.run(2, load_other_things, tmp_path)
    assert first == second
    for said, words in zip(
        first,
        (
            "ranks called job.load with different paths",
            "some ranks called job.load with an optimizer, others without one",
            "ranks called job.load with extras of different names",
        ),
        strict=True,
    ):
        assert re.search(f"MOE0811.*{words}", said)


class Refusing(UserDict[str, Any]):
    """A script's dict that takes no values."""

    def update(self, *_: Any) -> None:
        raise TypeError("this dict is read-only")


def load_into_a_dict_that_refuses(folder: Path) -> tuple[str, str]:
    """What both ranks raise, and the cause on each."""
    with moec.launch(plan_of(TWO), device="cpu") as job:
        model = job.build(seed=1)
        job.save(folder / "a", model, epoch={"of": 1}).wait()
        with pytest.raises(JobError) as error:
            job.load(folder / "a", model, epoch=Refusing() if job.rank == 1 else {})
        return str(error.value), repr(error.value.__cause__)


def test_an_error_of_one_ranks_own_dict_is_raised_on_every_rank(gloo: GlooPool, tmp_path: Path) -> None:
    (first, no_cause), (second, cause) = gloo.run(2, load_into_a_dict_that_refuses, tmp_path)
    assert first == second
    assert re.search("MOE0809.*rank 1: epoch.clear or epoch.update raised TypeError: this dict is read-only", first)
    assert (no_cause, cause) == ("None", "TypeError('this dict is read-only')")


def draw(options: dict[str, Any], folder: Path, *, saves: bool, seed: int | None = 7) -> tuple[int, float, str]:
    """The data rank, what its random state draws after a save or a resume, and the warnings of the resume.

    Before a resume every rank is seeded with `seed`, or if that is None, with its rank.
    """
    with moec.launch(plan_of(options), device="cpu") as job, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = job.build(seed=1)
        torch.manual_seed(job.data_rank if saves else job.rank if seed is None else seed)
        if saves:
            job.save(folder / "1", model).wait()
        else:
            job.resume(folder, model)
        return job.data_rank, torch.rand(1).item(), " ".join(str(warning.message) for warning in said)


def test_random_states_come_back_to_their_data_ranks_or_not_at_all(gloo: GlooPool, tmp_path: Path) -> None:
    """Saved under tp 2 x dp 2, and resumed under dp 4 by rank, pairs of data ranks drew identical batches."""
    drawn = dict(each[:2] for each in gloo.run(4, partial(draw, saves=True), FOUR, tmp_path))
    for options in (FOUR, TWO):
        for data_rank, number, said in gloo.run(options["ranks"], partial(draw, saves=False), options, tmp_path):
            assert (number, said) == (drawn[data_rank], "")
    numbers = gloo.run(4, partial(draw, saves=False), FOUR_OF_DATA, tmp_path)
    own = torch.Generator().manual_seed(7)
    assert {number for _, number, _ in numbers} == {torch.rand(1, generator=own).item()}
    assert "random states were saved with 2 data ranks, and here are 4" in numbers[0][2]
    assert "results depend" not in numbers[0][2]
    of_ranks = {"ranks": 1, "ep": 1, "balance": "[switch_loss(0.01)]", "beside": "group = rank"}
    ((_, _, said),) = gloo.run(1, partial(draw, saves=False), of_ranks, tmp_path)
    assert "saved with 2 data ranks, and here are 1: results depend on the number of data-parallel ranks" in said


def test_ranks_that_are_seeded_apart_do_not_all_take_the_random_state_of_one(gloo: GlooPool, tmp_path: Path) -> None:
    ((_, drawn, _),) = gloo.run(1, partial(draw, saves=True), {"ranks": 1, "ep": 1}, tmp_path)
    alike = gloo.run(2, partial(draw, saves=False), TWO, tmp_path)
    assert [(number, said) for _, number, said in alike] == [(drawn, "")] * 2
    apart = gloo.run(2, partial(draw, saves=False, seed=None), TWO, tmp_path)
    assert apart[0][1] != apart[1][1]
    assert "random states were saved with 1 data ranks, and here are 2" in apart[0][2]


def damaged_on_one_rank(folder: Path) -> tuple[str, bool, int, bool, list[str]]:
    """Rank 1 alone reads the damaged bytes of checkpoint 2: those of its experts. `resume` goes back to 1."""
    with moec.launch(plan_of(TWO), device="cpu") as job:
        model = job.build(seed=1)
        saved = [p.to_local().clone() for p in model.parameters()]
        for step in (1, 2):
            model.set(step=step)
            job.save(folder / str(step), model).wait()
        if job.rank == 1:
            shard = folder / "2" / "rank-00001.safetensors"
            content = bytearray(shard.read_bytes())
            experts = model.get_parameter("layers.1.moe.experts.up.weight").to_local().detach()
            at = content.find(experts[0, 0, 0].numpy().tobytes())
            content[at] ^= 64
            shard.write_bytes(content)
        other = job.build(seed=2)
        before = [p.to_local().clone() for p in other.parameters()]
        with pytest.raises(JobError) as error:
            job.load(folder / "2", other)
        unchanged = all(torch.equal(p.to_local(), b) for p, b in zip(other.parameters(), before, strict=True))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step = job.resume(folder, other)
        loaded = all(torch.equal(p.to_local(), s) for p, s in zip(other.parameters(), saved, strict=True))
        return str(error.value), unchanged, step, loaded, [str(warning.message) for warning in caught]


def test_a_flipped_byte_of_one_ranks_experts_is_raised_on_every_rank_and_all_resume_the_checkpoint_before(
    gloo: GlooPool, tmp_path: Path
) -> None:
    results = gloo.run(2, damaged_on_one_rank, tmp_path)
    for said, unchanged, step, loaded, _ in results:
        assert "MOE0801" in said
        assert "layers.1.moe.experts.up.weight: a digest does not match" in said
        assert unchanged
        assert loaded
        assert step == 1
    assert results[0][0] == results[1][0]
    ((warning,), nothing) = (warned for *_, warned in results)
    assert not nothing
    assert f"2 is damaged and is kept as {tmp_path / '2.damaged'}; {tmp_path / '1'} is resumed" in warning
    assert "MOE0801: rank 1: " in warning
    assert "layers.1.moe.experts.up.weight: a digest does not match" in warning
    assert sorted(os.listdir(tmp_path)) == ["1", "2.damaged"]


def average_saved_and_loaded(folder: Path) -> tuple[str, bool]:
    with moec.launch(plan_of(TWO | {"zero": 2}), device="cpu") as job:
        model = job.build(seed=1)
        average = torch.optim.swa_utils.AveragedModel(model)
        average.update_parameters(model)  # the first is a copy
        train(job, model, job.optimizer(model), 0, 2)
        average.update_parameters(model)
        with pytest.raises(JobError) as error:
            job.save(folder / "as an extra", model, average=average)
        job.save(folder / "average", average.module).wait()
        other = job.build(seed=2)
        job.load(folder / "average", other)
        pairs = zip(other.parameters(), average.module.parameters(), model.parameters(), strict=True)
        same = [(torch.equal(o.to_local(), a.to_local()), torch.equal(o.to_local(), m.to_local())) for o, a, m in pairs]
        return error.value.diagnostics[0].help, all(s for s, _ in same) and not all(s for _, s in same)


def test_an_average_of_the_model_is_saved_as_a_model_of_its_own(gloo: GlooPool, tmp_path: Path) -> None:
    for help, is_the_average in gloo.run(2, average_saved_and_loaded, tmp_path):
        assert "job.save(other_path, average.module)" in help
        assert is_the_average
