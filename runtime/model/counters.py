"""Counts labels and tokens, of this rank and of all ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moec.codegen.emit import Function
from moec.passes.ir.roles import IGNORED_LABEL
from moec.runtime.inputs.batches import ImageLimits, Limits
from moec.runtime.inputs.extra_inputs import AcceptedInputs, ExtraInputs


class Counters:
    """The counts of one model, whose graphs of scalars are `scalars`."""

    def __init__(self, scalars: Mapping[str, Function], limits: Limits | ImageLimits, takes: AcceptedInputs) -> None:
        self._scalars, self._limits, self._takes = scalars, limits, takes

    def labels(self, labels: Tensor) -> Tensor:
        """The number of valid labels of all ranks: 0-d int64. A collective."""
        count: Tensor = self._scalars["valid_labels"].module(labels)
        return count

    def tokens(self, counted: Tensor) -> Tensor | None:
        """The number of tokens of all ranks, 0-d int64; None for a model without balance terms. A collective.

        `counted`: ids, or for a model that accepts padding the mask of real tokens (`AcceptedInputs.real`).
        """
        count: Tensor | None = self._scalars["num_tokens"].module(counted) if "num_tokens" in self._scalars else None
        return count

    def tokens_of(self, labels: Tensor, tokens: Tensor) -> Tensor | None:
        """The number of tokens of all ranks; for images, whose labels have several tokens each, counted by labels."""
        if self._limits.tokens_per_label == 1 or "num_tokens" not in self._scalars:
            return self.tokens(tokens)
        return self.labels(torch.zeros_like(labels)) * self._limits.tokens_per_label

    def real_tokens(self, tokens: Tensor, extra: ExtraInputs) -> int | Tensor:
        """Tokens of this rank that are no padding: an int where there is none, else a tensor on the tokens' device."""
        if extra.padding is not None:
            return self._takes.real(extra, tokens).sum()
        return self._limits.real_tokens(tokens)

    def local(self, tokens: Tensor, labels: Tensor, extra: ExtraInputs) -> tuple[int, int]:
        """This rank's addends of `labels` and `tokens`. Waits for the device."""
        return int((labels != IGNORED_LABEL).sum()), int(self.real_tokens(tokens, extra))
