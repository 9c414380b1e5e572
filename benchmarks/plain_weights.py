"""moec's parameters, or their gradients, as those of the handwritten model in plain_moe.py."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def plain_state_dict(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors named and shaped as moec's parameters (or their gradients), as `PlainModel.load_state_dict` takes them.

    Heads become rows of one matrix; experts, one tensor there, are modules here, and so are gate and up.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        if ".experts." in name:
            prefix, _, matrix = name.partition(".experts.")
            for expert, part in enumerate(tensor):
                found |= _matrices(f"{prefix}.experts.{expert}.{matrix}", part)
        else:
            found |= _matrices(name, tensor)
    return found


def _matrices(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if name.endswith(("attention.o.bias", "down.bias")):
        return {name: tensor}
    if ".attention." in name and name.endswith((".bias", "_norm.weight")):
        return {name: tensor.flatten()}
    if name.endswith("up.bias"):
        return dict(zip([name.replace("up.bias", "gate.bias"), name][-len(tensor) :], tensor, strict=True))
    if tensor.dim() < 3:
        return {name: tensor}
    if name.endswith("attention.o.weight"):
        return {name: tensor.flatten(1)}
    if ".attention." in name:
        return {name: tensor.flatten(0, 1)}
    gate_and_up = [name.replace("up.weight", "gate.weight"), name][-len(tensor) :]
    return dict(zip(gate_and_up, tensor, strict=True))
