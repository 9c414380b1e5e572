"""Refuses DistributedDataParallel and `fully_shard` where they manage the experts of `moec.layer`."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moec.runtime.errors import JobError


def _hosts() -> tuple[object, ...]:
    """The active DDP module, and the module that last got a composable state (`fully_shard`): a later wrap changes it.

    Weak references: after garbage collection an id can be reused and a count can fall, at different times on different
    ranks. A rank that skips the check would not raise, and the others would hang.
    """
    ddp, states = _active_ddp(), sys.modules.get("torch.distributed._composable_state")
    sharded: Any = states._module_state_mapping.keyrefs() if states is not None else ()
    return (None if ddp is None else weakref.ref(ddp), *sharded[-1:])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def check_hosts(experts: nn.Module, ranks: Sequence[int], last: tuple[object, ...] | None) -> tuple[object, ...]:
    """Returns the present hosts. If they are not the `last`, calls `require_left_alone`, which raises `JobError`."""
    now = _hosts()
    if last != now:
        require_left_alone(experts, ranks)
    return now


def require_left_alone(experts: nn.Module, ranks: Sequence[int]) -> None:
    """Raises `JobError` if the host manages experts: it takes them for replicas, but ranks have different experts.

    Raises it too if the host reduces over other ranks than the layer's `ranks`: replicas of experts would drift apart.
    """
    ddp = _active_ddp()
    if ddp is not None and set(dist.get_process_group_ranks(ddp.process_group)) != set(ranks):
        hosts = sorted(dist.get_process_group_ranks(ddp.process_group))
        raise JobError(
            "MOE0711",
            f"DistributedDataParallel spans the ranks {hosts}, but a layer in it spans {sorted(ranks)}",
            "make the layer without `group`, and set `parallel { ep = … }` in its file",
        )
    local_experts = {id(parameter) for parameter in experts.parameters()}
    if ddp is not None and any(id(parameter) in local_experts for parameter in ddp._module_parameters):
        raise JobError(
            "MOE0711",
            "DistributedDataParallel has replaced this rank's experts by copies of rank 0's",
            "before it wraps the model, call `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model("
            "model, moec.expert_parameters(model))`",
        )
    inside = set(experts.modules())
    if any(owner in inside for owner in _owners_of_fsdp()):
        raise JobError(
            "MOE0711",
            "fully_shard has sharded this rank's experts over the other ranks",
            "pass `ignored_params = set(moec.expert_parameters(model).values())` to every call of fully_shard",
        )


def _active_ddp() -> Any:
    """The DistributedDataParallel module whose forward pass is running, if one is."""
    return nn.parallel.DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]


def _owners_of_fsdp() -> Iterator[nn.Module]:
    """The modules whose parameters `fully_shard` has taken over; torch has no public list of them."""
    states: Any = sys.modules.get("torch.distributed._composable_state")
    for reference in list(states._module_state_mapping.values()) if states is not None else ():
        for group in getattr(reference(), "_fsdp_param_groups", ()):
            for parameter in group.fsdp_params:
                yield parameter._module_info.module
                yield from parameter._module_info.shared_modules
