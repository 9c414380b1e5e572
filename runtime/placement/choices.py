"""`moec.launch(plan, choices=…)`: a file of the homes and guests that were chosen, which a later run repeats.

A line of JSON for each choice; the first line names the plan. Only the first rank reads and writes it.
"""

from __future__ import annotations

import errno
import json
from bisect import bisect_right, insort
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moec.codegen.folder import digest
from moec.codegen.plan import Plan
from moec.passes.degrees.guest_slots import greedy_of
from moec.passes.ir.limits import MAX_SETTING
from moec.passes.ir.texts.text import print_program
from moec.runtime.errors import is_whole
from moec.runtime.placement.place import places_of
from moec.runtime.ranks.checks import Checks, Complaint
from moec.runtime.ranks.groups import HOST
from moec.runtime.ranks.watch import collective
from moec.runtime.unwritten import warn_unwritten
from moec.runtime.weights.slots import slots_complaint

Steps = dict[int, dict[int, Tensor]]
"""The tables of layers (`Guests.table`) at the beginning of a step, by its number, from 1."""


class PlacementChoices:
    """The recorded choices of a run, and the file to which further ones are added."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self._path, self._moves = path, greedy_of(plan.spec) is not None
        self._shapes = {place.number: place.shape for place in places_of(plan)}
        self._plan = digest(print_program(plan.program, spans=False).encode())
        self._head = json.dumps({"choices_of": self._plan})
        self._writes, self._has_head, self._text = True, False, ""
        self._steps: Steps = {}
        self._order = list[int]()
        """The keys of `_steps`, sorted."""

    def read(self) -> Complaint | None:
        """Reads the file, on the first rank, and cuts off a line that its writer did not finish. The complaint about a
        file that this plan cannot repeat, or None."""
        try:
            if not self._path.parent.is_dir():
                return self._refused(f"there is no folder {self._path.parent}")
            text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
            whole, end, rest = text.rpartition("\n")
            if not end and not self._head.startswith(rest):
                return self._refused("it is not a file of choices")
            if (complaint := self._take(whole + end)) is not None:
                return complaint
            self._text, self._has_head = whole + end, bool(end)
            if rest:
                with self._path.open("r+b") as file:
                    file.truncate(len(self._text.encode()))
            return None
        except (OSError, UnicodeError) as error:
            return self._refused(f"{type(error).__name__}: {error}")

    def _take(self, text: str) -> Complaint | None:
        """Takes the records of the lines of `text`."""
        for number, line in enumerate(text.split("\n")[:-1], 1):
            try:
                data = json.loads(line)
                if number == 1 and data["choices_of"] != self._plan:
                    return self._refused("it is of another plan")
                problem = self._take_step(data) if number > 1 else ""
            except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
                problem = f"cannot be read ({type(error).__name__}: {error})"
            if problem:
                return self._refused(f"line {number}: {problem}")
        return None

    def _take_step(self, data: Any) -> str:
        """Takes the record of a step; gives what is wrong with it, or nothing."""
        step = data["step"]
        if not is_whole(step) or not 0 < step < MAX_SETTING:
            return f"the step {step!r} is not the number of a step"
        tables = {int(layer): torch.tensor(rows, dtype=torch.int64) for layer, rows in data["slots"].items()}
        for layer, table in tables.items():
            if layer not in self._shapes:
                return f"layer {layer} has no slots"
            if problem := slots_complaint(table, *self._shapes[layer], moves=self._moves):
                return f"the slots of layer {layer} {problem}"
        self._keep(step, tables)
        return ""

    def _keep(self, step: int, tables: Mapping[int, Tensor]) -> None:
        if step not in self._steps:
            insort(self._order, step)
        self._steps.setdefault(step, {}).update(tables)

    def _refused(self, words: str) -> Complaint:
        help = "give the file of a run of this plan, or a path without a file: then choices are written there"
        return Complaint("MOE0753", f"{self._path}: {words}", help)

    def share(self, job: str) -> None:
        """Gives all ranks what the first one has read. A collective."""
        text = torch.tensor(list(self._text.encode()), dtype=torch.uint8)
        length = _from_first(torch.tensor(len(text)), job)
        text = _from_first(text.resize_(int(length)), job)
        self._take(bytes(text.tolist()).decode())

    def between(self, after: int, to: int) -> dict[int, Tensor]:
        """The tables recorded for steps behind `after`, up to `to`: of each layer the last one."""
        found = dict[int, Tensor]()
        for step in self._order[bisect_right(self._order, after) : bisect_right(self._order, to)]:
            found |= self._steps[step]
        return found

    @property
    def last(self) -> int:
        """The last step with a record; 0 without any."""
        return self._order[-1] if self._order else 0

    def add(self, step: int, tables: Mapping[int, Tensor], *, writes: bool) -> None:
        """Adds the tables of a step, which the first rank `writes`. A file that fails is named once, and left out."""
        self._keep(step, tables)
        if not writes or not self._writes:
            return
        record = {"step": step, "slots": {str(layer): table.tolist() for layer, table in tables.items()}}
        lines = [*([] if self._has_head else [self._head]), json.dumps(record)]
        content = "".join(f"{line}\n" for line in lines).encode()
        try:
            with self._path.open("ab", buffering=0) as file:
                if file.write(content) != len(content):
                    raise OSError(errno.ENOSPC, "only a part of a line was written", str(self._path))
            self._has_head = True
        except OSError as error:
            self._writes = False
            warn_unwritten(error)


def read_choices(path: Path, plan: Plan, checks: Checks, rank: int, job: str) -> PlacementChoices:
    """The recorded choices of a file, if there is one. A collective; raises MOE0753 on every rank."""
    choices = PlacementChoices(path, plan)
    checks.require("job.build", choices.read() if rank == 0 else None)
    choices.share(job)
    return choices


def _from_first(values: Tensor, job: str) -> Tensor:
    """The values of the first rank, of as many on every rank."""
    with collective("broadcast", job + HOST, "choices of placements") as peers:
        dist.broadcast(values, group=peers, group_src=0)
    return values
