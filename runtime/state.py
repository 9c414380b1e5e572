"""`state_dict` of a rank: it holds that rank's parts, and no other rank may take them for its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from moec.runtime.errors import JobError
from moec.runtime.home import home_of

KEY = "moec"
ELSEWHERE = (
    "load each rank's own, or a checkpoint that knows shards (`torch.distributed.checkpoint`), or whole tensors, "
    "of which each rank takes its part"
)


def sign_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    """Notes beside a `state_dict` whose parts it holds; `torch.save` keeps that."""
    local_metadata[KEY] = home_of(module).signature()


def refuse_foreign_state(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    """Raises `JobError` for another rank's parts; of whole tensors this rank takes its own."""
    if KEY in local_metadata:
        require_own(module, local_metadata[KEY], "this state_dict")
    for name, parameter in module.named_parameters(remove_duplicate=False):
        given = state_dict.get(prefix + name)
        if isinstance(given, Tensor):
            state_dict[prefix + name] = _own_part(name, parameter, given)


def require_own(module: nn.Module, signature: dict[str, Any], what: str) -> None:
    """Raises `JobError` unless what was signed so holds the same parts as this rank."""
    complaint = home_of(module).complaint_of(signature)
    if complaint:
        raise JobError("MOE0712", f"{what} is another rank's: {complaint}", ELSEWHERE)


def _own_part(name: str, parameter: Tensor, given: Tensor) -> Tensor:
    """What of a given tensor goes into a parameter of this rank."""
    if not isinstance(parameter, DTensor):
        if isinstance(given, DTensor):
            raise JobError(
                "MOE0712", f"{name} is a DTensor over {given.device_mesh.size()} ranks, and here it is whole", ELSEWHERE
            )
        return given
    if isinstance(given, DTensor):
        return given
    if given.shape != parameter.shape:
        local = parameter.to_local().shape
        part = "this could be any rank's part" if given.shape == local else "that is neither"
        raise JobError(
            "MOE0712",
            f"{name} is a plain tensor {list(given.shape)}, of {list(parameter.shape)} in all: {part}",
            ELSEWHERE,
        )
    with torch.no_grad():
        whole = given.detach().to(parameter.device, parameter.dtype)
        own: Tensor = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return own
