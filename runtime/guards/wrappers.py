"""Refuses autocast, anomaly detection, DistributedDataParallel and `fully_shard` around a model."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from moec.runtime.guards.guard import Guard, PassBegins, WrapperAsks
from moec.runtime.ranks.checks import Complaint


def autocast(call: PassBegins) -> Complaint:
    """The complaint about `torch.autocast`, which would change the dtypes of a plan."""
    device_type = call.device_type
    dtype = torch.get_autocast_dtype(device_type)
    return Complaint(
        "MOE0711",
        f"torch.autocast({device_type!r}, {dtype}) is on, which would change the dtypes that the plan computes in",
        "set `dtype = bf16` in the file (parameters stay fp32) and drop autocast, or call the model in "
        f"`with torch.autocast({device_type!r}, enabled=False)`",
    )


def anomaly(_: PassBegins) -> Complaint:
    """The complaint about torch's search for NaN in backward: it reads sums over ranks before they have ended."""
    return Complaint(
        "MOE0711",
        "torch.autograd.set_detect_anomaly(True) reads gradients of several ranks before their sums have ended",
        "with `check_nan=False` it works; moec itself refuses a step whose loss or gradients are not finite",
    )


def replicas(asks: WrapperAsks) -> Complaint:
    """The complaint about a wrapper that takes every parameter for a replica of the other ranks'."""
    return Complaint(
        "MOE0711",
        f"{asks.wrapper} takes parameters for replicas: experts would be overwritten by rank 0's, and gradients summed "
        "twice",
        "drop it: `job.step` and `loss.backward()` sum gradients over ranks, and `dp` in the file is data parallelism; "
        "for a mixture in a plain PyTorch model, use `moec.layer`",
    )


def wrapped(call: PassBegins) -> Complaint | None:
    """The complaint about a module that `fully_shard` manages, or that DistributedDataParallel runs."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(call.module, fsdp.FSDPModule):
        return replicas(WrapperAsks("fully_shard"))
    active = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    if active is not None and any(inner is call.module for inner in active.modules()):
        return replicas(WrapperAsks("DistributedDataParallel"))
    return None


AUTOCAST = Guard(
    event=PassBegins, look=autocast, when=lambda call: torch.is_autocast_enabled(call.device_type), code="MOE0711"
)
ANOMALY = Guard(
    event=PassBegins,
    look=anomaly,
    when=lambda call: (
        torch.is_anomaly_enabled()
        and torch.is_anomaly_check_nan_enabled()
        and any(isinstance(parameter, DTensor) for parameter in call.module.parameters())
    ),
    code="MOE0711",
)
WRAPPED = Guard(event=PassBegins, look=wrapped, code="MOE0711")
ASKING = Guard(event=WrapperAsks, look=replicas, code="MOE0711")
