"""Refuses autocast, DistributedDataParallel and `fully_shard` around a model."""

from __future__ import annotations

import sys

import torch
from torch import nn

from moec.runtime.errors import JobError


def refuse_autocast(device_type: str) -> None:
    """Raises `JobError` inside of `torch.autocast`, which would change the dtypes of a plan."""
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        raise JobError(
            "MOE0711",
            f"torch.autocast({device_type!r}, {dtype}) is on, which would change the dtypes that the plan computes in",
            "set `dtype = bf16` in the file (parameters stay fp32) and drop autocast, or call the model in "
            f"`with torch.autocast({device_type!r}, enabled=False)`",
        )


def data_parallel_error(wrapper: str) -> JobError:
    """The error for a wrapper that takes every parameter for a replica of the other ranks'."""
    return JobError(
        "MOE0711",
        f"{wrapper} takes parameters for replicas: experts would be overwritten by rank 0's, and gradients summed "
        "twice",
        "drop it: `job.step` and `loss.backward()` sum gradients over ranks, and `dp` in the file is data parallelism; "
        "for a mixture in a plain PyTorch model, use `moec.layer`",
    )


def refuse_data_parallel(module: nn.Module) -> None:
    """Raises `JobError` for a module that `fully_shard` manages, or that DistributedDataParallel runs."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        raise data_parallel_error("fully_shard")
    active = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    if active is not None and any(inner is module for inner in active.modules()):
        raise data_parallel_error("DistributedDataParallel")
