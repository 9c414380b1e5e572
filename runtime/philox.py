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
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_FIRST, _SECOND, _HALF, _LOW = (torch.tensor(n, device="cpu") for n in (0xD2511F53, 0xCD9E8D57, 32, _MASK))
"""The multipliers of words 0 and 2, the bits of half a product, and the mask. Torch makes a tensor of an `int` at each
call, which takes a third of the time of an operation on 8,192 words (measured)."""


def key_of(*parts: object) -> tuple[int, int]:
    """A key of two 32-bit words, a hash of `parts`."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def philox_words(indices: Tensor, key: tuple[int, int]) -> Tensor:
    """Four 32-bit words of each index (int64, below 2^63): int64 `[4, *indices.shape]`."""
    zero = torch.zeros((), dtype=torch.int64, device=indices.device)
    return torch.stack(philox4x32((indices & _MASK, indices >> 32, zero, zero), key))


def philox4x32(counter: Sequence[Tensor], key: Sequence[Tensor | int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words of a counter of four words under a key of two, all below 2^32: four int64 `shape`.

    The words of the counter and of the key broadcast to `shape`.
    """
    c0, c1, c2, c3 = counter
    keys = [_round_keys(torch.as_tensor(word, device=c0.device), step) for word, step in zip(key, _WEYL, strict=True)]
    round_keys = zip(*keys, strict=True)
    shape = torch.broadcast_shapes(*(word.shape for word in (*counter, keys[0][0], keys[1][0])))  # type: ignore[no-untyped-call]
    # 64-bit products wrap around; their low and high halves are still right. Words 1 and 3 are low halves of products:
    # their high halves are cleared after the exclusive or of a round, and once more at the end.
    while True:  # the first rounds of words that broadcast are those of few numbers
        k0, k1 = next(round_keys)
        first, second = c0 * _FIRST, c2 * _SECOND
        c0 = (second >> 32).bitwise_xor(c1).bitwise_xor(k0).bitwise_and_(_MASK)
        c2 = (first >> 32).bitwise_xor(c3).bitwise_xor(k1).bitwise_and_(_MASK)
        c1, c3 = second, first
        if c0.shape == c2.shape == shape:  # after three rounds at the latest
            break
    c1, c3 = c1.expand(shape).contiguous(), c3.expand(shape).contiguous()
    first, second = torch.empty_like(c0), torch.empty_like(c0)
    for k0, k1 in round_keys:
        torch.mul(c0, _FIRST, out=first)
        torch.mul(c2, _SECOND, out=second)
        torch.bitwise_right_shift(second, _HALF, out=c0).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_LOW)
        torch.bitwise_right_shift(first, _HALF, out=c2).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_LOW)
        c1, c3, first, second = second, first, c3, c1
    return c0, c1.bitwise_and_(_LOW), c2, c3.bitwise_and_(_LOW)


def _round_keys(word: Tensor, step: int) -> Tensor:
    """A word of the key in each round: int64 `[ROUNDS, *word.shape]`."""
    steps = torch.arange(ROUNDS, device=word.device).mul_(step)
    return (word + steps.view(-1, *[1] * word.dim())).bitwise_and_(_MASK)


def halves(words: Tensor | int) -> tuple[Tensor, Tensor]:
    """The low and the high 32 bits of 64-bit words, each as an int64."""
    words = torch.as_tensor(words)
    return words & _MASK, (words >> 32) & _MASK


def normal(indices: Tensor, key: tuple[int, int]) -> Tensor:
    """Four standard normal numbers of each index, fp32 `[*indices.shape, 4]`, by Box and Muller."""
    return box_muller(philox_words(indices, key).unbind(), torch.float32)


def box_muller(words: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Four standard normal numbers of each four 32-bit words, `shape` each: `[*shape, 4]`, in `dtype`.

    Words 0 and 1 give the first two numbers, the cosine before the sine; words 2 and 3 give the others (Box and Muller
    1958). 24 bits of each word are used, whatever the dtype.
    """
    numbers = words[0].new_empty((*words[0].shape, WORDS), dtype=dtype)
    for first in range(0, WORDS, 2):
        # 24 bits each, the precision of fp32, in (0, 1] for the logarithm; the largest normal number is 5.8.
        radius, angle = ((word >> 8).to(dtype).add_(1).mul_(2.0**-24) for word in words[first : first + 2])
        radius.log_().mul_(-2).sqrt_()
        angle.mul_(2 * math.pi)
        torch.mul(radius, angle.cos(), out=numbers[..., first])
        torch.mul(radius, angle.sin_(), out=numbers[..., first + 1])
    return numbers
