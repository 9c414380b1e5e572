"""Philox4x32-10 in Python's integers, and the numbers that a token draws from it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SEED, STEP = 2**61 + 12_345, 2**33 + 7


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox4x32-10 as its paper prints it (Salmon et al. 2011, figure 2 and table 2)."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second % 2**32, (first >> 32) ^ c3 ^ k1, first % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def words_of(number: int, place: int, count: int, layer: int, stream: int) -> list[int]:
    """`count` random words in `layer` of the token at `place` of the sequence with a `number`, in step `STEP`."""
    key = philox((place, number, STEP % 2**32, STEP >> 32), (SEED % 2**32, SEED >> 32))[:2]
    return [w for i in range(-(-count // 4)) for w in philox((i, layer, stream, 0), (key[0], key[1]))][:count]


def words(batch: int, sequence: int, count: int, layer: int, stream: int) -> Tensor:
    """`count` random words of each token in `layer`: int64 [batch, sequence, count]."""
    return torch.tensor(
        [[words_of(n, i, count, layer, stream) for i in range(sequence)] for n in range(batch)], dtype=torch.int64
    )


def uniform(batch: int, sequence: int, count: int, layer: int, stream: int = 1) -> Tensor:
    """`words` as numbers in [0, 1)."""
    return (words(batch, sequence, count, layer, stream) >> 8).double() / 2**24


def normal(batch: int, sequence: int, count: int, layer: int) -> Tensor:
    """Box and Muller (1958) of each two words: [batch, sequence, count]."""
    drawn = words(batch, sequence, -(-count // 4) * 4, layer, 1)
    uniform = ((drawn >> 8) + 1).double() / 2**24
    radius, angle = (-2 * uniform[..., ::2].log()).sqrt(), 2 * math.pi * uniform[..., 1::2]
    return torch.stack([radius * angle.cos(), radius * angle.sin()], -1).flatten(-2)[..., :count]
