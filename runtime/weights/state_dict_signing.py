"""Signs a rank's `state_dict` with its parts of the parameters; a rank with other parts refuses it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from moec.runtime.errors import JobError
from moec.runtime.weights.home import home_of

KEY = "moec"
STATES = "states"
HOW_TO_LOAD = (
    "load the state that this rank saved, a checkpoint of `torch.distributed.checkpoint`, or whole tensors, of which "
    "each rank takes its part"
)


def sign_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    """Stores the home's signature and the names of states in the metadata of a `state_dict`: `torch.save` keeps it."""
    states = [name for name, _ in module.named_buffers()]
    local_metadata[KEY] = {**home_of(module).signature(), STATES: states}


def refuse_foreign_state(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    """Raises `JobError` for other parts than this rank's, and for a state in place of a parameter or the reverse;
    replaces whole tensors by this rank's parts."""
    if KEY in local_metadata:
        require_own(module, local_metadata[KEY], "this state_dict")
        _require_same_states(module, {name.removeprefix(prefix) for name in state_dict}, local_metadata[KEY])
    for name, parameter in module.named_parameters(remove_duplicate=False):
        tensor = state_dict.get(prefix + name)
        if isinstance(tensor, Tensor):
            state_dict[prefix + name] = _local_part(name, parameter, tensor, signed=KEY in local_metadata)


def require_own(module: nn.Module, signature: dict[str, Any], subject: str) -> None:
    """Raises `JobError` unless `subject` ("this state_dict"), with this signature, has the same parts as this rank."""
    complaint = home_of(module).complaint_of(signature)
    if complaint:
        raise JobError("MOE0712", f"{subject} does not fit this rank: {complaint}", HOW_TO_LOAD)


def _require_same_states(module: nn.Module, names: set[str], signature: dict[str, Any]) -> None:
    """Raises `JobError` if a tensor of `names` is a state in the `state_dict` and a parameter of the module, or the
    reverse: a bias of `online` has the name and the shape of a learned one, and another meaning."""
    if STATES not in signature:  # of an earlier moec
        return
    saved_states = names.intersection(signature[STATES])
    module_states = names.intersection(name for name, _ in module.named_buffers())
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name in sorted(saved_states ^ module_states):
        if name in module_states or name in parameters:
            kinds = ("a state", "learned") if name in saved_states else ("learned", "a state")
            message = f"{name} is {kinds[0]} in this state_dict, and {kinds[1]} here"
            raise JobError("MOE0712", message, "give the gate the `bias` of the run that saved it")


def _local_part(name: str, parameter: Tensor, tensor: Tensor, *, signed: bool) -> Tensor:
    """This rank's part of `tensor`, on the device and in the dtype of `parameter`.

    Unsigned DTensors are accepted only from this process: a loaded DTensor has another mesh.
    """
    if not isinstance(parameter, DTensor):
        if isinstance(tensor, DTensor):
            raise JobError(
                "MOE0712",
                f"{name} is a DTensor over {tensor.device_mesh.size()} ranks, but here the parameter is whole",
                HOW_TO_LOAD,
            )
        return tensor
    if isinstance(tensor, DTensor):
        if tensor.device_mesh is not parameter.device_mesh and not signed:
            raise JobError(
                "MOE0712",
                f"{name} comes from a file or another job, and its rank is unknown",
                "save and load `state_dict()` itself, not a copy of its items; " + HOW_TO_LOAD,
            )
        return tensor
    if tensor.shape != parameter.shape:
        is_part = tensor.shape == parameter.to_local().shape
        reason = "it could be any rank's part" if is_part else "it fits neither the whole nor a part"
        raise JobError(
            "MOE0712",
            f"{name} is a plain tensor {list(tensor.shape)}, and the parameter is {list(parameter.shape)}: {reason}",
            HOW_TO_LOAD,
        )
    with torch.no_grad():
        value = tensor.detach().to(parameter.device, parameter.dtype)
        local: Tensor = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return local
