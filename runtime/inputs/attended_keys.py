"""Counts the keys that tokens attend to in training, which depend on the lengths of the batch's texts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moec.grammar.spec import Spec
from moec.passes.cost.model_flops import reaches_of
from moec.passes.ir import Program
from moec.passes.ir.ops.attention_ops import Reach


class AttendedKeys:
    """Sums over this rank's training passes: real tokens, and the keys that they attend to, by reach.

    A text ends after a `separator`, and where given segments change. Padding neither attends nor is attended to. Sums
    of packed and padded batches stay on the device.
    """

    def __init__(self, program: Program, spec: Spec) -> None:
        self.reaches = reaches_of(program)
        embedding = spec.model.embedding if self.reaches else None
        self._separator = None if embedding is None else embedding.separator
        self._padding = None if embedding is None else embedding.padding_id
        self._totals: list[float | Tensor] = [0.0] * (1 + len(self.reaches))

    def add(self, tokens: Tensor, segments: Tensor | None, real: Tensor | None) -> None:
        """Counts a pass over ids `[batch, sequence]`, with segments and marks of real tokens, 1 or 0, if given."""
        if not self.reaches:
            return
        (batch, sequence), counts = tokens.shape, list[float | Tensor]()
        if real is None and self._padding is not None:
            real = tokens.ne(self._padding)
        if real is None and segments is None and self._separator is None:
            counts = [float(tokens.numel()), *(batch * reach.keys(sequence) for reach in self.reaches)]
        else:
            real = torch.ones_like(tokens) if real is None else real.long()
            places = self._places(tokens, segments, real)
            counts = [real.sum(), *(_keys(reach, places, real) for reach in self.reaches)]
        self._totals = [total + count for total, count in zip(self._totals, counts, strict=True)]

    def _places(self, tokens: Tensor, segments: Tensor | None, real: Tensor) -> Tensor:
        """Each real token's place among those of its text, plus 0.5; 0 for padding."""
        real_until = real.cumsum(1)
        if segments is None and self._separator is None:
            return real * (real_until - 0.5)
        if segments is None:
            assert self._separator is not None
            ends: Tensor = tokens.eq(self._separator)
        else:
            ends = segments.diff(append=segments[:, -1:]).ne(0)
        text_start = torch.zeros_like(real_until)
        text_start[:, 1:] = torch.where(ends[:, :-1], real_until[:, :-1], 0)
        return real * (real_until - text_start.cummax(1)[0] - 0.5)

    def totals(self) -> list[float]:
        """Tokens so far, then keys by reach. Waits for the device if batches were packed or padded."""
        return [float(total) for total in self._totals]


def _keys(reach: Reach, places: Tensor, real: Tensor) -> Tensor:
    """`Reach.keys` of all texts together, from `_places`. Padding inside a window counts as distance."""
    distance = places
    if reach.window:
        real_until = real.cumsum(1)
        in_window = real_until - F.pad(real_until, (reach.window, 0))[:, : real_until.shape[1]]
        distance = places.minimum(in_window * real)
    return distance.double().sum() * (1 if reach.causal else 2)
