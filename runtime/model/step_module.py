"""The part of a model that a job uses in a step: its counts, states, micro-batches and weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from moec.codegen.emit import Function
from moec.passes.ir import STEP, OutputKey
from moec.runtime.errors import JobError
from moec.runtime.guards.leftover_gradients import STEP_RAISED
from moec.runtime.inputs.batches import ImageLimits, Limits
from moec.runtime.inputs.extra_inputs import AcceptedInputs
from moec.runtime.model.plan_layer import Layer, layer_inside
from moec.runtime.model.state_updates import Updates
from moec.runtime.model.step_counts import StepCounts
from moec.runtime.model.top_level import TopLevel
from moec.runtime.ranks.checks import Complaint
from moec.runtime.weights.homes import MovedHomes
from moec.runtime.weights.open_step import OpenStep
from moec.runtime.weights.weights import Weights


class BetweenSteps(Protocol):
    """What places the experts of layers between steps (`runtime/placement/policy.py`). All ranks call it alike."""

    def add(self, results: Mapping[OutputKey, Any]) -> None:
        """Adds the rows of a forward pass in training to the loads of the step."""

    def begin_step(self, layers: nn.ModuleList) -> None:
        """Places experts as was chosen for this step."""

    def end_step(self) -> None:
        """Counts a step."""

    def figures(self, layers: nn.ModuleList, loads: Mapping[int, Tensor]) -> dict[str, Any]:
        """Figures of the last steps, and of each layer by its number. `loads`: rows of each expert."""


class StepModule(nn.Module):
    """The part of `PlanModule` that only jobs call; `PlanModule` sets its attributes."""

    layers: nn.ModuleList
    limits: Limits | ImageLimits
    takes: AcceptedInputs
    settings: dict[str, int]
    seen: set[object]
    draws: bool
    """Whether its forward pass in training draws random numbers."""
    _agreed_pass: tuple[Tensor, bool] | None
    _counts: StepCounts
    _open_step: OpenStep
    _scalars: dict[str, Function]
    tops: dict[int, TopLevel]
    """`forward` of each stage of this rank."""
    _updates: Updates
    placement_policy: BetweenSteps | None
    """Places experts between steps; None without slots, of a copy, and of a model of no job."""
    homes: MovedHomes | None
    """Where experts are that may move; None if they may not."""

    @property
    def is_hooked(self) -> bool:
        """Whether a user's hook runs before `forward`."""
        hooks = self._forward_pre_hooks or nn.modules.module._global_forward_pre_hooks
        return bool(hooks) or "forward" in self.__dict__

    @property
    def counts_padding(self) -> bool:
        """Whether balance terms skip padding, so that tokens and labels need separate counts."""
        return (self.limits.padding is not None or self.takes.padding) and "num_tokens" in self._scalars

    def new_states(self, loads: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Each state's new value after these loads (layer → int64 `[sources, experts]`), by the state's full name."""
        return {name: value for name, (_, value) in self._updates.new_values(self.layers, loads).items()}

    def homes_inside(self) -> list[MovedHomes]:
        """Where its experts are, and those of other models' layers in it, if they may move."""
        layers = (layer_inside(module) for module in self.layers)
        homes = [layer.homes for layer in layers if layer is not None]
        return [*dict.fromkeys(each for each in (self.homes, *homes) if each is not None)]

    def open_step_complaint(
        self,
        what: str = "a checkpoint was asked for",
        help: str = "save and load between two steps, after `optimizer.step()`",
    ) -> Complaint | None:
        """The complaint about saving or loading inside a step, whose gradients and states are incomplete; else None."""
        if self._counts.sequences is None:
            return None
        words = f"{what} inside of job.accumulate or job.step, whose step has begun and not ended"
        return Complaint("MOE0724", words, help)

    def update_complaint(self) -> Complaint | None:
        """The reason why `update_states` has nothing to update, or None."""
        in_step = self._counts.sequences is not None
        if not self._updates.any or (self._updates.loads and not in_step):
            return None
        words = "job.update_states was called, and no forward pass in training came since states were last updated"
        if in_step:
            words = "job.update_states was called inside job.step or job.accumulate, which update states at their end"
        return Complaint("MOE0713", words)

    def update_states(self) -> None:
        """Gives every state its new value, from the rows that experts got in training since the last update.

        `job.step` and `job.accumulate` do this at their end. A collective: every rank must call it, or none.
        """
        self._updates.apply(self.layers)

    def drop_loads(self) -> None:
        """Drops the loads of earlier passes, after a file has replaced the states that they belong to."""
        self._updates.loads.clear()

    @contextmanager
    def counting(
        self, labels: Tensor | None, tokens: Tensor | None, sequences: int, *, passes: int, skips: bool = False
    ) -> Iterator[StepCounts]:
        """Inside the block, losses are divided by these counts instead of each forward pass's counts.

        The block is one step of `sequences` sequences on this rank, in about `passes` forward passes, for which
        ZeRO 1 and 2 gather weights once, and a pipeline casts them once, if no parameter has hooks or is parametrized.
        It adds 1 to `step` unless it raises. `skips`: router logits that are not finite make the loss NaN, and raise
        nothing.
        """
        if self._counts.sequences is not None:
            raise JobError(
                "MOE0713",
                "job.step or job.accumulate was called inside job.accumulate of the same model: one step at a time",
                "end the block of job.accumulate first",
            )
        # A parameter's hook may call an optimizer, and fused and foreach optimizers on DTensors change no version.
        keeps_weights = passes > 1 and not any(weights.sums_every_pass for weights in self.all_weights(wrapped=True))
        if self.placement_policy is not None:
            self.placement_policy.begin_step(self.layers)
        self._counts = StepCounts(labels, tokens, sequences, skips=skips)
        self._updates.loads.clear()
        self._open_step.has_several_passes, self._open_step.keeps_weights = passes > 1, keeps_weights
        try:
            yield self._counts
        except BaseException:
            self.seen.add(STEP_RAISED)
            raise
        finally:
            self._open_step.has_several_passes = self._open_step.keeps_weights = False
            for weights in self.all_weights(wrapped=True):
                weights.drop_step_weights()
            self._counts = StepCounts()
            self._updates.loads.clear()
        self.next_step()
        if self.placement_policy is not None:
            self.placement_policy.end_step()

    def next_step(self) -> None:
        """Adds 1 to the setting `step`."""
        self.settings[STEP.name] += 1

    def skip_agreement(self, tokens: Tensor, reads_values: bool) -> None:
        """Makes the next forward pass of these tokens skip its agreement: the step's agreement covers it."""
        self._agreed_pass = tokens, reads_values

    @contextmanager
    def one_step(self) -> Iterator[OpenStep]:
        """Collects gradients of micro-batches inside the block; drops unsummed ones at its end."""
        try:
            yield self._open_step
        finally:
            self._open_step.drop()
            self._agreed_pass = None

    def all_weights(self, *, wrapped: bool = False) -> Iterator[Weights]:
        """The `Weights` of the top level and of each layer; `wrapped`: also of layers inside of other modules."""
        for top in self.tops.values():
            yield from self.weights_of(top, wrapped=wrapped)

    def weights_of(self, top: TopLevel, *, wrapped: bool = False) -> Iterator[Weights]:
        """Those of a stage."""
        yield from top.weights
        for layer in (self.layers[number] for number in top.layers):
            if isinstance(layer, Layer):
                yield layer._weights
            elif wrapped and (inner := layer_inside(layer)) is not None:
                yield inner._weights

    def parameters_of_stage(self, top: TopLevel) -> Iterator[nn.Parameter]:
        """All parameters of a stage, also a wrapper's own, and those from which parametrizations compute others."""
        paths = dict.fromkeys(spec.name.rpartition(".")[0] for weights in top.weights for spec in weights.specs)
        for module in (*map(self.get_submodule, paths), *(self.layers[number] for number in top.layers)):
            yield from module.parameters()
