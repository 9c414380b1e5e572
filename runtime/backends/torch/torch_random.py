"""Random numbers of tokens in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from moec.runtime.philox import WORDS, halves, philox4x32

CHUNK = 1 << 18
"""Numbers drawn at once: their int64 words stay in a CPU's cache."""


def token_keys(ids: Tensor, sequences: Tensor, seed: Tensor, step: Tensor) -> Tensor:
    places = torch.arange(ids.shape[1], device=ids.device)
    counter = (places, sequences[:, None], *(half.to(ids.device) for half in halves(step)))
    words = philox4x32(counter, [int(half) for half in halves(seed)])
    return words[0] | words[1] << 32


def jitter(x: Tensor, keys: Tensor, training: Tensor, layer: Tensor, amount: float, stream: int) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32), copy=True, memory_format=torch.contiguous_format)
    if not int(training) or not x.numel():
        return wide
    dim = x.shape[2]
    groups = torch.arange(-(-dim // WORDS), device=x.device)
    others = torch.tensor([int(layer), stream, 0], device=x.device)
    rows, tokens, size = wide.view(-1, dim), keys.reshape(-1, 1), max(1, CHUNK // dim)
    for part, own in zip(torch.split(rows, size), torch.split(tokens, size), strict=True):
        # the rounds write in place: the counter needs its full shape
        words = philox4x32((groups[None].expand(len(own), -1), *others), halves(own))
        part *= _uniform(words, part.dtype)[:, :dim].mul_(amount).add_(1)
    return wide


def _uniform(words: Tensor, dtype: torch.dtype) -> Tensor:
    """32-bit words `[4, tokens, n]` → numbers in [−1, 1), multiples of 2⁻²³, `[tokens, 4 n]`."""
    return (words >> 8).permute(1, 2, 0).flatten(1).to(dtype).mul_(2.0**-23).sub_(1)
