"""One layer of a `PlanModule`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moec.codegen.emit import Function
from moec.runtime.inputs.settings import setting_values
from moec.runtime.weights.home import Home, make_weights
from moec.runtime.weights.open_step import OpenStep
from moec.runtime.weights.regathering import Handles
from moec.runtime.weights.state_dict_signing import refuse_foreign_state, sign_state
from moec.runtime.weights.states import LayerStates


class Layer(nn.Module):
    """One layer: its number, its parameters, and the function that computes it, which identical layers share.

    `words`: its lines of the file, for `repr`.
    """

    def __init__(self, number: int, function: Function, home: Home, open_step: OpenStep, words: str) -> None:
        super().__init__()
        self._words = words
        self.function, self._home, self._number = function, home, torch.tensor(number, device="cpu")
        self._weights = make_weights(
            self, f"layers.{number}.", function.weights, function.sites(number), home, open_step
        )
        self._states = LayerStates(self, function.states, home)
        self.register_state_dict_post_hook(sign_state)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(refuse_foreign_state)  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Tensor) -> Any:
        """The results of the layer's block: the residual stream, and a mixture's counts and balance term."""
        settings = setting_values(self.function.settings, {}, training=self.training)
        states, handles = self.states().values(), Handles()
        weights = self._weights(handles)
        with handles.saved_as_handles():
            return self.function.module(*inputs, self._number, *settings, *states, *weights)

    def extra_repr(self) -> str:
        return self._words

    def states(self) -> dict[str, Tensor]:
        """The states by name, in the order of the file. Raises `JobError` for one in a narrower dtype."""
        return self._states.by_name(self)


def layer_inside(module: nn.Module) -> Layer | None:
    """The layer itself, or the one in a wrapper such as `checkpoint_wrapper` or `torch.compile`.

    None for a user's module in a layer's place.
    """
    return next((inner for inner in module.modules() if isinstance(inner, Layer)), None)
