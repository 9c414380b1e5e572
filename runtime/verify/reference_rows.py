"""Reference values for ops that only plans contain: weights of rows, and weighted rows.

Plans send weights along with rows (`passes/fuse.py`); the reference weights rows when it combines them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moec.passes.ir import Program
from moec.passes.ir.interface import layer_calls
from moec.passes.ir.mixture_values import MixtureValues
from moec.passes.ir.ops import ExpertMlp, ExpertMlpPadded, PermuteWeights
from moec.runtime.verify.uses import ReferenceValue

Experts = ExpertMlp | ExpertMlpPadded


def mixtures_of(program: Program) -> dict[str, MixtureValues]:
    """The names of each layer's mixture values in a lowered Program, by the layer's path."""
    named = ((call.layer, MixtureValues.of(program.block(call.block))) for call in layer_calls(program))
    return {f"layers.{layer}.": names for layer, names in named if names is not None}


class WeightedRows:
    """The weights of rows and the weighted rows of every mixture, from the reference's weights, positions and rows.

    `values` has them by the names of the plan's results: of `permute_weights`, and of experts whose rows have weights.
    """

    def __init__(
        self, plan: Program, mixtures: Mapping[str, MixtureValues], computed: Mapping[ReferenceValue, Tensor]
    ) -> None:
        self.values: dict[ReferenceValue, Tensor] = {}
        self._mixtures, self._computed = mixtures, computed
        self._weights: dict[str, Tensor] = {}
        self._rows: dict[str, Tensor] = {}
        for call in layer_calls(plan):
            path = f"layers.{call.layer}."
            for op in plan.block(call.block).ops:
                name = op.results[0].name
                if isinstance(op, PermuteWeights):
                    self.values[path, name] = self._weights_of(path)
                elif isinstance(op, Experts) and (path, name) not in computed:
                    self.values[path, name] = self._rows_of(path)
        for value in self.values.values():
            if value.requires_grad:  # false for weights that no router computes
                value.retain_grad()

    def differentiate(self) -> None:
        """Sets the gradients of `values`, from the gradients of weights and of mixed tokens."""
        for path, row_weights in self._weights.items():
            names = self._mixtures[path]
            positions, weights = self._computed[path, names.positions], self._computed[path, names.weights]
            if weights.grad is not None:
                row_weights.grad = _scattered(weights.grad.flatten(), positions, row_weights.shape)
        for path, rows in self._rows.items():
            names = self._mixtures[path]
            positions, mixed = self._computed[path, names.positions], self._computed[path, names.mixed]
            assert mixed.grad is not None
            of_choices = mixed.grad.flatten(0, 1).repeat_interleave(positions.shape[2], 0)
            rows.grad = _scattered(of_choices, positions, rows.shape[:-1])

    def _weights_of(self, path: str) -> Tensor:
        if path not in self._weights:
            names = self._mixtures[path]
            weights, rows = self._computed[path, names.weights], self._computed[path, names.rows]
            positions = self._computed[path, names.positions]
            self._weights[path] = _scattered(weights.flatten(), positions, rows.shape[:-1])
        return self._weights[path]

    def _rows_of(self, path: str) -> Tensor:
        self._rows[path] = self._computed[path, self._mixtures[path].rows] * self._weights_of(path)[..., None]
        return self._rows[path]


def _scattered(of_choices: Tensor, positions: Tensor, shape: torch.Size) -> Tensor:
    """Scatters per-choice values [N, …] to their rows [*shape, …]. Dropped choices leave zeros."""
    places = positions.flatten()
    kept = places >= 0
    placed = of_choices.new_zeros((shape.numel(), *of_choices.shape[1:])).index_put((places[kept],), of_choices[kept])
    return placed.view(*shape, *of_choices.shape[1:])
