"""`moec.launch(plan, choices=…)`: a file of the homes and guests that were chosen, which a later run repeats.

A line of JSON for each choice; the first line names the plan. Only the first rank reads and
writes it.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moec.codegen.folder import digest
from moec.codegen.plan import Plan
from moec.passes.degrees.guest_slots import moves_of
from moec.passes.ir.limits import MAX_SETTING
from moec.passes.ir.texts.text import print_program
from moec.runtime.errors import is_whole
from moec.runtime.ranks.checks import Complaint
from moec.runtime.ranks.groups import HOST
from moec.runtime.ranks.watch import collective
from moec.runtime.unwritten import warn_unwritten
from moec.runtime.weights.slots import slots_complaint

Shapes = Mapping[int, tuple[int, int, int]]
"""Of each layer with slots: the ranks of its groups, its experts, and the slots of a rank for guests."""

Steps = dict[int, dict[int, Tensor]]
"""The tables of layers (`Guests.table`) at the beginning of a step, by its number, from 1."""


class PlacementChoices:
    """The recorded choices of a run, and the file to which further ones are added."""

    def __init__(self, path: Path, plan: Plan, shapes: Shapes) -> None:
        self._path, self._shapes, self._moves = path, shapes, moves_of(plan.spec) is not None
        self._plan = digest(print_program(plan.program, spans=False).encode())
        self._head = json.dumps({"choices_of": self._plan})
        self._writes, self._has_head = True, False
        self.steps: Steps = {}

    def read(self) -> Complaint | None:
        """Reads the file, on the first rank. The complaint about a file that this plan cannot repeat, or None."""
        try:
            text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
            *lines, rest = text.split("\n")
            if not lines and not self._head.startswith(rest):
                return self._refused("it is not a file of choices")
            if (complaint := self._take(lines)) is not None:
                return complaint
            self._has_head = bool(lines)
            if rest:  # a line that its writer did not finish
                with self._path.open("r+b") as file:
                    file.truncate(len(text.encode()) - len(rest.encode()))
            return None
        except (OSError, UnicodeError) as error:
            return self._refused(f"{type(error).__name__}: {error}")

    def _take(self, lines: list[str]) -> Complaint | None:
        for number, line in enumerate(lines, 1):
            try:
                data = json.loads(line)
                if number == 1 and data["choices_of"] != self._plan:
                    return self._refused("it is of another plan")
                complaint = self._take_step(data) if number > 1 else ""
            except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
                complaint = f"cannot be read ({type(error).__name__}: {error})"
            if complaint:
                return self._refused(f"line {number}: {complaint}")
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
            if complaint := slots_complaint(table, *self._shapes[layer], moves=self._moves):
                return f"the slots of layer {layer} {complaint}"
        self.steps.setdefault(step, {}).update(tables)
        return ""

    def _refused(self, words: str) -> Complaint:
        help = "give the file of a run of this plan, or a path without a file: then choices are written there"
        return Complaint("MOE0753", f"{self._path}: {words}", help)

    def share(self, job: str) -> None:
        """Gives all ranks what the first one has read."""
        rows = [
            torch.tensor([step, layer, *slots.flatten().tolist()])
            for step, layers in self.steps.items()
            for layer, slots in layers.items()
        ]
        longest = 2 + 2 * max(experts + ranks * guests for ranks, experts, guests in self._shapes.values())
        number = torch.tensor(len(rows))
        with collective("broadcast", job + HOST, "choices of guests") as peers:
            dist.broadcast(number, group=peers, group_src=0)
        flat = torch.full((int(number), longest), -1)
        for row, values in zip(flat, rows, strict=False):
            row[: len(values)] = values
        if len(flat):
            with collective("broadcast", job + HOST, "choices of guests") as peers:
                dist.broadcast(flat, group=peers, group_src=0)
        self.steps = {}
        for step, layer, *values in flat.tolist():
            ranks, experts, guests = self._shapes[layer]
            size = 2 * (experts + ranks * guests)
            self.steps.setdefault(step, {})[layer] = torch.tensor(values[:size]).view(2, ranks, -1)

    def add(self, step: int, tables: Mapping[int, Tensor], *, writes: bool) -> None:
        """Adds the tables of a step, which the first rank `writes`. A file that fails is named once, and left out."""
        self.steps.setdefault(step, {}).update(tables)
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
