"""`load_state_dict` of `moec.layer`: of whole tensors a rank takes its own part, and of parts only its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from moec.passes.ir import Layout
from moec.runtime.errors import JobError
from moec.runtime.home import home_of
from moec.runtime.rank import RankHome
from moec.runtime.shards import local_slices
from moec.runtime.state import HOW_TO_LOAD, KEY, refuse_foreign_state

PREFIX = "layers.0.moe."
"""What the names of a layer's parameters begin with in its plan."""


def load_own_parts(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *others: Any
) -> None:
    """Replaces each whole tensor (an unsharded layer's, or of an unsigned `state_dict`) by this rank's part.

    Raises `JobError` for the parts of another rank, and for parts in an unsigned `state_dict`.
    """
    home, signed = home_of(module), local_metadata.get(KEY)
    if not isinstance(home, RankHome) or (signed is not None and signed["ranks"] != 1):
        refuse_foreign_state(module, state_dict, prefix, local_metadata, *others)
        return
    for name, parameter in module.named_parameters(remove_duplicate=False):
        given, data = state_dict.get(prefix + name), home.plan.parameters[PREFIX + name]
        if not isinstance(given, Tensor) or parameter.shape == data.shape:
            continue
        if given.shape == parameter.shape:
            message = f"{name} is a plain tensor {list(given.shape)}, of {list(data.shape)} in all"
            raise JobError("MOE0712", f"{message}: this could be any rank's part", HOW_TO_LOAD)
        if given.shape == data.shape:
            mesh = home.plan.meshes[data.mesh]
            state_dict[prefix + name] = given[local_slices(data.shape, Layout.parse(data.layout), mesh, home.rank)]
