"""Refuses DistributedDataParallel and `fully_shard` if they manage the experts of `moec.layer`, or if no host does.

A layer over several ranks sums the gradients of its experts itself; experts of a layer of one rank are replicas.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moec.runtime.guards.guard import Guard, LayerCalled
from moec.runtime.ranks.checks import Complaint


def _hosts(experts: nn.Module) -> tuple[object, ...]:
    """The state that changes with the layer's hosts: the active DDP module, whether it is in `join()`, whether FSDP is
    around, and the module that last got a composable state (`fully_shard`).

    Weak references: after garbage collection an id can be reused and a count can fall, at different times on different
    ranks. A rank that skips the check would not raise, and the others would hang.
    """
    ddp, states = _active_ddp(), sys.modules.get("torch.distributed._composable_state")
    sharded: Any = states._module_state_mapping.keyrefs() if states is not None else ()
    return (None if ddp is None else weakref.ref(ddp), _joins(ddp), _is_in_fsdp(experts), *sharded[-1:])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def foreign_host(call: LayerCalled) -> Complaint | None:
    """The complaint about the layer's hosts, which are examined if they are not those of its last call."""
    hosts = _hosts(call.experts)
    if call.layer.hosts == hosts:
        return None
    if (complaint := _complaint(call.experts, call.ranks)) is None:
        call.layer.hosts = hosts
    return complaint


def _complaint(experts: nn.Module, ranks: Sequence[int]) -> Complaint | None:
    """The complaint if the host manages experts: it takes them for replicas, but ranks have different experts.

    Also if the host reduces over other ranks than the layer's `ranks`: replicas of experts would drift apart.
    """
    ddp = _active_ddp()
    spans = [("fully_shard", span) for span in _spans_of_fsdp(experts)]
    if ddp is not None:
        spans.append(("DistributedDataParallel", set(dist.get_process_group_ranks(ddp.process_group))))
    if len(ranks) == 1:
        return _unmanaged(experts, ddp, [host for host, span in spans if len(span) > 1])
    for host, span in spans:
        if span != set(ranks):
            return Complaint(
                "MOE0711",
                f"{host} spans the ranks {sorted(span)}, but a layer in it spans {sorted(ranks)}",
                "make the layer without `group`, and set `parallel { ep = … }` in its file",
            )
    if _joins(ddp):
        return Complaint(
            "MOE0711",
            "DistributedDataParallel's `join()` lets a rank end before the others, which would wait for its rows",
            "leave it out, and give every rank as many batches",
        )
    reduced = {} if ddp is None else _reduced_by(ddp)
    if names := [reduced[id(parameter)] for parameter in experts.parameters() if id(parameter) in reduced]:
        return Complaint(
            "MOE0711",
            f"DistributedDataParallel manages this rank's experts ({names[0]}): it has replaced them by copies of rank "
            "0's, or averages their gradients",
            "before it wraps the model, call `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model("
            "model, moec.expert_parameters(model))`; where a parameter has several names, all of them are "
            "`{n for n, p in model.named_parameters(remove_duplicate=False) if any(p is e for e in "
            "moec.expert_parameters(model).values())}`",
        )
    if _is_in_fsdp(experts) and not _spans_of_fsdp(experts):
        return Complaint(
            "MOE0711",
            "FullyShardedDataParallel is around a layer: it mixes the experts of all ranks, or clips without them",
            "take `fully_shard` with `ignored_params = set(moec.expert_parameters(model).values())`",
        )
    if _is_owned_by_fsdp(experts):
        return Complaint(
            "MOE0711",
            "fully_shard has sharded this rank's experts over the other ranks",
            "pass `ignored_params = set(moec.expert_parameters(model).values())` to every call of fully_shard",
        )
    return None


def _unmanaged(experts: nn.Module, ddp: Any, hosts: Sequence[str]) -> Complaint | None:
    """The complaint if none of `hosts`, each of several ranks, manages the experts of a layer of one rank."""
    managed = _reduced_by(ddp) if ddp is not None else {}
    if ddp is not None and not _is_inside(experts, ddp):
        hosts = [host for host in hosts if host == "fully_shard"]  # DDP's forward pass calls another model's layer
    has_unmanaged = any(parameter.requires_grad and id(parameter) not in managed for parameter in experts.parameters())
    if hosts and has_unmanaged and not _is_owned_by_fsdp(experts):
        return Complaint(
            "MOE0711",
            f"{hosts[0]} ignores the experts of a layer of one rank: nobody would sum their gradients",
            "make the layer over the ranks of the host, or let the host manage its experts",
        )
    return None


def _active_ddp() -> Any:
    """The DistributedDataParallel module whose forward pass is running, if one is."""
    return nn.parallel.DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]


def _joins(ddp: Any) -> bool:
    """Whether the module runs in its context manager for uneven inputs."""
    return bool(getattr(getattr(ddp, "_join_config", None), "enable", False))


def _reduced_by(ddp: Any) -> dict[int, str]:
    """A name of every parameter that DDP reduces, by id. It ignores names: a parameter with two names may remain."""
    named = ddp.module.named_parameters(remove_duplicate=False)
    return {id(parameter): name for name, parameter in named if name not in ddp.parameters_to_ignore}


def _is_in_fsdp(experts: nn.Module) -> bool:
    """Whether `FullyShardedDataParallel` or `fully_shard` is around."""
    return bool(getattr(experts, "_is_fsdp_managed_module", False))


def _groups_of_fsdp() -> Iterator[tuple[nn.Module, Any]]:
    """The modules that `fully_shard` was called with, and their groups of parameters; torch has no public list."""
    states: Any = sys.modules.get("torch.distributed._composable_state")
    for module, reference in list(states._module_state_mapping.items()) if states is not None else ():
        for group in getattr(reference(), "_fsdp_param_groups", ()):
            yield module, group


def _is_owned_by_fsdp(experts: nn.Module) -> bool:
    """Whether `fully_shard` has taken over parameters of `experts`."""
    owners = (
        owner
        for _, group in _groups_of_fsdp()
        for parameter in group.fsdp_params
        for owner in (parameter._module_info.module, *parameter._module_info.shared_modules)
    )
    inside = set(experts.modules())
    return any(owner in inside for owner in owners)


def _spans_of_fsdp(experts: nn.Module) -> list[set[int]]:
    """The ranks of each `fully_shard` around `experts`, over all dimensions of its mesh."""
    around = [group for module, group in _groups_of_fsdp() if _is_inside(experts, module)]
    return [set(group.mesh_info.mesh.mesh.flatten().tolist()) for group in around]


def _is_inside(experts: nn.Module, host: nn.Module) -> bool:
    return any(module is experts for module in host.modules())


GUARD = Guard(event=LayerCalled, look=foreign_host, when=lambda call: dist.is_initialized(), code="MOE0711")
