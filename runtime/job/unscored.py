"""Tokens without scores: their router logits are NaN or infinite, and so their scores are NaN.

A model's forward pass notes them without waiting for the device; at its end the ranks agree whether there are any.
Outside of a model, `moec::route` raises for them on CPU only, where the check costs no synchronisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from moec.runtime.job.checks import Complaint

HELP = (
    "go on from the last weights that were finite, with a lower learning rate or with gradients clipped "
    "(`job.clip_grad_norm_`); if the batch is the cause, catch this error and skip the batch: no gradient was computed"
)

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
        raise FloatingPointError(f"moec::route: the router logits {_which(bad)}")


def note(logits: Tensor) -> None:
    """Notes the tokens of logits [B, S, n] that have no scores: one is NaN or +inf, or all are -inf."""
    noted = _noted.get()
    if noted is not None:
        noted.append(~logits.amax(-1).isfinite())


def complaint(noted: Sequence[Tensor], sites: Sequence[str]) -> Complaint | None:
    """Names the first router of `sites` that left tokens without scores. Waits for the device once."""
    if not noted or not torch.cat([bad.flatten() for bad in noted]).any():
        return None
    # A layer that the user replaced may route too: then there are more masks than sites.
    named = zip(sites if len(sites) == len(noted) else ["a layer"] * len(noted), noted, strict=True)
    site, bad = next((site, bad) for site, bad in named if bad.any())
    return Complaint("MOE0708", f"the router logits of {site} {_which(bad)}", HELP)


def _which(bad: Tensor) -> str:
    sequence, token = bad.nonzero()[0].tolist()
    if bad.shape[1] == 1:
        return f"are NaN or infinite for {int(bad.sum())} of {len(bad)} sequences, first sequence {sequence}"
    first = f"first token {token} of sequence {sequence}"
    return f"are NaN or infinite for {int(bad.sum())} of {bad.numel()} tokens, {first}"
