"""Which training a model's checkpoints are of. Needs no torch."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol


class Saved(Protocol):
    """What the head of a checkpoint says of its run: `Run` has the same fields."""

    @property
    def run(self) -> str: ...
    @property
    def ancestors(self) -> tuple[tuple[str, int], ...]: ...
    @property
    def saved(self) -> int: ...


def new_id() -> str:
    """The id of a new run, unlike all others."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class Run:
    """One training, over all its restarts. `saved`: of its last checkpoint that was saved or loaded.

    `ancestors`: of each earlier run that it has branched from, the id, and `saved` of the checkpoint where it did.
    `loaded`: of the checkpoint that this process has gone on from, 0 if it began the run; `own`: of those that it has
    saved since.
    """

    id: str = field(default_factory=new_id)
    ancestors: tuple[tuple[str, int], ...] = ()
    saved: int = 0
    loaded: int = 0
    own: set[int] = field(default_factory=set, compare=False)

    @classmethod
    def of(cls, head: Saved) -> Run:
        """The run that goes on from a checkpoint. One of format 1 names no run: a new one branches from it."""
        if not head.run:
            return cls(ancestors=(("", head.saved),))
        return cls(head.run, head.ancestors, head.saved, head.saved)

    def branch(self, saved: int | None = None) -> Run:
        """A new run that begins at a checkpoint of this one, by default the last."""
        saved = self.saved if saved is None else saved
        return Run(ancestors=(*self.ancestors, (self.id, saved)) if saved else self.ancestors)

    def after(self, saved: int) -> Run:
        """The run with one more checkpoint."""
        self.own.add(saved)
        return replace(self, saved=saved)

    def goes_on_in(self, heads: Iterable[Saved]) -> bool:
        """Whether one of these is of the same run and later than what was loaded, and was not saved here."""
        later = {head.saved for head in heads if head.run == self.id and head.saved > self.loaded}
        return self.loaded > 0 and not later <= self.own

    def has(self, head: Saved) -> bool:
        """Whether a checkpoint is of this run, or of an ancestor before it has branched."""
        return head.run == self.id or any(head.run == run and head.saved <= saved for run, saved in self.ancestors)
