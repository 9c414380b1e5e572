"""The training run that a model's checkpoints belong to. Needs no torch."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol


class Saved(Protocol):
    """The run's fields in the head of a checkpoint: `Run` has the same."""

    @property
    def run(self) -> str: ...
    @property
    def ancestors(self) -> tuple[tuple[str, int], ...]: ...
    @property
    def saved(self) -> int: ...


def new_id() -> str:
    """A new run's unique id."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class Run:
    """One training run, over all its restarts. `saved`: the number of its last saved or loaded checkpoint.

    `ancestors`: the earlier runs that it branched from, each as its id and the number of the checkpoint at the branch.
    `loaded`: the number of the checkpoint that this process resumed from, 0 if it began the run. `own`: the numbers of
    the checkpoints that this process has saved since.
    """

    id: str = field(default_factory=new_id)
    ancestors: tuple[tuple[str, int], ...] = ()
    saved: int = 0
    loaded: int = 0
    own: set[int] = field(default_factory=set, compare=False)

    @classmethod
    def of(cls, head: Saved) -> Run:
        """The run that resumes from a checkpoint. Checkpoints of format 1 name no run: a new run branches from them."""
        if not head.run:
            return cls(ancestors=(("", head.saved),))
        return cls(head.run, head.ancestors, head.saved, head.saved)

    def branch(self, saved: int | None = None) -> Run:
        """A new run that begins at a checkpoint of this one, by default the last."""
        saved = self.saved if saved is None else saved
        return Run(ancestors=(*self.ancestors, (self.id, saved)) if saved else self.ancestors)

    def with_checkpoint(self, saved: int) -> Run:
        """The run with one more checkpoint, saved by this process."""
        self.own.add(saved)
        return replace(self, saved=saved)

    def goes_on_in(self, heads: Iterable[Saved]) -> bool:
        """Whether another process has saved a later checkpoint of this run than the loaded one."""
        later_checkpoints = {head.saved for head in heads if head.run == self.id and head.saved > self.loaded}
        return self.loaded > 0 and not later_checkpoints <= self.own

    def has(self, head: Saved) -> bool:
        """Whether a checkpoint is of this run, or of an ancestor up to the branch."""
        return head.run == self.id or any(head.run == run and head.saved <= saved for run, saved in self.ancestors)
