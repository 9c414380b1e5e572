"""The home of a module, a single process or a rank of a job, which makes its parameters and states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moec.codegen.emit import DTYPES
from moec.codegen.plan import PlanParameter
from moec.passes.ir import Block, Mesh, Op, State
from moec.runtime.ranks.checks import Checks
from moec.runtime.weights.names import add_parameter
from moec.runtime.weights.open_step import OpenStep
from moec.runtime.weights.shards import initial_shard, initial_state
from moec.runtime.weights.weight_spec import WeightSpec
from moec.runtime.weights.weights import Weights

SINGLE_RANK_MESH = Mesh("dense", (("dp", 1),))


class Home(Protocol):
    """The interface of a module to the rank that runs it. Copies of a module use the same home."""

    @property
    def groups(self) -> str:
        """The prefix of its process groups' names."""
        ...

    @property
    def checks(self) -> Checks:
        """The checks of the module's inputs over its ranks."""
        ...

    @property
    def seed(self) -> int:
        """The seed of new parameters and of random numbers."""
        ...

    @property
    def data_rank(self) -> int:
        """The index of this rank's part of the global batch."""
        ...

    @property
    def data_size(self) -> int:
        """The number of parts of the global batch."""
        ...

    @property
    def shares_batch(self) -> bool:
        """Whether several ranks read the same part of the batch.

        Each computes a part of the vocabulary or of the sequence.
        """
        ...

    @property
    def rank(self) -> int:
        """This process's rank in the job."""
        ...

    @property
    def stages(self) -> tuple[int, ...]:
        """The pipeline stages that this process runs."""
        ...

    def parameter(self, name: str) -> nn.Parameter:
        """Makes the parameter of this full name."""
        ...

    def state(self, state: State) -> Tensor:
        """The initial value of a state."""
        ...

    def weight(self, name: str, site: str) -> WeightSpec:
        """The spec of the parameter of this full name; `site` names the part of the model that uses it."""
        ...

    def ways(self, block: Block, op: Op) -> str | None:
        """The ways in which an op of experts computes its products on this rank's device; None: chosen at each call."""
        ...

    def require_running(self) -> None:
        """Raises `JobError` if the job has ended."""
        ...

    def count_from(self, step: int) -> None:
        """Sets the job's count of steps to the script's `step`; 0 also resets its count of tokens."""
        ...

    def count_pass(self, tokens: Tensor, segments: Tensor | None, real: Tensor | None) -> None:
        """Counts the tokens of a training pass, and the keys that they attend to (`AttendedKeys.add`)."""
        ...

    def signature(self) -> dict[str, Any]:
        """The rank and the sharding of this module's parameters, which a `state_dict` stores in its metadata."""
        ...

    def complaint_of(self, signature: dict[str, Any]) -> str | None:
        """The reason why a `state_dict` with this signature does not fit this rank, or None."""
        ...


class SingleProcessHome:
    """The home of one process that has all parameters unsharded, in fp32, or in `dtype` if that is wider.

    `dtype` also replaces the dtype in which layers compute.
    """

    groups, rank = "", 0
    data_rank, data_size, shares_batch = 0, 1, False
    stages = (0,)

    def __init__(self, parameters: Mapping[str, PlanParameter], *, seed: int, dtype: torch.dtype | None) -> None:
        self.checks = Checks()
        self._parameters, self.seed, self._dtype = parameters, seed, dtype
        self._master = torch.promote_types(dtype or torch.float32, torch.float32)

    def __deepcopy__(self, memo: dict[int, Any]) -> SingleProcessHome:
        return self

    def parameter(self, name: str) -> nn.Parameter:
        data = self._parameters[name]
        value = initial_shard(name, data, SINGLE_RANK_MESH, 0, seed=self.seed, dtype=self._master)
        return nn.Parameter(value, requires_grad=not data.frozen)

    def state(self, state: State) -> Tensor:
        return initial_state(state, self._master)

    def weight(self, name: str, site: str) -> WeightSpec:
        data = self._parameters[name]
        dtype = self._dtype or DTYPES[data.dtype]
        return WeightSpec(name=name, shape=data.shape, dtype=dtype, site=site, master=self._master, frozen=data.frozen)

    def ways(self, block: Block, op: Op) -> str | None:
        return None

    def require_running(self) -> None:
        """Never raises: a single process needs no job."""

    def count_from(self, step: int) -> None:
        """Does nothing: only jobs count steps."""

    def count_pass(self, tokens: Tensor, segments: Tensor | None, real: Tensor | None) -> None:
        """Does nothing: only jobs count attended keys."""

    def signature(self) -> dict[str, Any]:
        return {"ranks": 1, "rank": 0}

    def complaint_of(self, signature: dict[str, Any]) -> str | None:
        ranks = signature["ranks"]
        return None if ranks == 1 else f"it has one rank's parts of a plan for {ranks} ranks, and this model is whole"


def home_of(module: nn.Module) -> Home:
    """The home of a module that moec made."""
    home: Home = module.__dict__["_home"]
    return home


def make_weights(
    owner: nn.Module,
    path: str,
    names: Sequence[str],
    sites: Mapping[str, str],
    home: Home,
    open_step: OpenStep,
) -> Weights:
    """Makes the parameters `names` of `owner`, the module at `path` in the model."""
    specs = []
    for name in names:
        add_parameter(owner, name, partial(home.parameter, path + name))
        specs.append(replace(home.weight(path + name, sites[name]), name=name))
    return Weights(owner, path.rstrip(".") or names[0], specs, open_step)
