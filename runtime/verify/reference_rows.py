"""Reference values for ops that only plans contain: weights of rows, and weighted rows.

Plans send weights along with rows (`passes/fuse.py`); the reference weights rows when it combines them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moec.passes.ir import Program
from moec.passes.ir.interface import layer_calls
from moec.passes.ir.mixture_values import MixtureValues
from moec.passes.ir.ops import ExpertMlp, ExpertMlpPadded, PermuteWeights
from moec.runtime.verify.cluster.uses import ReferenceValue

Experts = ExpertMlp | ExpertMlpPadded


Mixtures = Mapping[str, Sequence[MixtureValues]]
"""The names of a layer's mixture values in a lowered Program, one entry for each part, by the layer's path."""


def mixtures_of(program: Program) -> Mixtures:
    """The names of each layer's mixture values in a lowered Program."""
    named = ((call.layer, MixtureValues.of(program.block(call.block))) for call in layer_calls(program))
    return {f"layers.{layer}.": parts for layer, parts in named if parts}


class WeightedRows:
    """The weights of rows and the weighted rows of every mixture, from the reference's weights, positions and rows.

    `values` has them by the names of the plan's results: of `permute_weights`, and of experts whose rows have weights.
    `mixtures` has the mixture of each of them, and of each value of the reference that has a row for each choice.
    """

    def __init__(self, plan: Program, mixtures: Mixtures, computed: Mapping[ReferenceValue, Tensor]) -> None:
        self.values: dict[ReferenceValue, Tensor] = {}
        self.mixtures: dict[ReferenceValue, MixtureValues] = {}
        for path, parts in mixtures.items():
            self.mixtures |= {(path, name): part for part in parts for name in part.row_values}
        self._computed = computed
        self._weights: dict[tuple[str, MixtureValues], Tensor] = {}
        self._rows: dict[tuple[str, MixtureValues], Tensor] = {}
        for call in layer_calls(plan):
            path = f"layers.{call.layer}."
            by_positions = {part.positions: part for part in mixtures.get(path, ())}
            part: MixtureValues | None = None  # of the last `permute_weights`, which the next experts read
            for op in plan.block(call.block).ops:
                key = path, op.results[0].name
                if isinstance(op, PermuteWeights):
                    part = by_positions.get(op.operands[1])  # None in a wrong plan: then no value is the reference's
                    if part is not None:
                        self.values[key], self.mixtures[key] = self._row_weights(path, part), part
                elif isinstance(op, Experts) and key not in computed and part is not None:
                    self.values[key], self.mixtures[key] = self._weighted_rows(path, part), part
        for value in self.values.values():
            if value.requires_grad:  # false for weights that no router computes
                value.retain_grad()

    def differentiate(self) -> None:
        """Sets the gradients of `values`, from the gradients of weights and of mixed tokens."""
        for (path, names), row_weights in self._weights.items():
            positions, weights = self._computed[path, names.positions], self._computed[path, names.weights]
            if weights.grad is not None:
                row_weights.grad = _scattered(weights.grad.flatten(), positions, row_weights.shape)
        for (path, names), rows in self._rows.items():
            positions, mixed = self._computed[path, names.positions], self._computed[path, names.mixed]
            assert mixed.grad is not None
            choice_gradients = mixed.grad.flatten(0, 1).repeat_interleave(positions.shape[2], 0)
            rows.grad = _scattered(choice_gradients, positions, rows.shape[:-1])

    def _row_weights(self, path: str, names: MixtureValues) -> Tensor:
        if (path, names) not in self._weights:
            weights, rows = self._computed[path, names.weights], self._computed[path, names.rows]
            positions = self._computed[path, names.positions]
            self._weights[path, names] = _scattered(weights.flatten(), positions, rows.shape[:-1])
        return self._weights[path, names]

    def _weighted_rows(self, path: str, names: MixtureValues) -> Tensor:
        self._rows[path, names] = self._computed[path, names.rows] * self._row_weights(path, names)[..., None]
        return self._rows[path, names]


def _scattered(choices: Tensor, positions: Tensor, shape: torch.Size) -> Tensor:
    """Scatters per-choice values [N, …] to their rows [*shape, …]. Dropped choices leave zeros."""
    places = positions.flatten()
    has_row = places >= 0
    rows = choices.new_zeros((shape.numel(), *choices.shape[1:])).index_put((places[has_row],), choices[has_row])
    return rows.view(*shape, *choices.shape[1:])
