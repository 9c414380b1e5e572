"""Random runs over one folder, which save, load, resume, fail, go back and are damaged, beside a model of the folder:
which run goes on from which checkpoint, with which bits, and what `keep` leaves."""

from __future__ import annotations

import hashlib
import os
import random
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.plans import moe_plan
from support.ranks.gloo_pool import GlooPool
from support.ranks.training import batches, own_part
from support.session import extent
from torch.optim.lr_scheduler import StepLR

import moec
from moec.codegen.plan import Plan
from moec.runtime.errors import JobError
from moec.runtime.job.job import Job
from moec.runtime.model.module import PlanModule

DEGREES = ({"ep": 2}, {"ep": 1, "zero": 3}, {"ep": 2, "tp": 2}, {"ep": 1}, {"ep": 2, "zero": 1})
RANKS, JOBS = 2, 6


@cache
def plan_of(number: int) -> Plan:
    return moe_plan(ranks=RANKS, depth=2, experts=4, **DEGREES[number])


@dataclass(frozen=True)
class Line:
    """A run: `number`, the places in all saves of its checkpoints and of those it has branched from, its last step."""

    number: int
    places: frozenset[int] = frozenset()
    step: int = 0

    @property
    def place(self) -> int:
        return max(self.places, default=0)


@dataclass
class Checkpoint:
    line: Line
    bits: object
    damaged: bool = False


class Folder:
    """What should be in the folder, by name."""

    def __init__(self) -> None:
        self.saved = dict[str, Checkpoint]()
        self.lines = self.places = 0

    def new_line(self, places: frozenset[int] = frozenset()) -> Line:
        self.lines += 1
        return Line(self.lines, places)

    def branch(self, line: Line) -> Line:
        return self.new_line(line.places)

    def after(self, name: str) -> Line:
        """The line that goes on from a checkpoint."""
        line = self.saved[name].line
        later = (c.line for c in self.saved.values() if c.line.number == line.number)
        return self.branch(line) if any(other.place > line.place for other in later) else line

    def last_first(self) -> list[str]:
        return sorted(self.saved, key=lambda name: -self.saved[name].line.place)

    def resumed(self) -> str | None:
        """The checkpoint that a resume loads, after damaged ones are set aside; empty if all are damaged."""
        if not self.saved:
            return None
        names = self.last_first()
        last = self.saved[names[0]].line
        own = [name for name in names if self.saved[name].line.place in last.places]
        whole = next((name for name in own if not self.saved[name].damaged), "")
        for name in own[: own.index(whole)] if whole else []:
            del self.saved[name]
        return whole

    def save(self, line: Line, step: int, bits: object, keep: int | None) -> Line:
        self.places += 1
        line = replace(line, step=step, places=line.places | {self.places})
        older = [n for n in self.last_first() if self.saved[n].line.number == line.number and not self.saved[n].damaged]
        self.saved[str(step)] = Checkpoint(line, bits)
        for name in older[keep - 1 :] if keep else []:
            del self.saved[name]
        return line


class InterruptedRunError(Exception):
    """What a script raises in the middle."""


def bits_of(model: PlanModule, optimizer: torch.optim.Optimizer, scheduler: StepLR, progress: dict[str, int]) -> object:
    """Equal for equal norms, experts, moments, learning rate and progress, whatever the degrees. A collective."""
    whole = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if "norm" not in name and "experts" not in name:
            continue
        state = optimizer.state.get(parameter, {})
        for tensor in (parameter, state.get("exp_avg"), state.get("exp_avg_sq")):
            if isinstance(tensor, torch.Tensor):
                tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                whole.update(tensor.detach().numpy().tobytes())
    return whole.hexdigest(), scheduler.get_last_lr(), dict(progress), model.settings["step"], model.settings["seed"]


def run_jobs(seed: int, path: Path) -> Counter[str]:
    """Several jobs, one after the other, as one rank of them; what happened, counted."""
    draws, folder, happened = random.Random(seed), Folder(), Counter[str]()
    for _ in range(JOBS):
        with suppress(InterruptedRunError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with moec.launch(plan_of(draws.randrange(len(DEGREES))), device="cpu", timeout=60) as job:
                run_job(job, draws, folder, path, happened)
        dist.barrier()
        found = {name for name in os.listdir(path) if ".damaged" not in name and not name.startswith(".")}
        assert found == set(folder.saved), (seed, found, folder.saved)
        if folder.saved and draws.random() < 0.15:
            name = draws.choice(folder.last_first()[:3])
            folder.saved[name].damaged = True
            if dist.get_rank() == 0:
                os.truncate(path / name / "rank-00000.safetensors", 9)
            happened["damaged"] += 1
        dist.barrier()
    return happened


def run_job(job: Job, draws: random.Random, folder: Folder, path: Path, happened: Counter[str]) -> None:
    model = job.build(seed=draws.randrange(3))
    optimizer, progress = job.optimizer(model), {"steps": 0}
    scheduler = StepLR(optimizer, 1, 0.9)
    parts = model, optimizer, scheduler, progress
    line, last = folder.new_line(), 0
    begins, whole = draws.choice(("resume", "resume", "resume", "load", "new")), sorted(folder.saved)
    whole = [name for name in whole if not folder.saved[name].damaged]
    name: str | None = None
    if begins == "resume":
        name = folder.resumed()
        if name == "":
            with pytest.raises(JobError, match="MOE0801"):
                job.resume(path, model, optimizer, scheduler=scheduler, progress=progress)
            happened["all damaged"] += 1
            return
        job.resume(path, model, optimizer, scheduler=scheduler, progress=progress)
    elif begins == "load" and whole:
        name = draws.choice(whole)
        job.load(path / name, model, optimizer, scheduler=scheduler, progress=progress)
    if name is not None:
        happened[begins] += 1
        assert bits_of(*parts) == folder.saved[name].bits, name
        line, last = folder.after(name), folder.saved[name].line.step
    if draws.random() < 0.15:
        line = folder.branch(line) if model.settings["step"] else line
        model.set(step=0)
    every, keep = draws.choice((1, 2, 3)), draws.choice((None, 1, 2, 3))
    for number in range(draws.randint(1, 5)):
        tokens, labels = batches(32, 8, 8, 1)[0]
        job.step(model, *own_part(job, tokens.roll(model.settings["step"], 0), labels))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        progress["steps"] += 1
        step = model.settings["step"]
        last = last if last <= step else 0
        due = step // every > last // every
        first = step if due else (step // every + 1) * every
        if str(first) in folder.saved and (number == 0 or due):
            with pytest.raises(JobError, match="MOE0803"):
                job.checkpoint(path, *parts[:2], every=every, keep=keep, scheduler=scheduler, progress=progress)
            happened["a name that is taken"] += 1
            return
        if due:
            line, last = folder.save(line, step, bits_of(*parts), keep), step
            happened["saves"] += 1
        job.checkpoint(path, *parts[:2], every=every, keep=keep, scheduler=scheduler, progress=progress)
        if draws.random() < 0.1:
            happened["interrupted"] += 1
            raise InterruptedRunError


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))])
def test_folders_of_random_runs_are_as_they_should_be(gloo: GlooPool, tmp_path: Path, first: int) -> None:
    happened = Counter[str]()
    for seed in range(first * 10, first * 10 + (10 if extent.everything else 2)):
        (tmp_path / str(seed)).mkdir()
        of_ranks = gloo.run(RANKS, run_jobs, seed, tmp_path / str(seed))
        happened += of_ranks[0]
        assert of_ranks[0] == of_ranks[1]
    print(dict(happened))  # with -s
    assert happened["resume"]
    assert happened["saves"]
