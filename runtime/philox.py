"""Random numbers as a function of a key and an index: Philox4x32-10 in int64 tensor operations.

A counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): number i of a key is a
function of the key and of i, so every rank draws only the elements it holds, on any device. The bits are equal on all
devices; normal numbers differ at most in the rounding of a logarithm and a cosine.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

WORDS = 4
"""Numbers per index."""

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def key_of(*parts: object) -> tuple[int, int]:
    """A key of two 32-bit words, a hash of `parts`."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def philox_words(indices: Tensor, key: tuple[int, int]) -> Tensor:
    """Four 32-bit words of each index (int64, below 2^63): int64 `[4, *indices.shape]`."""
    zero = torch.zeros_like(indices)
    return philox4x32((indices & _MASK, indices >> 32, zero, zero), key)


def philox4x32(counter: Sequence[Tensor], key: Sequence[Tensor | int]) -> Tensor:
    """Four 32-bit words of a counter of four words under a key of two, all below 2^32: int64 `[4, *shape]`.

    The counter's words broadcast to `shape`, and the key's words to them.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)  # type: ignore[no-untyped-call]
    k0, k1 = key
    for _ in range(ROUNDS):
        # 64-bit products wrap around; their low and high halves are still right.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (second >> 32).bitwise_and_(_MASK).bitwise_xor_(c1).bitwise_xor_(k0)
        c2 = (first >> 32).bitwise_and_(_MASK).bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = second.bitwise_and_(_MASK), first.bitwise_and_(_MASK)
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.stack((c0, c1, c2, c3))


def halves(words: Tensor | int) -> tuple[Tensor, Tensor]:
    """The low and the high 32 bits of 64-bit words, each as an int64."""
    whole = torch.as_tensor(words)
    return whole & _MASK, (whole >> 32) & _MASK


def normal(indices: Tensor, key: tuple[int, int]) -> Tensor:
    """Four standard normal numbers of each index, fp32 `[*indices.shape, 4]`, by Box and Muller."""
    return box_muller(philox_words(indices, key), torch.float32)


def box_muller(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Four standard normal numbers of each four 32-bit words `[4, *shape]`: `[*shape, 4]`, in `dtype`.

    Words 0 and 1 give the first two numbers, the cosine before the sine; words 2 and 3 give the others (Box and Muller
    1958). 24 bits of each word are used, whatever the dtype.
    """
    # 24 bits each, the precision of fp32, in (0, 1] for the logarithm; the largest normal number is 5.8.
    uniform = (words >> 8).add_(1).to(dtype).mul_(2.0**-24)
    radius = uniform[::2].log().mul_(-2).sqrt_()
    angle = uniform[1::2].mul_(2 * math.pi)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), -1).movedim(0, -2).flatten(-2)
