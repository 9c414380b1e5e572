"""The class of guards, and their events. A guard looks at one event of a script, and warns or refuses.

A new guard is a file here with a `Guard`, and its line in `every_guard.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from torch import Tensor, nn

from moec.grammar.spec import Spec
from moec.passes.ir import Program
from moec.runtime.inputs.batches import ImageLimits, Limits
from moec.runtime.inputs.extra_inputs import AcceptedInputs, ExtraInputs
from moec.runtime.ranks.checks import Complaint


class Guarded(Protocol):
    """The parts of a model that guards read.

    `seen`: names that guards and `Checks` have noted for this model, such as those of `once`.
    """

    seen: set[object]
    training: bool
    takes: AcceptedInputs
    limits: Limits | ImageLimits

    @property
    def spec(self) -> Spec: ...
    @property
    def program(self) -> Program: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...


class Hosted(Protocol):
    """A layer in a plain PyTorch model, for guards. `hosts`: the wrappers around it when it was last called."""

    hosts: tuple[object, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """The base of all events.

    `seen`: names that guards and `Checks` have noted for this model, such as those of `once`. `reads_values`: whether
    guards may read tensors' values, as `checks` or `on_nonfinite` says. `site`: the name of the ranks' agreement.
    """

    seen: set[object] = field(default_factory=set)
    reads_values: bool = False
    site: str = ""


@dataclass(frozen=True, slots=True)
class WrapperAsks(Event):
    """The event when the wrapper of this name asks a model which parameters are no replicas."""

    wrapper: str


@dataclass(frozen=True, slots=True)
class PassBegins(Event):
    """The event when a model is called, before its ranks agree."""

    module: nn.Module
    device_type: str


@dataclass(frozen=True, slots=True)
class ModelRecomputed(Event):
    """The event when backward computes a pass of the whole model again.

    `draws`: the pass draws random numbers. `accumulated`: it was in a block of `job.accumulate` that has ended.
    """

    draws: bool
    accumulated: bool


@dataclass(frozen=True, slots=True)
class LayerRecomputed(Event):
    """The event when backward computes a layer again. `lost_aux_loss`: the first pass gave an `aux_loss` without a
    gradient, though the layer trains."""

    lost_aux_loss: bool


@dataclass(frozen=True, slots=True)
class LayerCalled(Event):
    """The event when a layer of these `ranks` is called, before they agree; `experts` is its module of experts."""

    layer: Hosted
    experts: nn.Module
    ranks: Sequence[int]


@dataclass(frozen=True, slots=True)
class StatesRead(Event):
    """The event before ranks agree on a pass that reads these states. `states` gives them by their full names."""

    states: Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class LayerBegins(StatesRead):
    """The event before ranks agree on a pass of a layer.

    `stepped`: an optimizer has stepped, and `moec.end_step` has not been called since. `rounded` gives the name of a
    weight that was narrowed before the layer reads it, or nothing.
    """

    stepped: bool
    rounded: Callable[[], str]


@dataclass(frozen=True, slots=True)
class StepBegins(Event):
    """The event before anything of a step: before the ranks agree."""

    model: Guarded


@dataclass(frozen=True, slots=True)
class BatchAgreed(Event):
    """The event after the ranks have agreed on the step's batch, before its first forward pass.

    `inputs`: all its tensors. `custom`: a user's function computes the loss or its divisor. `by_labels`: the number of
    valid labels of all ranks, `num_labels`, divides the loss. `sums`: over all ranks, of the guards' `number`, and
    of its squares.
    """

    model: Guarded
    world_size: int
    data_size: int
    tokens: Tensor
    labels: Tensor
    extra: ExtraInputs
    inputs: tuple[Tensor | None, ...]
    custom: bool
    by_labels: bool
    num_labels: Tensor | None = None
    number: int = 0
    sums: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class LossComputed(Event):
    """The event after a custom loss of a micro-batch, before the ranks agree on it.

    `summed`: the result of the function `name`; None if it is refused already. `by_labels` as in `BatchAgreed`.
    `group`, `group_size`: the name and size of the group whose ranks compute the same loss. `stage_size`: the number of
    ranks of the last pipeline stage, which alone compute losses.
    """

    name: str
    summed: Tensor | None
    labels: Tensor
    by_labels: bool
    group: str
    group_size: int
    stage_size: int


@dataclass(frozen=True, slots=True)
class LogitsGiven(Event):
    """The event when a script gets whole `logits`, for a loss of its own outside of a step."""

    logits: Tensor
    data_size: int


@dataclass(frozen=True, slots=True)
class StepEnds(Event):
    """The event after the last backward pass. `depends_on_logits`: the loss does, on some rank."""

    depends_on_logits: bool


@dataclass(frozen=True, slots=True)
class PassEnds(Event):
    """The event after a pass. `unscored` has a mask of the tokens without scores for each of `routers`."""

    unscored: Sequence[Tensor]
    routers: Sequence[str]


@dataclass(frozen=True, slots=True)
class TokensChosen(Event):
    """The event when generation has chosen a token of each sequence, but for those of `impossible`, bool `[batch]`."""

    impossible: Tensor


@dataclass(frozen=True, slots=True)
class LossSummed(Event):
    """The event when the step's loss over all ranks is known. `steps`: number of steps before this one."""

    steps: int
    loss: Tensor


@dataclass(frozen=True, slots=True)
class NormTaken(Event):
    """The event when the norm of the gradients of all ranks is known; `gradients` are this rank's, by name."""

    steps: int
    norm: Tensor
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class OptimizerSteps(Event):
    """The event before an optimizer of the job reads gradients of these parameters, whose norm was not taken."""

    steps: int
    model: nn.Module
    parameters: Sequence[nn.Parameter]


EventT = TypeVar("EventT", bound=Event)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard(Generic[EventT]):
    """Looks at the events of one class.

    `look` warns, or returns the complaint that stops the step. `code`: of its complaint, "" for a warning. `agreed`:
    ranks may differ in the complaint, and agree on it before one raises; else it is the same on every rank. `waits`: it
    reads values at each event, which on a GPU waits for the device, so it looks only at events with `reads_values`.
    `when`: at which events it looks. `once`: a name in `seen`; it looks at the first such event alone. `number`: what
    it adds to the one agreement at the step's begin, an int below 2^20, 0 for nothing; at most one guard has one.
    """

    event: type[EventT]
    look: Callable[[EventT], Complaint | None]
    code: str = ""
    agreed: bool = False
    waits: bool = False
    when: Callable[[EventT], bool] = lambda event: True
    once: str = ""
    number: Callable[[EventT], int] | None = None
