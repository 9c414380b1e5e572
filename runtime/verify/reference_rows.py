"""What the reference would have of values that only plans have: weights of rows, and rows weighted by them.

Where rows travel, their weights do too (`passes/fuse.py`); the reference weighs rows as it combines them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

Origin = tuple[str, str]
"""The path of a module, `layers.3.`, and a value's name there."""


def weighted_rows(values: Mapping[Origin, Tensor]) -> dict[Origin, Tensor]:
    """`row_weights` and `weighted` of every mixture, from what the reference computed: weights, positions and rows."""
    found: dict[Origin, Tensor] = {}
    for path in _mixtures(values):
        positions, rows = values[path, "positions"], values[path, "y"]
        weights = _in_places(values[path, "w"].flatten(), positions, rows.shape[:-1])
        weighted = rows * weights[..., None]
        for value in (weights, weighted):
            value.retain_grad()
        found |= {(path, "row_weights"): weights, (path, "weighted"): weighted}
    return found


def differentiate(weighted: Mapping[Origin, Tensor], values: Mapping[Origin, Tensor]) -> None:
    """Gives what `weighted_rows` made the gradients that follow from those of weights and of mixed tokens."""
    for path in _mixtures(values):
        positions, mixed, weights = values[path, "positions"], values[path, "mixed"], values[path, "w"]
        assert mixed.grad is not None
        assert weights.grad is not None
        own, rows = weighted[path, "row_weights"], weighted[path, "weighted"]
        own.grad = _in_places(weights.grad.flatten(), positions, own.shape)
        of_choices = mixed.grad.flatten(0, 1).repeat_interleave(positions.shape[2], 0)
        rows.grad = _in_places(of_choices, positions, own.shape)


def _mixtures(values: Mapping[Origin, Tensor]) -> Iterator[str]:
    """The paths of layers with a mixture. `forward`, whose path is empty, calls learned positions `positions` too."""
    return (path for path, name in values if path and name == "positions")


def _in_places(of_choices: Tensor, positions: Tensor, shape: torch.Size) -> Tensor:
    """Scatters per-choice values [N, …] to their rows [*shape, …]. Dropped choices leave zeros."""
    places = positions.flatten()
    kept = places >= 0
    placed = of_choices.new_zeros((shape.numel(), *of_choices.shape[1:])).index_put((places[kept],), of_choices[kept])
    return placed.view(*shape, *of_choices.shape[1:])
