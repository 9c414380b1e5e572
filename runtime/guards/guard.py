"""What a guard is: it looks at what a script gives, at one event of a step, and warns or refuses.

A new guard is a file here with a `Guard`, and its line in `every_guard.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor, nn

from moec.grammar.spec import Spec
from moec.passes.ir import Program
from moec.runtime.inputs.batches import ImageLimits, Limits
from moec.runtime.inputs.beside import Beside, Takes
from moec.runtime.ranks.checks import Complaint


class Guarded(Protocol):
    """What guards know of a model. `seen`: what was looked at before; guards may add words of their own."""

    seen: set[object]
    training: bool
    takes: Takes
    limits: Limits | ImageLimits

    @property
    def spec(self) -> Spec: ...
    @property
    def program(self) -> Program: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...


@dataclass(frozen=True, slots=True)
class StepBegins:
    """The event before anything of a step: before the ranks agree."""

    model: Guarded

    @property
    def seen(self) -> set[object]:
        """What was looked at before."""
        return self.model.seen


@dataclass(frozen=True, slots=True)
class BatchAgreed:
    """The event after the ranks have agreed on the step's batch, before its first forward pass.

    `inputs`: all its tensors. `custom`: a user's function computes the loss or its divisor. `by_labels`: the number of
    valid labels of all ranks, `num_labels`, divides the loss. `look`: values may be read. `sums`: over all ranks, of
    the guards' `number`, and of its squares.
    """

    model: Guarded
    world_size: int
    data_size: int
    tokens: Tensor
    labels: Tensor
    beside: Beside
    inputs: tuple[Tensor | None, ...]
    custom: bool
    by_labels: bool
    look: bool
    num_labels: Tensor | None = None
    number: int = 0
    sums: tuple[int, int] = (0, 0)

    @property
    def seen(self) -> set[object]:
        """What was looked at before."""
        return self.model.seen


@dataclass(frozen=True, slots=True)
class LossComputed:
    """The event after a custom loss of a micro-batch, which then gets the ranks' agreement.

    `summed`: what the function `name` gave, None if that is refused already. `by_labels` as above. `group`: the name of
    the group of the `group_size` ranks that compute the same loss.
    """

    seen: set[object]
    name: str
    summed: Tensor | None
    labels: Tensor
    by_labels: bool
    group: str
    group_size: int


@dataclass(frozen=True, slots=True)
class LogitsGiven:
    """The event when a script gets whole `logits`, for a loss of its own outside of a step."""

    seen: set[object]
    logits: Tensor
    data_size: int


@dataclass(frozen=True, slots=True)
class StepEnds:
    """The event after the last backward pass. `graded`: the loss depends on the model's logits on some rank."""

    seen: set[object]
    graded: bool


Sight = TypeVar("Sight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard(Generic[Sight]):
    """Looks at an event, whose class is what it sees.

    `look` warns, or returns the complaint that stops the step; at `LossComputed` ranks may differ in it. `code`: of its
    complaint, "" for a warning. `waits`: it reads values, which on a GPU waits for the device. `when`: of which events
    it looks. `once`: a name in `seen`; it looks at the first of them alone. `number`: what it adds to the one agreement
    at the step's begin, an int below 2^20, 0 for nothing; at most one guard has one.
    """

    event: type[Sight]
    look: Callable[[Sight], Complaint | None]
    code: str = ""
    waits: bool = False
    when: Callable[[Sight], bool] = lambda sight: True
    once: str = ""
    number: Callable[[Sight], int] | None = None
