"""SIGKILL of a random rank at a random moment: torchrun's restarts go on by themselves, with the same losses."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from support.plans import moe_plan
from support.preloaded import environment, preloaded
from support.ranks.checkpoints import Options
from support.scripts import SCRIPTS
from support.scripts.killed_at_random import EVERY, GATE, KEEP, MOVING, PLANS, RESTARTS, STEPS, Kill, Position, Run

import moec
from moec.runtime.checkpoint.format.reading import Checkpoint, damages

SCRIPT = SCRIPTS / "killed_at_random.py"
SECONDS = 600.0
"""The most that a run may take, on a busy machine."""

MOMENTS = {
    "start": (0, 0.4),
    "launched": (0, 0.1),
    "resume": (0, 0.05),
    "step": (6, 0.05),
    "save": (2, 0.06),
    "leave": (0, 0.05),
    "move": (60, 0.002),
}
"""Where a rank is killed: the highest number of the place in an attempt, and the longest delay after it in seconds."""
OFTEN = ("start", "launched", "resume", "step", "step", "save", "save", "save", "save", "leave")


def drawn(generator: random.Random, folder: Path, start: float = 0.0) -> Run:
    """A run with one kill, in a third of the runs two or three. `start`: seconds that imports take."""
    plan = generator.choice(list(PLANS))
    kills = list[Kill]()
    for _ in range(generator.choice((1, 1, 1, 1, 2, RESTARTS))):
        place = generator.choice(OFTEN)
        number, delay = MOMENTS[place]
        longest = start if place == "start" and start else delay
        rank, times = generator.randrange(PLANS[plan]["ranks"]), generator.randint(0, number)
        kills.append(Kill(rank, place, times, round(generator.uniform(0, longest), 4)))
    return Run(str(folder), plan, tuple(kills))


def drawn_in_a_move(generator: random.Random, folder: Path) -> Run:
    """A run whose experts move, with one kill while they do."""
    number, delay = MOMENTS["move"]
    rank, times = generator.randrange(PLANS[MOVING]["ranks"]), generator.randint(0, number)
    return Run(str(folder), MOVING, (Kill(rank, "move", times, round(generator.uniform(0, delay), 5)),))


def under_torchrun(run: Run, interpreter: str) -> None:
    """Makes a run; its ranks, and torchrun, are processes of `interpreter`."""
    folder = Path(run.folder)
    folder.mkdir(parents=True, exist_ok=True)
    given = folder / "run.json"
    given.write_text(run.to_json(), encoding="utf-8")
    command = [interpreter, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.ranks)]
    command += ["--max-restarts", str(RESTARTS), str(SCRIPT), str(given)]
    variables = environment(PYTHON_EXEC=interpreter)
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=variables, check=False)
    assert done.returncode == 0, done.stderr


def log_of(run: Run) -> list[dict[str, Any]]:
    lines = (Path(run.folder) / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def losses_of(run: Run) -> list[float]:
    """The loss of each step. A step that was computed again must have the same bits."""
    found: dict[int, float] = {}
    for record in log_of(run):
        if "step" in record:
            assert found.setdefault(record["step"], record["loss"]) == record["loss"], f"{run}: step {record['step']}"
    assert sorted(found) == list(range(1, STEPS + 1)), f"{run}: steps are missing"
    return [found[step] for step in sorted(found)]


def require_survived(run: Run, expected: list[float]) -> Counter[str]:
    """Checks a run that was killed; counts its kills, and those during which a save was being written."""
    log, folder = log_of(run), Path(run.folder)
    kills = [record for record in log if "killed" in record]
    assert [record["killed"] for record in kills] == [kill.rank for kill in run.kills], f"{run}: other kills"
    assert losses_of(run) == expected, f"{run}: other losses"
    durable = 0
    for record in log:
        durable = max(durable, record.get("durable", 0))
        first = record.get("first", durable)
        assert first >= durable, f"{run}: began at {first} after {durable} was durable"
        assert first % EVERY == 0
    complete = sorted((int(name) for name in os.listdir(folder) if name.isdigit()), reverse=True)
    assert complete[:KEEP] == [STEPS - EVERY * i for i in range(KEEP)], f"{run}: {os.listdir(folder)}"
    for step in complete:
        assert list(damages(Checkpoint(folder / str(step)))) == [], f"{run}: {step}"
    save_once_more(folder, PLANS[run.plan])
    others = {name for name in os.listdir(folder) if not name.isdigit()}
    assert others == {"log.jsonl", "run.json"}, f"{run}: left over {others}"
    return Counter(kills=len(kills), while_saving=sum(bool(record["saves"]) for record in kills))


def save_once_more(folder: Path, options: Options) -> None:
    """On one rank, under another plan: loads the last checkpoint, and saves with `keep`."""
    alone = {name: value for name, value in options.items() if name not in ("tp", "zero", "adapt")}
    data_ranks = options["ranks"] // options.get("tp", 1)
    with moec.launch(moe_plan(gate=GATE, **{**alone, "ranks": 1, "ep": 1}), device="cpu") as job:
        model = job.build(seed=2)
        optimizer = job.optimizer(model)
        # Also of torch's random states, where the ranks' differ: those of processes that import torch by themselves do.
        with pytest.warns(UserWarning, match=f"saved with {data_ranks} data ranks, and here are 1") as told:
            assert job.resume(folder, model, optimizer, data=Position()) == STEPS
        assert any("data: saved with" in str(each.message) for each in told)
        model.set(step=STEPS + 1)
        job.save(folder / str(STEPS + 1), model, optimizer, keep=KEEP)
    assert sorted(int(name) for name in os.listdir(folder) if name.isdigit()) == [STEPS, STEPS + 1]


def killed_and_resumed(folder: Path, runs: list[Run], real: Collection[Run] = ()) -> Counter[str]:
    """Makes all runs, those of `real` with the real interpreter; checks each against one that is not killed."""
    whole = [Run(str(folder / "whole" / plan), plan, ()) for plan in PLANS if plan in {run.plan for run in runs}]
    for run in whole + runs:
        under_torchrun(run, sys.executable if run in real else preloaded())
    expected = {run.plan: losses_of(run) for run in whole}
    total = Counter[str]()
    for run in runs:
        total += require_survived(run, expected[run.plan])
    return total


def test_a_run_goes_on_by_itself_after_a_kill_while_it_saves(tmp_path: Path) -> None:
    run = Run(str(tmp_path / "killed"), "2 ranks, ep 2", (Kill(0, "save", 1, 0.002),))
    assert killed_and_resumed(tmp_path, [run])["kills"] == 1


@pytest.mark.slow
def test_fifty_runs_go_on_by_themselves_after_kills_at_random_moments(tmp_path: Path) -> None:
    """Ten of them with the real interpreter, so that kills fall into imports too."""
    generator = random.Random(14)
    real = [drawn(generator, tmp_path / f"{number}", start=5.0) for number in range(10)]
    runs = real + [drawn(generator, tmp_path / f"{number}") for number in range(10, 50)]
    total = killed_and_resumed(tmp_path, runs, real)
    places = Counter(kill.place for run in runs for kill in run.kills)
    print(f"{total['kills']} kills in 50 runs, {total['while_saving']} while saving; {dict(places)}")
    assert total["kills"] >= 50
    assert total["while_saving"] >= 5, "too few kills fell into a save"


@pytest.mark.slow
def test_twenty_runs_lose_nothing_to_kills_while_experts_move(tmp_path: Path) -> None:
    generator = random.Random(3)
    runs = [drawn_in_a_move(generator, tmp_path / f"{number}") for number in range(20)]
    assert killed_and_resumed(tmp_path, runs)["kills"] == 20
    places = Counter(record["place"] for run in runs for record in log_of(run) if "killed" in record)
    assert places == {"move": 20}
