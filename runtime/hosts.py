"""Refuses hosts of `moec.layer` that take over its experts: DistributedDataParallel and `fully_shard`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from moec.runtime.errors import JobError


def require_left_alone(experts: nn.Module) -> None:
    """Raises `JobError` if the host manages experts: it takes them for replicas, and each rank has different ones."""
    own = {id(parameter) for parameter in experts.parameters()}
    if any(id(parameter) in own for parameter in _parameters_of_ddp()):
        raise JobError(
            "MOE0711",
            "DistributedDataParallel has made this rank's experts copies of rank 0's",
            "before it wraps the model, call `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model("
            "model, moec.expert_parameters(model))`",
        )
    inside = set(experts.modules())
    if any(owner in inside for owner in _owners_of_fsdp()):
        raise JobError(
            "MOE0711",
            "fully_shard has cut this rank's experts up among the other ranks",
            "give every call of it `ignored_params = set(moec.expert_parameters(model).values())`",
        )


def _parameters_of_ddp() -> list[nn.Parameter]:
    """The parameters of the DistributedDataParallel module whose forward pass is running, if one is."""
    wrapped: Any = nn.parallel.DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    return list(wrapped._module_parameters) if wrapped is not None else []


def _owners_of_fsdp() -> Iterator[nn.Module]:
    """The modules whose parameters `fully_shard` has taken over; torch has no public list of them."""
    states: Any = sys.modules.get("torch.distributed._composable_state")
    for reference in list(states._module_state_mapping.values()) if states is not None else ():
        for group in getattr(reference(), "_fsdp_param_groups", ()):
            for parameter in group.fsdp_params:
                yield parameter._module_info.module
                yield from parameter._module_info.shared_modules
