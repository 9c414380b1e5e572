"""The number of rows of each expert: expectations over random routing, or known counts.

Tokens choose independently of each other. So the rows of one expert are binomial: one trial per token, with the chance
that a token has the expert among its choices. Sums over experts (numbers of tiles, padding) need nothing more, and are
exact. The functions import NumPy themselves: plans are compiled and read without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log, sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

WINDOW = 12
"""Standard deviations about the mean that are summed; the rest is below the rounding of a float64."""


@dataclass(frozen=True, slots=True)
class Load:
    """`trials` tokens, and for each expert the probability that a token chooses it; or the known `counts` of rows.

    A probability of 0 or 1 makes an expert's rows certain.
    """

    trials: int = 0
    chances: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()

    @classmethod
    def uniform(cls, tokens: int, experts: int, k: int) -> Load:
        """All experts equally likely: `tokens` tokens with `k` different experts each."""
        return cls(tokens, (k / experts,) * experts)

    @classmethod
    def uniform_over_ranks(cls, tokens: int, experts: int, k: int, ranks: int) -> Load:
        """One of `ranks` ranks, each with `tokens` tokens and with `experts` experts: all choices equally likely."""
        return cls(tokens * ranks, (k / (experts * ranks),) * experts)

    @property
    def experts(self) -> int:
        """The number of experts, including those without rows."""
        return len(self.counts) or len(self.chances)

    @property
    def rows(self) -> float:
        """Expected rows of all experts."""
        return float(sum(self.counts)) if self.counts else self.trials * sum(self.chances)

    @property
    def most_rows(self) -> float:
        """Expected rows of the expert with the most."""
        return float(max(self.counts)) if self.counts else self.trials * max(self.chances)

    def expected(self, function: Callable[[Numbers], Numbers]) -> float:
        """The expected sum over experts of `function` of an expert's rows; it takes arrays of numbers of rows."""
        import numpy as np

        if self.counts:
            return float(function(np.array(self.counts, dtype=np.float64)).sum())
        total = 0.0
        for chance, experts in Counter(self.chances).items():
            counts, weights = _binomial(self.trials, chance)
            total += experts * float((function(counts) * weights).sum())
        return total

    def tiles(self, height: int) -> float:
        """Expected tiles of `height` rows: each expert's last one may be partly empty."""
        return _tiles(self, height)

    def padding_efficiency(self, height: int) -> float:
        """The useful part of the multiplications: rows over rows of tiles."""
        tiles = self.tiles(height)
        return self.rows / (tiles * height) if tiles else 1.0

    def used_experts(self) -> float:
        """Expected experts with at least one row."""
        return _used_experts(self)


@lru_cache(maxsize=4096)
def _tiles(load: Load, height: int) -> float:
    import numpy as np

    return load.expected(lambda rows: np.ceil(rows / height))


@lru_cache(maxsize=4096)
def _used_experts(load: Load) -> float:
    import numpy as np

    return load.expected(lambda rows: (rows > 0).astype(np.float64))


@lru_cache(maxsize=4096)
def _binomial(trials: int, chance: float) -> tuple[Numbers, Numbers]:
    """Numbers of successes within `WINDOW` standard deviations, and their probabilities."""
    import numpy as np

    if chance <= 0 or chance >= 1 or not trials:
        return np.array([trials * min(1.0, max(0.0, chance))]), np.ones(1)
    mean, spread = trials * chance, sqrt(trials * chance * (1 - chance))
    low, high = max(0, int(mean - WINDOW * spread) - WINDOW), min(trials, ceil(mean + WINDOW * spread) + WINDOW)
    counts = np.arange(low, high + 1, dtype=np.float64)
    # P(n + 1) / P(n) = (trials - n) / (n + 1) · chance / (1 - chance), summed as logarithms.
    ratios = np.log((trials - counts[:-1]) / counts[1:]) + log(chance / (1 - chance))
    logs = np.concatenate([np.zeros(1), np.cumsum(ratios)])
    weights = np.exp(logs - logs.max())
    return counts, weights / weights.sum()
