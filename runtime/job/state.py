"""Signs a rank's `state_dict` with the parts of the parameters that it has; a rank with other parts refuses it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from moec.runtime.errors import JobError
from moec.runtime.job.home import home_of

KEY = "moec"
HOW_TO_LOAD = (
    "load each rank's own, or a checkpoint that knows shards (`torch.distributed.checkpoint`), or whole tensors, "
    "of which each rank takes its part"
)


def sign_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    """Stores in the metadata of a `state_dict` which rank's parts it holds; `torch.save` keeps the metadata."""
    local_metadata[KEY] = home_of(module).signature()


def refuse_foreign_state(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    """Raises `JobError` for another rank's parts; replaces whole tensors by this rank's parts."""
    if KEY in local_metadata:
        require_own(module, local_metadata[KEY], "this state_dict")
    for name, parameter in module.named_parameters(remove_duplicate=False):
        given = state_dict.get(prefix + name)
        if isinstance(given, Tensor):
            state_dict[prefix + name] = _own_part(name, parameter, given, signed=KEY in local_metadata)


def require_own(module: nn.Module, signature: dict[str, Any], what: str) -> None:
    """Raises `JobError` unless `what`, which has this signature, holds the same parts as this rank."""
    complaint = home_of(module).complaint_of(signature)
    if complaint:
        raise JobError("MOE0712", f"{what} is another rank's: {complaint}", HOW_TO_LOAD)


def _own_part(name: str, parameter: Tensor, given: Tensor, *, signed: bool) -> Tensor:
    """This rank's part of a given tensor, as `parameter` is.

    Unsigned DTensors are accepted only from this process: a loaded DTensor has another mesh.
    """
    if not isinstance(parameter, DTensor):
        if isinstance(given, DTensor):
            raise JobError(
                "MOE0712",
                f"{name} is a DTensor over {given.device_mesh.size()} ranks, and here it is whole",
                HOW_TO_LOAD,
            )
        return given
    if isinstance(given, DTensor):
        if given.device_mesh is not parameter.device_mesh and not signed:
            raise JobError(
                "MOE0712",
                f"{name} comes from a file or another job, and nothing says whose part it is",
                "save and load `state_dict()` itself, not a copy of its items; " + HOW_TO_LOAD,
            )
        return given
    if given.shape != parameter.shape:
        local = parameter.to_local().shape
        part = "this could be any rank's part" if given.shape == local else "that is neither"
        raise JobError(
            "MOE0712",
            f"{name} is a plain tensor {list(given.shape)}, of {list(parameter.shape)} in all: {part}",
            HOW_TO_LOAD,
        )
    with torch.no_grad():
        whole = given.detach().to(parameter.device, parameter.dtype)
        own: Tensor = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return own
