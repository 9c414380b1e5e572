"""Resumes from the last checkpoint of a folder that is not damaged."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from moec.codegen.plan import Plan
from moec.grammar.folder_kinds import kind_of
from moec.grammar.suggest import meant
from moec.runtime.checkpoint.content import require_optimizer
from moec.runtime.checkpoint.folders import SET_ASIDE, fault_of, heads_in, require_parent, set_aside, unlisted
from moec.runtime.checkpoint.format.faults import is_torch_folder, torch_folder
from moec.runtime.checkpoint.format.files import shown
from moec.runtime.checkpoint.loading import load
from moec.runtime.checkpoint.optimizer_state import require_members
from moec.runtime.checkpoint.runs import checkpoints_of_last_run
from moec.runtime.errors import JobError
from moec.runtime.model.module import PlanModule
from moec.runtime.model.plan_names import parameters_by_name
from moec.runtime.ranks.checks import Complaint
from moec.runtime.ranks.groups import HOST
from moec.runtime.ranks.watch import collective
from moec.runtime.script import warn

if TYPE_CHECKING:
    from moec.runtime.checkpoint.job_checkpoints import JobCheckpoints

NAME_BYTES = 256
"""The longest name of a file on common file systems, and a final NUL."""
MOST_LOOKS = 20
"""How often a resume lists a folder again if another job removes checkpoints meanwhile."""
CODE_OF_MISSING, CODE_OF_DAMAGE = "MOE0800", "MOE0801"


def resume(
    job: JobCheckpoints, folder: str | Path, model: PlanModule, optimizer: Optimizer | None, extras: Mapping[str, Any]
) -> int:
    """Loads the last complete checkpoint without damage. `Job.resume` describes it."""
    search, failure = _Search(Path(folder)), None
    job.checks.require("job.resume", job.saves.wait() or _complaint_about(job.plan, model, optimizer))
    while name := _agree_on_next(job, search, failure):
        try:
            load(job, Path(folder) / name, model, optimizer, extras, resumes=True)
        except JobError as error:
            failure = error
            if _code(error) not in (CODE_OF_MISSING, CODE_OF_DAMAGE):
                raise
        else:
            if job.rank == 0:
                search.end(name, model.settings["step"])
            break
    step = model.settings["step"]
    if not name and step and job.rank == 0:
        warn(
            f"there is no checkpoint in {shown(Path(folder).absolute())}: training goes on from step {step}, that of "
            "the weights that were loaded; `model.set(step=0)` before job.resume begins a new count"
        )
    elif not name and job.rank == 0 and (other := _misspelt(Path(folder))) is not None:
        missing = shown(Path(folder).absolute())
        warn(f"there is no {missing}: training begins at step 0; did you mean {shown(other)}, which has checkpoints?")
    return step


def _misspelt(folder: Path) -> Path | None:
    """If `folder` is missing: its parent, or a folder with nearly its name, whichever has checkpoints."""
    folder = folder.absolute()
    try:
        if folder.exists():
            return None
        if heads_in(folder.parent):  # `checkpoints/latest`
            return folder.parent
        other = meant(folder.name, [path.name for path in folder.parent.iterdir() if path.is_dir()])
        return folder.with_name(other) if other and heads_in(folder.with_name(other)) else None
    except (OSError, JobError):  # a hint may not end one rank alone
        return None


def _complaint_about(plan: Plan, model: PlanModule, optimizer: Optimizer | None) -> Complaint | None:
    """Why no checkpoint of the run could be saved later; None if it could."""
    try:
        named = parameters_by_name(model, plan)
        if optimizer is not None:
            require_members(require_optimizer(optimizer), named)
    except JobError as error:
        return Complaint.of(error)
    return None


class _Search:
    """Rank 0's search: the checkpoints of `folder` that are still to be tried, and the faults of those tried before."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._left: list[Path] | None = None
        self._current: Path | None = None
        self._damages: list[tuple[Path, JobError]] = []
        self._looks = MOST_LOOKS

    def next(self, failure: JobError | None) -> str:
        """The name of the next checkpoint; empty if there is none. `failure`: the error of loading the last one.

        Raises `JobError` for anything but damage, and if every checkpoint of the run is damaged.
        """
        if self._left is None:
            require_parent(self._folder)
            self._left = self._look()
        if failure is not None and self._current is not None and not self._looks_again():
            # A file that cannot be opened is a damage only if rank 0 misses it too.
            fault_here = failure if _code(failure) == CODE_OF_DAMAGE else fault_of(self._current)
            if fault_here is None or _code(fault_here) != CODE_OF_DAMAGE:
                raise failure
            self._damages.append((self._current, failure))
        while self._left:
            self._current = self._left.pop(0)
            fault = fault_of(self._current)
            if fault is None:
                return self._current.name
            if self._looks_again():
                continue
            if _code(fault) != CODE_OF_DAMAGE:
                raise fault
            self._damages.append((self._current, fault))
        if self._damages:
            first = self._damages[0][1].diagnostics[0]
            raise JobError(
                first.code,
                first.message,
                f"no checkpoint of the last run in {shown(self._folder)} is without damage: restore one, load another "
                "by `job.load`, or move them away to start over",
            )
        if others := unlisted(self._folder):
            raise JobError(
                "MOE0800",
                f"{shown(self._folder)} has no checkpoint to resume, but {', '.join(others[:3])}: a link, without a "
                "valid checkpoint.json, or set aside as damaged",
                "load it with `job.load`, give it a name and content of its own, or move it away to start over",
            )
        if is_torch_folder(self._folder):
            raise torch_folder(self._folder)
        if kind_of(self._folder) == "plan":
            raise JobError("MOE0800", f"{shown(self._folder)} is a plan", "name the folder of the checkpoints")
        return ""

    def _look(self) -> list[Path]:
        """The checkpoints of the run that has saved last, newest first, without those that are known to be damaged."""
        known = {path for path, _ in self._damages}
        return [path for path, _ in checkpoints_of_last_run(heads_in(self._folder)) if path not in known]

    def _looks_again(self) -> bool:
        """Whether the current checkpoint is gone, as when a trainer saves with `keep`: then there is a later one."""
        assert self._current is not None
        if os.path.lexists(self._current) or not self._looks:
            return False
        self._looks -= 1
        self._left = self._look()
        return True

    def end(self, name: str, step: int) -> None:
        """Renames damaged checkpoints, so that the run can save under their names; warns of what is not loaded."""
        checkpoints = heads_in(self._folder)
        resumed_run = {path for path, _ in checkpoints_of_last_run(checkpoints)}
        later = (path for path, head in checkpoints if path not in resumed_run and head and head.step > step)
        ahead = next(later, None)
        if ahead is not None:
            warn(
                f"{shown(ahead)} is of another run, and has a higher step; {shown(self._folder / name)} is resumed, of "
                "the run that has saved last"
            )
        for other in unlisted(self._folder):
            if not SET_ASIDE.search(other) and not (self._folder / other).is_symlink():
                warn(f"{shown(self._folder / other)} is left out: it has no valid checkpoint.json")
        for path, error in self._damages:
            aside = set_aside(path)
            kept = f"is kept as {shown(aside)}" if aside else "cannot be renamed"
            first = error.diagnostics[0]
            warn(
                f"{shown(path)} is damaged and {kept}; {shown(self._folder / name)} is resumed instead "
                f"({first.code}: {first.message})"
            )


def _agree_on_next(job: JobCheckpoints, search: _Search, failure: JobError | None) -> str:
    """The name of the checkpoint that rank 0 chooses, empty for none: other jobs may save or remove some meanwhile."""
    name, complaint = "", None
    if job.rank == 0:
        try:
            name = search.next(failure)
        except JobError as error:
            complaint = Complaint.of(error, is_on_all_ranks=True)
    job.checks.require("job.resume", complaint)
    if job.world_size == 1:
        return name
    buffer = torch.zeros(NAME_BYTES, dtype=torch.uint8)
    encoded = os.fsencode(name)
    buffer[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    with collective("broadcast", job.number + HOST, "job.resume") as peers:
        dist.broadcast(buffer, 0, group=peers)
    return os.fsdecode(bytes(buffer.tolist()).rstrip(b"\0"))


def _code(error: JobError) -> str:
    return error.diagnostics[0].code
