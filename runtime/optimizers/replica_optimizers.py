"""Refuses optimizers that broadcast or reduce all parameters over ranks as if they were replicas: experts are not."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.algorithms.model_averaging import utils
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from moec.runtime.errors import JobError

OVERWRITTEN = "parameters over ranks, as if they were replicas: experts would be overwritten by other ranks'"

BESIDE = "give it the other parameters alone, and `moec.expert_parameters(model).values()` an optimizer of their own"
ELEMENTWISE = f"{BESIDE} that works element by element, such as AdamW"
SHARDED = f"{BESIDE}; a job's model has `zero = 1` in `parallel {{ … }}` and `job.optimizer`"
"""Helps of MOE0711. `SHARDED` is for optimizers that shard their state or average parameters."""

_sharded = WeakSet[nn.Module]()
"""Modules over several ranks: models of jobs, and the experts of layers."""


def refuse_replica_optimizers(module: nn.Module) -> None:
    """From now on torch's optimizers that average, broadcast or reduce parameters of `module` raise MOE0711."""
    _install()
    _sharded.add(module)


@functools.cache
def _install() -> None:
    register_optimizer_step_pre_hook(_before_a_step)
    utils.average_parameters = _checked_average(utils.average_parameters)


def _before_a_step(optimizer: Optimizer, *_: Any) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        # DTensors alone are right, and torch itself refuses them beside plain tensors.
        plain = (p for group in optimizer.param_groups for p in group["params"] if not isinstance(p, DTensor))
        words = "LBFGS takes dot products over all parameters: each rank would take its own step"
        _require_replicas(plain, words, ELEMENTWISE)
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if zero is not None and isinstance(optimizer, zero.ZeroRedundancyOptimizer):
        params = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
        _require_replicas(params, f"ZeroRedundancyOptimizer broadcasts {OVERWRITTEN}", SHARDED)


def _checked_average(average: Any) -> Any:
    """A checked `average_parameters`. Torch's averagers call it, also in `PostLocalSGDOptimizer`, and have no hooks."""

    @functools.wraps(average)
    def average_parameters(params: Iterator[nn.Parameter], *arguments: Any, **keywords: Any) -> Any:
        parameters = list(params)
        averager = "an averager of torch.distributed.algorithms.model_averaging"
        _require_replicas(iter(parameters), f"{averager} averages {OVERWRITTEN}", SHARDED)
        return average(iter(parameters), *arguments, **keywords)

    return average_parameters


def _require_replicas(params: Iterator[torch.Tensor], words: str, remedy: str) -> None:
    """Raises `JobError` MOE0711 if one of the parameters is a module's over several ranks."""
    sharded_ids = {id(parameter) for module in _sharded for parameter in module.parameters()}
    if any(id(parameter) in sharded_ids for parameter in params):
        raise JobError("MOE0711", words, remedy)
