"""Chooses the next token of each sequence from its logits: the best token, or a drawn one.

A drawn token is a function of the logits, the seed, the number of the sequence and the token's place in it, so that it
is the same however sequences are spread over ranks (`runtime/philox.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moec.runtime.errors import JobError, is_whole
from moec.runtime.philox import key_of, philox_words

MOST_SEQUENCES = 1 << 31
"""Numbers of sequences are below this."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The options of choosing a token. `temperature` 0: the token with the largest logit, the first of equal ones.

    Else a draw from softmax(logits / temperature), among the `top_k` largest logits, and of these among the fewest
    tokens whose probabilities add up to at least `top_p`; tokens with a logit equal to the last one's are included.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def require_valid(self) -> None:
        """Raises `JobError` for invalid options."""
        is_valid_k = self.top_k is None or (is_whole(self.top_k) and self.top_k >= 1)
        is_valid_p = self.top_p is None or (_is_number(self.top_p) and 0 < self.top_p <= 1)
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise _wrong("temperature", self.temperature, "0 for the best token, or more than 0")
        if not is_valid_k:
            raise _wrong("top_k", self.top_k, "a whole number from 1")
        if not is_valid_p:
            raise _wrong("top_p", self.top_p, "more than 0 and at most 1")
        if not is_whole(self.seed) or not 0 <= self.seed < 1 << 62:
            raise _wrong("seed", self.seed, "a whole number from 0 to 2^62 - 1")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            words = "`top_k` or `top_p` was given, and with `temperature` 0 the best token is chosen"
            raise JobError("MOE0740", words, "give a `temperature`, such as 1.0")

    def numbers(self) -> tuple[int, ...]:
        """The options as whole numbers, which must be the same on all ranks."""
        return hash((float(self.temperature), self.top_k or 0, self.top_p or 0.0)), self.seed

    def choose(self, logits: Tensor, sequences: Tensor, places: Tensor) -> Tensor:
        """The chosen ids, int64 `[batch]`, of logits `[batch, vocab]`; −1 where no logit is finite, or one is NaN.

        `sequences` and `places`, int64 `[batch]`: each sequence's number, and the place of the new token in it.
        """
        best, ids = logits.max(-1)
        if self.temperature > 0:
            ids = self._draw(logits.double(), sequences, places)
        return torch.where(best.isfinite(), ids, -1)

    def _draw(self, logits: Tensor, sequences: Tensor, places: Tensor) -> Tensor:
        """Ids by inverse transform sampling: the first whose cumulative probability exceeds a uniform number."""
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            threshold = logits.topk(self.top_k, -1).values[:, -1:]
            logits = logits.masked_fill(logits < threshold, -torch.inf)
        p = torch.softmax((logits - logits.max(-1, keepdim=True).values) / self.temperature, -1)
        if self.top_p is not None and self.top_p < 1:
            ordered = p.sort(-1, descending=True).values
            needed = (ordered.cumsum(-1) - ordered < self.top_p).sum(-1, keepdim=True)
            p = p.masked_fill(p < ordered.gather(-1, needed - 1), 0.0)
        cumulative = p.cumsum(-1)
        uniform = self.uniform(sequences, places)[:, None] * cumulative[:, -1:]
        return torch.searchsorted(cumulative, uniform, right=True)[:, 0].clamp_max(p.shape[-1] - 1)

    def uniform(self, sequences: Tensor, places: Tensor) -> Tensor:
        """A number in [0, 1) of 53 bits for each token, float64."""
        high, low, *_ = philox_words(sequences << 32 | places, key_of("generate", self.seed))
        numbers: Tensor = ((high >> 5) * (1 << 26) + (low >> 6)).double() * 2.0**-53
        return numbers


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong(name: str, value: object, requirement: str) -> JobError:
    return JobError("MOE0740", f"`{name}` is {value!r}, and must be {requirement}")
