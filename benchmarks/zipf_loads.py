"""The load of experts that tokens draw without replacement in proportion to a Zipf law."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import log
from typing import TYPE_CHECKING

from moec.codegen.kernels.model.model_loads import Load

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]


def zipf(tokens: int, experts: int, k: int, exponent: float = 1.1) -> Load:
    """Each token draws `k` experts without replacement, in proportion to (i + 1) ** -exponent."""
    return Load(tokens, inclusions(tuple((i + 1) ** -exponent for i in range(experts)), k))


@lru_cache(maxsize=64)
def inclusions(shares: Sequence[float], k: int) -> tuple[float, ...]:
    """The chance of each expert to be among `k` drawn without replacement in proportion to `shares`; they add up to k.

    The draw is a race: expert e arrives at an exponential time of rate `shares[e]`, and the first k are chosen. So the
    chance is the integral over e's arrival t of the chance that fewer than k others came before t.
    """
    import numpy as np

    experts = len(shares)
    if k >= experts:
        return (1.0,) * experts
    rates = np.array(shares) / sum(shares)
    # The integrand is smooth and vanishes at both ends in log t, where the trapezoidal rule converges exponentially.
    logs = np.linspace(log(1e-9), log(60 / rates.min()), 1200)
    times, step = np.exp(logs), logs[1] - logs[0]
    before, after = [_none_yet(len(times), k)], [_none_yet(len(times), k)]
    for rate in rates[:-1]:
        before.append(_one_more(before[-1], np.exp(-rate * times)))
    for rate in rates[:0:-1]:
        after.append(_one_more(after[-1], np.exp(-rate * times)))
    chances = []
    for rate, ahead, behind in zip(rates, before, reversed(after), strict=True):
        fewer = (ahead * np.cumsum(behind, axis=1)[:, ::-1]).sum(axis=1)
        chances.append(float((rate * times * np.exp(-rate * times) * fewer).sum() * step))
    return tuple(min(1.0, chance) for chance in chances)


def _none_yet(points: int, k: int) -> Numbers:
    """Chances [points, k] of 0 to k − 1 arrivals among no experts."""
    import numpy as np

    chances = np.zeros((points, k))
    chances[:, 0] = 1
    return chances


def _one_more(chances: Numbers, late: Numbers) -> Numbers:
    """Chances [points, k] with one more expert, which has not arrived with chance `late` [points]."""
    more = chances * late[:, None]
    more[:, 1:] += chances[:, :-1] * (1 - late)[:, None]
    return more
