"""The updates of a model's states, once per training step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moec.codegen.emit import Function, emit_function
from moec.passes.ir import OutputKey, Program
from moec.runtime.model.plan_layer import layer_inside
from moec.runtime.refused_derivatives import unwrapped
from moec.runtime.weights.home import Home


class Updates:
    """Computes new values of states from the rows that experts got since the last update.

    `loads` maps a layer to int64 `[sources, experts]`, the rows of this rank's tokens.
    """

    def __init__(self, program: Program, home: Home, *, float64: bool) -> None:
        updated_by = {block.name: block.update for block in program.blocks if block.update is not None}
        self._functions: dict[str, Function] = {
            name: emit_function(program, name, groups=home.groups, float64=float64)
            for name in dict.fromkeys(updated_by.values())
        }
        updates = ((layer.number, program.body(layer).update) for layer in program.layers)
        self._function_of_layer = {number: self._functions[name] for number, name in updates if name is not None}
        self.loads: dict[int, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which belong to no open step."""
        return self.__dict__ | {"loads": {}}

    @property
    def any(self) -> bool:
        """Whether the model has states."""
        return bool(self._function_of_layer)

    def states(self, layers: nn.ModuleList) -> dict[str, Tensor]:
        """The states by their full names."""
        named = {}
        for number, function in self._function_of_layer.items():
            states = _states_in(layers[number])
            names = [state.name for state in function.states if state.name in states]
            named.update({f"layers.{number}.{name}": states[name] for name in names})
        return named

    def functions(self) -> Iterable[Function]:
        """The functions that compute new values."""
        return self._functions.values()

    def add(self, results: Mapping[OutputKey, Any]) -> None:
        """Adds the `counts` of a forward pass to the loads."""
        for (role, layer, _), counts in results.items():
            if role == "counts" and layer in self._function_of_layer:
                earlier = self.loads.get(layer)
                self.loads[layer] = unwrapped(counts if earlier is None else earlier + counts)

    @torch.no_grad()
    def new_values(self, layers: nn.ModuleList, loads: Mapping[int, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Each state by its full name, and the new value that `loads` give it. A collective of all ranks."""
        new_values = {}
        for number, counts in sorted(loads.items()):
            function, states = self._function_of_layer[number], _states_in(layers[number])
            values = [states[state.name] for state in function.states if state.name in states]
            if len(values) < len(function.states):
                continue  # a user's module in the layer's place
            results = function.module(counts, *values)
            outputs = results if isinstance(results, tuple | list) else (results,)
            for output, value in zip(function.results, outputs, strict=True):
                assert output.state is not None
                new_values[f"layers.{number}.{output.state}"] = states[output.state], value
        return new_values

    @torch.no_grad()
    def apply(self, layers: nn.ModuleList) -> None:
        """Gives the states their new values and drops the loads; does nothing without loads."""
        for state, value in self.new_values(layers, self.loads).values():
            state.copy_(value)
        self.loads.clear()


def _states_in(module: nn.Module) -> dict[str, Tensor]:
    """The states of a layer, which may be inside a wrapper."""
    layer = layer_inside(module)
    return {} if layer is None else layer.states()
