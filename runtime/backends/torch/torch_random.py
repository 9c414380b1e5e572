"""Random numbers of tokens in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moec.runtime.philox import WORDS, box_muller, halves, philox4x32

CHUNK = 1 << 18
"""Numbers drawn at once: their int64 words stay in a CPU's cache."""


def token_keys(ids: Tensor, sequences: Tensor, seed: Tensor, step: Tensor) -> Tensor:
    places = torch.arange(ids.shape[1], device=ids.device)
    counter = (places, sequences[:, None], *(half.to(ids.device) for half in halves(step)))
    words = philox4x32(counter, [int(half) for half in halves(seed)])
    return words[0] | words[1] << 32


def jitter(x: Tensor, keys: Tensor, training: Tensor, layer: Tensor, amount: float, stream: int) -> Tensor:
    out = x.to(torch.promote_types(x.dtype, torch.float32), copy=True, memory_format=torch.contiguous_format)
    if not int(training) or not x.numel():
        return out
    dim = x.shape[2]
    rows, tokens, size = out.view(-1, dim), keys.reshape(-1, 1), max(1, CHUNK // dim)
    for rows_part, keys_part in zip(torch.split(rows, size), torch.split(tokens, size), strict=True):
        rows_part *= _uniform(_words(keys_part, dim, layer, stream), rows_part.dtype)[:, :dim].mul_(amount).add_(1)
    return out


def normal_noise(logits: Tensor, keys: Tensor, training: Tensor, layer: Tensor, stream: int) -> Tensor:
    noise = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
    if not int(training) or not noise.numel():
        return noise
    dim = noise.shape[2]
    rows, tokens, size = noise.view(-1, dim), keys.reshape(-1, 1), max(1, CHUNK // dim)
    for rows_part, keys_part in zip(torch.split(rows, size), torch.split(tokens, size), strict=True):
        rows_part.copy_(box_muller(_words(keys_part, dim, layer, stream), rows_part.dtype).flatten(1)[:, :dim])
    return noise


def _words(keys: Tensor, dim: int, layer: Tensor, stream: int) -> tuple[Tensor, ...]:
    """Four words for each four of `dim` elements of each token, keyed by its key `[tokens, 1]`: `[tokens, dim / 4]`,
    rounded up."""
    groups = torch.arange(-(-dim // WORDS), device=keys.device)
    others = torch.tensor([int(layer), stream, 0], device=keys.device)
    return philox4x32((groups, *others), halves(keys))


def _uniform(words: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """32-bit words, four `[tokens, n]` → numbers in [−1, 1), multiples of 2⁻²³, `[tokens, 4 n]`."""
    numbers = words[0].new_empty((*words[0].shape, WORDS), dtype=dtype)
    for index, word in enumerate(words):
        numbers[..., index] = word >> 8
    return numbers.flatten(1).mul_(2.0**-23).sub_(1)
