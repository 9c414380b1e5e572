"""The optimizer that `train { optimizer = … }` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moec.codegen.emit import DTYPES
from moec.grammar.spec import Update
from moec.grammar.spec import optimizers as words
from moec.grammar.spec.base import Node
from moec.runtime.action_log import note_action
from moec.runtime.errors import JobError
from moec.runtime.optimizers.adafactor import Adafactor
from moec.runtime.optimizers.elementwise_optimizers import MAKERS as ELEMENTWISE
from moec.runtime.optimizers.elementwise_optimizers import Maker, round_states
from moec.runtime.optimizers.muon import Muon
from moec.runtime.weights.home import home_of
from moec.runtime.weights.masters import Master
from moec.runtime.weights.state_dict_signing import KEY, require_own

OTHER_STATE = (
    "load each rank's own state under the plan that saved it; to change plans use `get_state_dict` and "
    "`set_state_dict` of `torch.distributed.checkpoint.state_dict`"
)

MAKERS: Mapping[type[Node], Maker] = {**ELEMENTWISE, words.Adafactor: Adafactor, words.Muon: Muon}


def make_optimizer(update: Update, masters: Sequence[Master], model: nn.Module | None = None) -> Optimizer:
    """The optimizer that a file states, over these masters. Its state is signed with this rank's parts of `model`."""
    state_dtype = None if update.state == "fp32" else DTYPES[update.state]
    optimizer = MAKERS[type(update.optimizer)](masters, update.optimizer, state_dtype)
    optimizer.register_step_post_hook(_count_change)
    if getattr(optimizer, "state_dtype", None) is not None:
        optimizer.register_load_state_dict_post_hook(round_states)
    if model is not None:
        _sign(optimizer, model)
    return optimizer


def _count_change(optimizer: Optimizer, *_: Any) -> None:
    """Increments the versions of updated parameters: fused optimizers, and foreach ones on DTensors, do not."""
    note_action("update")
    updated = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    increment_version(updated)


def _require_fitting(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Raises `JobError` for tensors of other shapes than their parameters', or unsharded where these are sharded."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    saved = [index for group in state["param_groups"] for index in group["params"]]
    if len(saved) != len(parameters):
        message = f"this optimizer state has {len(saved)} parameters, but the model has {len(parameters)}"
        raise JobError("MOE0712", message, OTHER_STATE)
    for index, parameter in zip(saved, parameters, strict=True):
        for name, value in state["state"].get(index, {}).items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                continue
            # A factor of Adafactor has size 1 in the dims that it sums over.
            fits = all(size in (1, full_size) for size, full_size in zip(value.shape, parameter.shape, strict=False))
            fits = fits and value.dim() == parameter.dim()
            if not fits or isinstance(value, DTensor) != isinstance(parameter, DTensor):
                state_tensor = f"{name} of parameter {index} is a {type(value).__name__} {list(value.shape)}"
                master = f"the parameter is a {type(parameter.data).__name__} {list(parameter.shape)}"
                raise JobError("MOE0712", f"this optimizer state's {state_tensor}, but {master}", OTHER_STATE)


def _sign(optimizer: Optimizer, model: nn.Module) -> None:
    signature = home_of(model).signature()
    # `torch.distributed.checkpoint` saves one value per name: the rank in the name makes it save every signature.
    key = f"{KEY}.rank{signature['rank']}"

    def sign(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, key: signature}

    def require(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        signed = {name: value for name, value in state.items() if name.startswith(KEY)}
        if signed:
            require_own(model, signed.get(key) or next(iter(signed.values())), "this optimizer state")
        _require_fitting(optimizer, state)
        return {name: value for name, value in state.items() if name not in signed}

    optimizer.register_state_dict_post_hook(sign)
    optimizer.register_load_state_dict_pre_hook(require)
