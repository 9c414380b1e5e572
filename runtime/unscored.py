"""Tokens without scores: their router logits are NaN or infinite, and so their scores are NaN.

A model's forward pass collects their masks without waiting for the device; at its end the ranks agree whether there are
any. Outside of a model, `moec::route` raises for them on CPU only, where the check costs no synchronisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_noted: ContextVar[list[Tensor] | None] = ContextVar("unscored", default=None)


@contextmanager
def noting() -> Iterator[Sequence[Tensor]]:
    """Inside the block `route` raises nothing. Yields a mask of tokens without scores, bool [B, S], for each call.

    The mask of a gate that scores whole sequences is [B, 1].
    """
    noted: list[Tensor] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def note_or_refuse(probabilities: Tensor, weights: Tensor) -> None:
    """Checks `route`'s results [B, S, E] and [B, S, k]. Raises `FloatingPointError` on CPU outside of `noting`."""
    noted = _noted.get()
    if noted is None and probabilities.device.type != "cpu":
        return
    # Softmax spreads NaN to every probability, and top-k sorts NaN first: element 0 of either is NaN.
    bad = (probabilities[..., 0] + weights[..., 0]).isnan()
    if noted is not None:
        noted.append(bad)
    elif bad.any():
        raise FloatingPointError(f"moec::route: the router logits {describe_mask(bad)}")


def note(logits: Tensor) -> None:
    """Notes the tokens of logits [B, S, n] that have no scores: one is NaN or +inf, or all are -inf."""
    noted = _noted.get()
    if noted is not None:
        noted.append(~logits.amax(-1).isfinite())


def describe_mask(bad: Tensor) -> str:
    """The number of a mask's tokens, which have no scores, and the first of them, in words."""
    sequence, token = bad.nonzero()[0].tolist()
    if bad.shape[1] == 1:
        return f"are NaN or infinite for {int(bad.sum())} of {len(bad)} sequences, first sequence {sequence}"
    first = f"first token {token} of sequence {sequence}"
    return f"are NaN or infinite for {int(bad.sum())} of {bad.numel()} tokens, {first}"
