"""The online biases of a layer in a plain PyTorch model; they move when the host ends a training step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from moec.codegen.emit import Function, emit_function
from moec.passes.ir import Program, State
from moec.runtime.host.layer_state import INNER
from moec.runtime.refused_derivatives import unwrapped
from moec.runtime.weights.backward_pass import in_backward
from moec.runtime.weights.home import Home
from moec.runtime.weights.states import LayerStates


class LayerBiases:
    """The states of one layer, `owner`, and the rows that its experts received since the last step ended.

    Only passes in training count, and once: `torch.utils.checkpoint` may repeat them in backward. If an optimizer of
    the layer's parameters steps while there are counted rows, and a pass in training follows, the host has forgotten to
    end the step.
    """

    def __init__(
        self, owner: nn.Module, program: Program, states: Sequence[State], home: Home, *, float64: bool
    ) -> None:
        (layer,) = program.layers
        update = program.body(layer).update
        self._function: Function | None = None
        if update is not None:
            self._function = emit_function(program, update, groups=home.groups, float64=float64)
        self._states = LayerStates(owner, [replace(state, name=_inside(state.name)) for state in states], home)
        self.loads: Tensor | None = None
        """Rows that this rank's tokens sent to each expert since the last step ended, int64 `[experts]`; or None."""
        self.stepped = False
        """Whether an optimizer has stepped since the host's last `moec.end_step`."""
        self._watches = False

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which belong to no open step."""
        return self.__dict__ | {"loads": None, "stepped": False, "_watches": False}

    @property
    def any(self) -> bool:
        """Whether the layer has states."""
        return self._function is not None

    def by_name(self, owner: nn.Module) -> dict[str, Tensor]:
        """The current states by their names in the layer. Raises `JobError` for one in a narrower dtype."""
        return self._states.by_name(owner)

    def add(self, owner: nn.Module, counts: Tensor) -> None:
        """Counts the rows `[experts]` of a pass in training."""
        if self._function is None or in_backward():
            return
        self.loads = unwrapped(counts if self.loads is None else self.loads + counts)
        if not self._watches:
            self._watches = True
            _watch(weakref.ref(owner), self)

    def drop(self) -> None:
        """Drops the counted rows: the step has ended, or a file's states have replaced these."""
        self.loads, self.stepped = None, False

    @torch.no_grad()
    def new_values(self, owner: nn.Module, counts: Tensor) -> dict[str, Tensor]:
        """Each state's value after an update by rows `[sources, experts]`, by its name in the block. A collective."""
        assert self._function is not None
        states = self.by_name(owner)
        results = self._function.module(counts, *(states[_inside(state.name)] for state in self._function.states))
        values = results if isinstance(results, tuple | list) else (results,)
        return {str(output.state): value for output, value in zip(self._function.results, values, strict=True)}

    @torch.no_grad()
    def move(self, owner: nn.Module, counts: Tensor) -> None:
        """Updates the states by rows `[sources, experts]`, and drops the counted rows."""
        states = self.by_name(owner)
        for name, value in self.new_values(owner, counts).items():
            states[_inside(name)].copy_(value)
        self.drop()

    def note_step(self, owner: nn.Module, optimizer: Optimizer) -> None:
        """Notes the step of an optimizer that has parameters of the layer."""
        if self.loads is None or self.stepped:
            return
        parameter_ids = set(map(id, owner.parameters()))
        self.stepped = any(id(p) in parameter_ids for group in optimizer.param_groups for p in group["params"])


def _watch(owner: weakref.ref[nn.Module], biases: LayerBiases) -> None:
    """Calls `biases.note_step` after each step of any optimizer, until the layer is freed."""

    def note_step(optimizer: Optimizer, *_: Any) -> None:
        module = owner()
        if module is not None:
            biases.note_step(module, optimizer)

    handle = register_optimizer_step_post_hook(note_step)
    module = owner()
    assert module is not None
    weakref.finalize(module, handle.remove)


def _inside(name: str) -> str:
    return name.removeprefix(INNER)
