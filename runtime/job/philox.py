"""Random numbers as a function of a key and an index: Philox4x32-10 in int64 tensor operations.

A counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): number i of a key is a
function of the key and of i, so every rank draws just the elements it holds, on any device. The bits are the same
everywhere; normal numbers made of them are, up to the rounding of a logarithm and a cosine.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

WORDS = 4
"""Numbers that one counter gives."""

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def key_of(*parts: object) -> tuple[int, int]:
    """Two 32-bit words that stand for `parts`."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def philox(counters: Tensor, key: tuple[int, int]) -> Tensor:
    """Four 32-bit words of each counter (int64, below 2^63): int64 `[4, *counters.shape]`."""
    c0, c1 = counters & _MASK, counters >> 32
    c2, c3 = torch.zeros_like(counters), torch.zeros_like(counters)
    k0, k1 = key
    for _ in range(ROUNDS):
        # 64-bit products wrap around; their low and high halves are right all the same.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (second >> 32).bitwise_and_(_MASK).bitwise_xor_(c1).bitwise_xor_(k0)
        c2 = (first >> 32).bitwise_and_(_MASK).bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = second.bitwise_and_(_MASK), first.bitwise_and_(_MASK)
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.stack((c0, c1, c2, c3))


def normal(counters: Tensor, key: tuple[int, int]) -> Tensor:
    """Four standard normal numbers of each counter, fp32 `[*counters.shape, 4]`, by Box and Muller."""
    words = philox(counters, key)
    # 24 bits each: as many as fp32 holds. In (0, 1], for the logarithm; the largest number is 5.8.
    uniform = (words >> 8).add_(1).float().mul_(2.0**-24)
    radius = uniform[::2].log().mul_(-2).sqrt_()
    angle = uniform[1::2].mul_(2 * math.pi)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), -1).movedim(0, -2).flatten(-2)
