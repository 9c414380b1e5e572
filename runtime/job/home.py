"""Where a module runs: in one process, or as a rank of a job; and how it gets its parameters there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from moec.codegen.emit import DTYPES
from moec.codegen.plan import PlanParameter
from moec.passes.ir import Mesh
from moec.runtime.job.checks import Checks
from moec.runtime.job.names import add_parameter
from moec.runtime.job.shards import initial_shard
from moec.runtime.job.weights import Microbatches, Weights, WeightSpec

ALONE = Mesh("dense", (("dp", 1),))


class Home(Protocol):
    """The place where a module runs, as far as the module depends on it. Copies of the module share it."""

    @property
    def groups(self) -> str:
        """What the names of its process groups begin with."""
        ...

    @property
    def checks(self) -> Checks:
        """How its ranks check what the module is given."""
        ...

    def parameter(self, name: str) -> nn.Parameter:
        """A new parameter, by its full name."""
        ...

    def weight(self, name: str, site: str) -> WeightSpec:
        """How a layer takes the parameter of this full name; `site` says which part of the model uses it."""
        ...

    def require_running(self) -> None:
        """Raises `JobError` where the job has ended."""
        ...

    def signature(self) -> dict[str, Any]:
        """Says which rank's parts of the parameters a `state_dict` holds; stored beside it."""
        ...

    def complaint_of(self, signature: dict[str, Any]) -> str | None:
        """Why a `state_dict` with this signature does not fit this rank, or None."""
        ...


class Alone:
    """One process has every parameter whole, in fp32, or in `dtype` where that is wider.

    `dtype` also replaces the dtype in which layers compute.
    """

    groups = ""

    def __init__(self, parameters: Mapping[str, PlanParameter], *, seed: int, dtype: torch.dtype | None) -> None:
        self.checks = Checks()
        self._parameters, self._seed, self._dtype = parameters, seed, dtype

    def __deepcopy__(self, memo: dict[int, Any]) -> Alone:
        return self

    def parameter(self, name: str) -> nn.Parameter:
        master = torch.promote_types(self._dtype or torch.float32, torch.float32)
        return nn.Parameter(initial_shard(name, self._parameters[name], ALONE, 0, seed=self._seed, dtype=master))

    def weight(self, name: str, site: str) -> WeightSpec:
        data = self._parameters[name]
        return WeightSpec(name=name, shape=data.shape, dtype=self._dtype or DTYPES[data.dtype], site=site)

    def require_running(self) -> None:
        """Never raises: a single process needs no job."""

    def signature(self) -> dict[str, Any]:
        return {"ranks": 1, "rank": 0}

    def complaint_of(self, signature: dict[str, Any]) -> str | None:
        ranks = signature["ranks"]
        return None if ranks == 1 else f"it holds one rank's parts of a plan for {ranks}, and this model is whole"


def home_of(module: nn.Module) -> Home:
    """Where a model of moec runs."""
    home: Home = module.__dict__["_home"]
    return home


def own_weights(
    owner: nn.Module,
    path: str,
    names: Sequence[str],
    sites: Mapping[str, str],
    home: Home,
    microbatches: Microbatches,
) -> Weights:
    """Makes the parameters `names` of `owner`, which stands at `path` in the model."""
    specs = []
    for name in names:
        add_parameter(owner, name, partial(home.parameter, path + name))
        specs.append(replace(home.weight(path + name, sites[name]), name=name))
    return Weights(owner, specs, microbatches)
