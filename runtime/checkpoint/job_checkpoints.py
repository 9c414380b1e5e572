"""The methods of `Job` that save and load checkpoints."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from moec.runtime.calls import called
from moec.runtime.checkpoint.loading import load
from moec.runtime.checkpoint.options import SCHEDULE, require_extras, require_path
from moec.runtime.checkpoint.resuming import resume
from moec.runtime.checkpoint.saves import Saves
from moec.runtime.checkpoint.saving import save
from moec.runtime.checkpoint.schedule import save_if_due
from moec.runtime.checkpoint.writing import Saving
from moec.runtime.model.module import PlanModule
from moec.runtime.model.plan_names import require_own
from moec.runtime.ranks import groups
from moec.runtime.ranks.join import new_connection
from moec.runtime.ranks.running_job import RunningJob
from moec.runtime.weights.homes import MovedHomes


class JobCheckpoints(RunningJob):
    """The part of `Job` that saves and loads."""

    _saves: Saves | None = None
    _homes: list[MovedHomes]
    """Those of the models whose experts may move, in the order of `build`."""

    @property
    def saves(self) -> Saves:
        """The saves of this job. Raises `JobError` outside of `with`."""
        if self._saves is None or not self.is_running:
            raise groups.ended_error()
        return self._saves

    def _enter_more(self, stack: ExitStack) -> None:
        # A connection of its own: a thread that waits on a shared one would block the other threads.
        store = new_connection() if self.world_size > 1 else None
        self._saves = stack.enter_context(Saves(store, self.rank, self.world_size, self._watch))
        self._homes = []
        stack.push(self._restore_at_end)

    def _restore_at_end(self, kind: type[BaseException] | None, *_: object) -> None:
        """After a job that ends without an error, scripts find experts in their first homes."""
        for homes in self._homes if kind is None else ():
            homes.restore("the end of the job")

    @called("job.restore_homes")
    def restore_homes(self, model: PlanModule) -> None:
        """Moves experts back to their first homes, so that row i of every parameter and its states is expert i.

        With `greedy` in the file's `placement`, call it before a script reads or writes parameters itself; the next
        step moves experts again. `state_dict`, `load_state_dict`, `save` and `load` do so themselves. A collective:
        every rank must call it, or none.
        """
        require_own(model, self.plan, self.number)
        self.bring_home("job.restore_homes", model)

    def bring_home(self, call: str, model: PlanModule) -> None:
        """Moves experts that have moved to their first homes, for `call`."""
        complaint = model.open_step_complaint(f"{call} was called", "call it after `job.step` or `job.accumulate`")
        for homes in model.homes_inside():
            homes.restore(call, complaint)

    @called("job.save")
    def save(
        self, path: str | Path, model: PlanModule, optimizer: Optimizer | None = None, *, keep: int | None = None,
        **extras: Any,
    ) -> Saving:  # fmt: skip
        """Saves model, optimizer and extras to the new folder `path`. A later `load` may have any plan of the model.

        Returns when tensors are copied to host memory; a thread writes them. The handle's `wait()` returns when the
        checkpoint is durable, and raises if it failed; so do the next save and leaving the job. `keep=N` then leaves
        the new one and the last N - 1 of the others: of its run, in the folder of `path`, with names that equal its own
        but for the last number. Others, such as `best` beside `step-20`, are never removed.

        Extras: objects with `state_dict`, and plain data (docs/checkpoints.md). Raises `JobError` on every rank:
        MOE0803 if `path` exists, MOE0807 and MOE0808 for what cannot be stored. A collective.
        """
        require_path("job.save", "path", path, ", model, optimizer")
        require_extras("job.save", extras, ("keep",), optimizer)
        require_own(model, self.plan, self.number)
        return save(self, path, model, optimizer, keep, extras)

    @called("job.load")
    def load(
        self, path: str | Path, model: PlanModule, optimizer: Optimizer | None = None, **extras: Any
    ) -> dict[str, Any]:  # fmt: skip
        """Loads a checkpoint into the model's parameters, the optimizer and the extras; each rank reads its part.

        With and without optimizer, it restores the model's settings (`seed`, `step`), `job.steps` and
        `job.total_tokens`, and on as many data ranks torch's random state; it drops gradients. For a new run with these
        weights call `model.set(step=0, seed=…)` next. A converted file has step 0 and no seed (docs/checkpoints.md).

        Returns the extras that are plain data. Raises `JobError` on every rank, and changes nothing, for a checkpoint
        that is damaged (MOE0801) or of another model (MOE0805), optimizer (MOE0806) or extra (MOE0809), and for an
        optimizer over other parameters than the model's (MOE0807); but if a method
        of an extra raises (MOE0809), model and optimizer are loaded by then. A collective.
        """
        require_path("job.load", "path", path, ", model, optimizer")
        require_extras("job.load", extras, (), optimizer)
        require_own(model, self.plan, self.number)
        with torch.inference_mode(False):
            return load(self, path, model, optimizer, extras)

    @called("job.checkpoint")
    def checkpoint(
        self,
        folder: str | Path,
        model: PlanModule,
        optimizer: Optimizer | None = None,
        *,
        every: int | None = None,
        seconds: float | None = None,
        on_signal: int | None = None,
        keep: int | None = None,
        **extras: Any,
    ) -> Saving | None:
        """Saves to `folder/STEP` at steps that `every` divides, or at the first call after one.

        Call it after each step. STEP is the model's setting `step`. With `seconds`, it also saves when rank 0's clock
        says that they have passed since the last. With `on_signal=signal.SIGTERM`, the call after a SIGTERM to any
        rank, from the first call on, saves, waits until the checkpoint is durable, and ends every rank by the signal's
        default effect: it does not return. With `seconds` or `on_signal` ranks agree in each call. `keep` is that of
        `save`: it removes checkpoints of this run with numbers as names, and no others. The first call, and the first
        after a load, warns of other runs in the folder, and raises MOE0803 if the first save would have a name that is
        taken.
        """
        require_path("job.checkpoint", "folder", folder, ", model, optimizer")
        require_extras("job.checkpoint", extras, (*SCHEDULE, "keep"), optimizer)
        require_own(model, self.plan, self.number)
        return save_if_due(
            self, folder, model, optimizer, every=every, seconds=seconds, on_signal=on_signal, keep=keep,
            extras=extras,
        )  # fmt: skip

    @called("job.resume")
    def resume(
        self, folder: str | Path, model: PlanModule, optimizer: Optimizer | None = None, **extras: Any
    ) -> int:  # fmt: skip
        """Loads the last complete checkpoint in `folder`, if there is one; returns the model's `step` afterwards.

        It takes the run that has saved last, with what that has branched from (docs/checkpoints.md). Where there is
        none, nothing changes: the step is 0 in a new model, and that of the weights in one that has loaded some, of
        which rank 0 warns. A damaged one is renamed to `NAME.damaged`, with a warning, and the one before it is loaded.
        If all of the run are damaged, the newest's MOE0801 is raised. A model or an optimizer with parameters that the
        plan does not have is MOE0710 or MOE0807, also where nothing is found. Other errors are `load`'s.
        """
        require_path("job.resume", "folder", folder, ", model, optimizer")
        require_extras("job.resume", extras, (), optimizer)
        require_own(model, self.plan, self.number)
        with torch.inference_mode(False):
            return resume(self, folder, model, optimizer, extras)
