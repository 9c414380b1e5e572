"""Seconds by what takes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Term = Literal[
    "experts",
    "products",
    "attention",
    "elementwise",
    "launches",
    "again",
    "all_to_all",
    "etp",
    "tp",
    "cp",
    "other_sends",
    "uneven",
    "bubble",
    "weights",
    "gradients",
    "casts",
    "optimizer",
]
"""What a step's seconds go to: `products` are those of dense layers, routers and the head; `launches` what the host
needs beyond the device; `again` the computations that `recompute` repeats; `all_to_all`, `etp`, `tp` and `cp` the
collectives of activations by their group, repeated ones too; `uneven` what the pipeline rank that ends last
computes more than the mean, `bubble` its waits; `weights` and `gradients` the gathers and sums of parameters that do
not run beside computations, `casts` the kernels that cast weights, and widen and add gradients."""

EXPOSED: frozenset[Term] = frozenset({"all_to_all", "etp", "tp", "cp", "other_sends", "weights", "gradients"})
"""The terms of collectives."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds by term. Terms may be negative: a rank that ends last may compute less than the mean."""

    of: Mapping[Term, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """All terms together."""
        return sum(self.of.values())

    def __add__(self, other: Seconds) -> Seconds:
        return summed([(self, 1), (other, 1)])


def summed(parts: Iterable[tuple[Seconds, float]]) -> Seconds:
    """The sum of parts, each so many times."""
    return by_term((term, number * of) for part, number in parts for term, of in part.of.items())


def by_term(pairs: Iterable[tuple[Term, float]]) -> Seconds:
    """The sum of seconds by their term."""
    sums = defaultdict[Term, float](float)
    for term, seconds in pairs:
        sums[term] += seconds
    return Seconds(dict(sums))
