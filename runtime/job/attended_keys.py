"""Counts the keys that tokens attend to in training, which depend on the lengths of the batch's texts."""

from __future__ import annotations

import torch
from torch import Tensor

from moec.grammar.spec import Spec
from moec.passes.cost.model_flops import reaches_of
from moec.passes.ir import Program
from moec.passes.ir.ops.attention_ops import Reach


class AttendedKeys:
    """Of this rank's training passes, and for each reach of the model's attention: keys, added over all tokens.

    A text ends after a `separator`, and where given segments change. Numbers of packed batches stay on the device.
    """

    def __init__(self, program: Program, spec: Spec) -> None:
        self.reaches = reaches_of(program)
        self._separator = spec.model.embedding.separator if self.reaches else None
        self._totals: list[float | Tensor] = [0.0] * len(self.reaches)

    def add(self, tokens: Tensor, segments: Tensor | None) -> None:
        """Counts a pass over ids `[batch, sequence]`, with segments of the same shape if they are given."""
        if not self.reaches:
            return
        batch, sequence = tokens.shape
        if segments is None and self._separator is None:
            self._totals = [
                total + batch * reach.keys(sequence) for total, reach in zip(self._totals, self.reaches, strict=True)
            ]
            return
        if segments is None:
            assert self._separator is not None
            ends: Tensor = tokens.eq(self._separator)
        else:
            ends = segments.diff(append=segments[:, -1:]).ne(0)
        place = torch.arange(sequence, device=tokens.device)
        behind = torch.zeros_like(tokens)
        behind[:, 1:] = torch.where(ends[:, :-1], place[1:], 0)
        places = (place - behind.cummax(1)[0]).double() + 0.5
        self._totals = [total + _keys(reach, places) for total, reach in zip(self._totals, self.reaches, strict=True)]

    def totals(self) -> list[float]:
        """Keys so far, by reach. Waits for the device if batches were packed."""
        return [float(total) for total in self._totals]


def _keys(reach: Reach, places: Tensor) -> Tensor:
    """`Reach.keys` of all texts together, from the middle of each token's place in its text."""
    behind = places.clamp(max=reach.window) if reach.window else places
    return behind.sum() * (1 if reach.causal else 2)
