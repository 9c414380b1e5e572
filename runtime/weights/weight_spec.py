"""The spec of a layer's parameter: this rank's part, its dtype, and the groups that gather it and sum its gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroPart:
    """ZeRO's cut of a parameter: each of the `ranks` of `group` has a part along `dim`.

    `per_use`: every use of the layer gathers the weight and frees it afterwards (stage 3). `per_pass`: every backward
    pass scatters the gradient (stages 2 and 3); otherwise whole gradients are collected until the last micro-batch.
    """

    group: str
    dim: int
    ranks: int
    per_use: bool
    per_pass: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpec:
    """A parameter as a layer computes with it.

    `name` is relative to its module, `shape` is that of this rank's part, `groups` sum its gradient, `site` is the part
    of the model that uses it. `scale` multiplies the gradient's sum. `master` is the dtype that the parameter must
    have; None if a host may convert it. A `frozen` parameter must not require a gradient: no group would sum it. With
    `zero` the weight is gathered over `zero.group`, and the gradient is summed and scattered over `zero.group` before
    `groups` sum it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    groups: tuple[str, ...] = ()
    site: str = ""
    scale: float = 1.0
    master: torch.dtype | None = None
    frozen: bool = False
    zero: ZeroPart | None = None

    @property
    def collects(self) -> bool:
        """Whether gradients of micro-batches are added up on this rank before they are summed over ranks."""
        return not self.frozen and (self.zero is None or not self.zero.per_pass)
