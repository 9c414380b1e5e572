"""One layer of a `PlanModule`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moec.codegen.emit import Function
from moec.passes.ir import Table
from moec.runtime.inputs.settings import setting_values
from moec.runtime.weights.guests import Guests
from moec.runtime.weights.home import Home, make_weights
from moec.runtime.weights.homes import MovedHomes
from moec.runtime.weights.open_step import OpenStep
from moec.runtime.weights.regathering import Handles
from moec.runtime.weights.slots import slots_in_order, table_of
from moec.runtime.weights.state_dict_signing import refuse_foreign_state, sign_state
from moec.runtime.weights.states import LayerStates


class Layer(nn.Module):
    """One layer: its number, its parameters, and the function that computes it, which identical layers share.

    `words`: its lines of the file, for `repr`. A layer with slots for guests has a second function, `homes_only`, for
    passes without them: in evaluation, and while it has none.
    """

    def __init__(
        self,
        number: int,
        function: Function,
        home: Home,
        open_step: OpenStep,
        words: str,
        homes_only: Function | None = None,
    ) -> None:
        super().__init__()
        self._words = words
        self.function, self._home, self._number = function, home, torch.tensor(number, device="cpu")
        self.homes_only = homes_only
        self.guests: Guests | None = None
        """The guests of the next passes in training."""
        self.of_experts = [index for index, parameter in enumerate(function.parameters) if parameter.is_of_experts]
        """The indices of the parameters of experts."""
        self._weights = make_weights(
            self, f"layers.{number}.", function.weights, function.sites(number), home, open_step
        )
        self._states = LayerStates(self, function.states, home)
        self.register_state_dict_post_hook(sign_state)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(refuse_foreign_state)  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Tensor) -> Any:
        """The results of the layer's block: the residual stream, and a mixture's counts and balance term."""
        guests = self.guests_of_pass()
        function = self.function if guests is not None or self.homes_only is None else self.homes_only
        settings = setting_values(function.settings, {}, training=self.training)
        states, handles = self.states().values(), Handles()
        tables = self.tables() if guests is None else [guests.table]
        weights = self._weights(handles, guests)
        with handles.saved_as_handles():
            return function.module(*inputs, self._number, *settings, *states, *tables, *weights)

    def guests_of_pass(self) -> Guests | None:
        """The guests of a pass in the mode of this layer: none in evaluation, nor if homes have
        changed since they were chosen."""
        guests, homes = self.guests, self._weights.homes
        is_current = guests is not None and (homes is None or guests.homes is homes.slots)
        return guests if self.training and is_current else None

    def tables(self) -> list[Tensor]:
        """The slots of a pass without guests: where experts live now."""
        homes = self._weights.homes
        return first_tables((self.homes_only or self.function).tables) if homes is None else [table_of(homes.slots)]

    @property
    def homes(self) -> MovedHomes | None:
        """Those of the model that it was built for, if experts may move."""
        return None if self._weights.homes is None else self._weights.homes.model

    def extra_repr(self) -> str:
        return self._words

    def states(self) -> dict[str, Tensor]:
        """The states by name, in the order of the file. Raises `JobError` for one in a narrower dtype."""
        return self._states.by_name(self)


def first_tables(tables: Sequence[Table]) -> list[Tensor]:
    """The slots of a layer's experts in their first homes."""
    shapes = (table.shape for table in tables)
    return [table_of(slots_in_order(int(ranks), int(ranks) * int(of_rank))) for _, ranks, of_rank in shapes]


def layer_inside(module: nn.Module) -> Layer | None:
    """The layer itself, or the one in a wrapper such as `checkpoint_wrapper` or `torch.compile`.

    None for a user's module in a layer's place.
    """
    return next((inner for inner in module.modules() if isinstance(inner, Layer)), None)
