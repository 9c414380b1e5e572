"""`load_state_dict` of `moec.layer`: a rank takes its part of a whole tensor and refuses other ranks' parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moec.codegen.plan import PlanParameter
from moec.runtime.errors import JobError
from moec.runtime.host.experts_of_rank import ExpertsOfRank
from moec.runtime.weights.home import home_of
from moec.runtime.weights.rank import RankHome
from moec.runtime.weights.state_dict_signing import HOW_TO_LOAD, KEY, refuse_foreign_state, require_own, sign_state

INNER = "moe."
"""The prefix of a layer's parameters in its block."""

PREFIX = f"layers.0.{INNER}"
"""The prefix of a layer's parameters in its plan."""

EXPERTS = f"{PREFIX}experts."
"""The prefix of the names of a plan's experts."""


def first_of_parts(parameters: Mapping[str, PlanParameter]) -> list[PlanParameter]:
    """The first parameter `[experts, …]` of each part of the experts; `parameters` by their full names.

    Parts with experts of several kinds or sizes are named `experts.0.…`, `experts.1.…`.
    """
    first_parameters: dict[str, PlanParameter] = {}
    for name, parameter in parameters.items():
        if name.startswith(EXPERTS):
            part, _, _ = name.removeprefix(EXPERTS).partition(".")
            first_parameters.setdefault(part if part.isdecimal() else "", parameter)
    return list(first_parameters.values())


def save_experts_as_dtensors(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """Makes this rank's experts DTensors, so that `torch.distributed.checkpoint` saves every rank's; signs them."""
    sign_state(module, state_dict, prefix, local_metadata)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        tensor = state_dict.get(prefix + name)
        if isinstance(tensor, Tensor) and not isinstance(parameter, DTensor):
            state_dict[prefix + name] = module.__dict__["_home"].as_dtensor(PREFIX + name, tensor)


def load_local_parts(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest_of_hook: Any
) -> None:
    """Replaces each whole tensor (of an unsharded layer or an unsigned `state_dict`) by this rank's part.

    Raises `JobError` for the parts of another rank, and for parts in an unsigned `state_dict`. A script's dict may have
    copies of this rank's own parts; no file has `ExpertsOfRank`.
    """
    home, signed = home_of(module), local_metadata.get(KEY)
    module.__dict__["biases"].drop()  # the rows that were counted belong to other biases
    if signed is not None and signed["ranks"] != 1:
        require_own(module, signed, "this state_dict")
    localized = set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        tensor = state_dict.get(prefix + name)
        if isinstance(tensor, DTensor) and not isinstance(parameter, DTensor):
            if signed is None and not _is_local(home, tensor):
                raise JobError("MOE0712", f"{name} has some rank's experts, but that rank is unknown", HOW_TO_LOAD)
            state_dict[prefix + name] = tensor.to_local()
            localized.add(name)
    if not isinstance(home, RankHome) or (signed is not None and signed["ranks"] != 1):
        refuse_foreign_state(module, state_dict, prefix, local_metadata, *rest_of_hook)
        return
    for name, parameter in module.named_parameters(remove_duplicate=False):
        tensor, data = state_dict.get(prefix + name), home.plan.parameters[PREFIX + name]
        if not isinstance(tensor, Tensor) or parameter.shape == data.shape or name in localized:
            continue
        if tensor.shape == parameter.shape:
            message = f"{name} is a plain tensor {list(tensor.shape)}, and the parameter is {list(data.shape)}"
            raise JobError("MOE0712", f"{message}: it could be any rank's part", HOW_TO_LOAD)
        if tensor.shape == data.shape:
            state_dict[prefix + name] = tensor[data.cells(home.plan.meshes[data.mesh], home.rank)]


def _is_local(home: Any, tensor: DTensor) -> bool:
    """Whether `tensor` is this rank's experts, or a script's copy of them."""
    if not isinstance(tensor, ExpertsOfRank) or not hasattr(home, "experts_mesh"):
        return False
    return bool(tensor.device_mesh == home.experts_mesh(tensor.device.type))
