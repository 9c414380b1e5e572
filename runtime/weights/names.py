"""Parameters by dotted name: `attention.q.weight` is the parameter `weight` of a module that is never called."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from moec.runtime.errors import JobError
from moec.runtime.script import warn

NEVER_CALLED = (
    "a hook of {path} never runs: a layer computes in one graph, which reads this module's parameters and does not "
    "call it; hooks of the model, of `layers[i]` and of parameters do run"
)


def _warning(register: Callable[..., Any]) -> Any:
    """`register`, a method that registers a hook, with the warning that the hook never runs."""

    @functools.wraps(register)
    def register_with_warning(part: NamePart, *args: Any, **kwargs: Any) -> Any:
        warn(NEVER_CALLED.format(path=part._path))
        return register(part, *args, **kwargs)

    return register_with_warning


class NamePart(nn.Module):
    """A module on a parameter's dotted path. It is never called, so its hooks never run; registering one warns."""

    register_forward_hook = _warning(nn.Module.register_forward_hook)
    register_forward_pre_hook = _warning(nn.Module.register_forward_pre_hook)
    register_full_backward_hook = _warning(nn.Module.register_full_backward_hook)
    register_full_backward_pre_hook = _warning(nn.Module.register_full_backward_pre_hook)
    register_backward_hook = _warning(nn.Module.register_backward_hook)

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def extra_repr(self) -> str:
        tensors = [*self._parameters.items(), *self._buffers.items()]
        return "\n".join(f"{name}: {_shapes(tensor)}" for name, tensor in tensors if tensor is not None)

    def _get_name(self) -> str:
        return "Parameters"


def _shapes(tensor: Tensor) -> str:
    """`[8, 128, 64] float32`, `[8, 128, 64] float32, here [4, 128, 64]`; communicates nothing, reads no value."""
    text = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            part = tensor.to_local()
        text += f", here {list(part.shape)}" * (part.shape != tensor.shape)
    return text + ", frozen" * (isinstance(tensor, nn.Parameter) and not tensor.requires_grad)


def split_name(path: str) -> tuple[tuple[str, ...], str]:
    """The modules on a parameter's path, and its name in the last module."""
    *steps, name = path.split(".")
    return tuple(steps), name


def add_parameter(root: nn.Module, path: str, make: Callable[[], nn.Parameter]) -> None:
    """Makes a parameter at a dotted path under `root`, with a `NamePart` for each missing module of the path."""
    steps, name = split_name(path)
    module = _made_module(root, steps)
    if name not in module._parameters:
        module.register_parameter(name, make())


def _made_module(root: nn.Module, steps: Sequence[str]) -> nn.Module:
    """The module at this path, with a `NamePart` for each step that is not there yet."""
    for i, step in enumerate(steps):
        if step not in root._modules:
            root.add_module(step, NamePart(".".join(steps[: i + 1])))
        root = root.get_submodule(step)
    return root


def add_buffer(root: nn.Module, path: str, buffer: Tensor) -> None:
    """Registers a buffer at a dotted path under `root`, as `add_parameter` does a parameter. `state_dict` has it."""
    steps, name = split_name(path)
    _made_module(root, steps).register_buffer(name, buffer)


def read_buffer(root: nn.Module, steps: Sequence[str], name: str) -> Tensor:
    """The buffer under `root`. Raises `JobError` where it is gone, or a module of another kind is on its path."""
    module = root
    for step in steps:
        module = module._modules.get(step)  # type: ignore[assignment]
    buffer = module._buffers.get(name) if isinstance(module, NamePart) else None
    if buffer is None:
        raise _replaced((*steps, name), f"{name} is no longer a buffer")
    return buffer


def read_parameter(root: nn.Module, steps: Sequence[str], name: str) -> Tensor:
    """The current value of a parameter under `root`, with parametrizations and `torch.func.functional_call` applied.

    Raises `JobError` for replacements that would never run: a module on the path, or a tensor that a hook computes.
    """
    parameter = registered_parameter(root, steps, name)
    if parameter is not None:
        return parameter
    module = root.get_submodule(".".join(steps))
    if parametrize.is_parametrized(module, name):
        return getattr(module, name)  # type: ignore[no-any-return]
    raise _replaced((*steps, name), f"{name} is no longer a parameter, and a hook that computes it would never run")


def requires_grad(root: nn.Module, steps: Sequence[str], name: str) -> bool:
    """Whether a parameter requires a gradient, or one of those from which a parametrization computes it.

    Computes no parametrization, which may draw random numbers. Raises `JobError` as `read_parameter` does.
    """
    module = root.get_submodule(".".join(steps))
    if registered_parameter(root, steps, name) is None and parametrize.is_parametrized(module, name):
        return any(original.requires_grad for original in module.parametrizations[name].parameters())  # type: ignore[index,union-attr]
    return read_parameter(root, steps, name).requires_grad


def registered_parameter(root: nn.Module, steps: Sequence[str], name: str) -> Tensor | None:
    """The registered parameter, or None. Raises `JobError` if a module on the path was replaced."""
    module = root
    for step in steps:
        module = module._modules[step]  # type: ignore[assignment]
        if not isinstance(module, NamePart):
            kind = type(module).__name__
            raise _replaced((*steps, name), f"{step} is now of class {kind}, whose forward would never run")
    return module._parameters.get(name)


def _replaced(path: Sequence[str], reason: str) -> JobError:
    return JobError(
        "MOE0710",
        f"{'.'.join(path)} was replaced: {reason}",
        "put another `nn.Parameter` in its place, or parametrize it (`torch.nn.utils.parametrize`), rather than use "
        "`weight_norm`, `prune` or an adapter's module; a whole layer may be any module",
    )
