"""Reference values for ops that only plans contain: weights of rows, and weighted rows.

Where rows travel, their weights do too (`passes/fuse.py`); the reference weighs rows as it combines them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moec.passes.ir import Program
from moec.passes.ir.interface import layer_calls
from moec.passes.ir.mixture_values import MixtureValues

Origin = tuple[str, str]
"""The path of a module, `layers.3.`, and a value's name there."""


def mixtures_of(program: Program) -> dict[str, MixtureValues]:
    """What the values of each layer's mixture are called in a lowered Program, by the layer's path."""
    named = ((call.layer, MixtureValues.of(program.block(call.block))) for call in layer_calls(program))
    return {f"layers.{layer}.": names for layer, names in named if names is not None}


def weighted_rows(mixtures: Mapping[str, MixtureValues], values: Mapping[Origin, Tensor]) -> dict[Origin, Tensor]:
    """`row_weights` and `weighted` of every mixture, from what the reference computed: weights, positions and rows."""
    found: dict[Origin, Tensor] = {}
    for path, names in mixtures.items():
        positions, rows = values[path, names.positions], values[path, names.rows]
        weights = _in_places(values[path, names.weights].flatten(), positions, rows.shape[:-1])
        weighted = rows * weights[..., None]
        for value in (weights, weighted):
            if value.requires_grad:  # weights that no router computes do not
                value.retain_grad()
        found |= {(path, "row_weights"): weights, (path, "weighted"): weighted}
    return found


def differentiate(
    mixtures: Mapping[str, MixtureValues], weighted: Mapping[Origin, Tensor], values: Mapping[Origin, Tensor]
) -> None:
    """Gives what `weighted_rows` made the gradients that follow from those of weights and of mixed tokens."""
    for path, names in mixtures.items():
        positions, mixed, weights = (
            values[path, names.positions],
            values[path, names.mixed],
            values[path, names.weights],
        )
        assert mixed.grad is not None
        own, rows = weighted[path, "row_weights"], weighted[path, "weighted"]
        if weights.grad is not None:
            own.grad = _in_places(weights.grad.flatten(), positions, own.shape)
        of_choices = mixed.grad.flatten(0, 1).repeat_interleave(positions.shape[2], 0)
        rows.grad = _in_places(of_choices, positions, own.shape)


def _in_places(of_choices: Tensor, positions: Tensor, shape: torch.Size) -> Tensor:
    """Scatters per-choice values [N, …] to their rows [*shape, …]. Dropped choices leave zeros."""
    places = positions.flatten()
    kept = places >= 0
    placed = of_choices.new_zeros((shape.numel(), *of_choices.shape[1:])).index_put((places[kept],), of_choices[kept])
    return placed.view(*shape, *of_choices.shape[1:])
