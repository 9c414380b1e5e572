"""Parameters by their dotted names: in a model, `attention.q.weight` is `weight` of a module that is never called."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from moec.runtime.errors import JobError

NEVER_CALLED = (
    "a hook of {path} never runs: a layer computes in one graph, which reads this module's parameters and does not "
    "call it; hooks of the model, of `layers[i]` and of parameters do run"
)


class NamePart(nn.Module):
    """A module on a parameter's dotted path. It is never called, so its hooks never run; registering one warns."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        self._warn()
        return super().register_forward_hook(*args, **kwargs)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        self._warn()
        return super().register_forward_pre_hook(*args, **kwargs)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> Any:
        self._warn()
        return super().register_full_backward_hook(*args, **kwargs)

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        self._warn()
        return super().register_full_backward_pre_hook(*args, **kwargs)

    def register_backward_hook(self, *args: Any, **kwargs: Any) -> Any:
        self._warn()
        return super().register_backward_hook(*args, **kwargs)

    def _warn(self) -> None:
        warnings.warn(NEVER_CALLED.format(path=self._path), stacklevel=3)


def split_name(path: str) -> tuple[tuple[str, ...], str]:
    """The modules on a parameter's path, and its last name."""
    *steps, name = path.split(".")
    return tuple(steps), name


def add_parameter(root: nn.Module, path: str, make: Callable[[], nn.Parameter]) -> None:
    """Makes a parameter at a dotted path under `root`, with a `NamePart` for each step, unless there is one."""
    steps, name = split_name(path)
    for i, step in enumerate(steps):
        if step not in root._modules:
            root.add_module(step, NamePart(".".join(steps[: i + 1])))
        root = root.get_submodule(step)
    if name not in root._parameters:
        root.register_parameter(name, make())


def read_parameter(root: nn.Module, steps: Sequence[str], name: str) -> Tensor:
    """The parameter under `root`, as a parametrization or `torch.func.functional_call` has it at the time.

    Raises `JobError` where something stands there that is read but never called: a module of another kind, or a tensor
    that only a hook keeps up to date.
    """
    parameter = registered_parameter(root, steps, name)
    if parameter is not None:
        return parameter
    module = root.get_submodule(".".join(steps))
    if parametrize.is_parametrized(module, name):
        return getattr(module, name)  # type: ignore[no-any-return]
    raise _replaced((*steps, name), f"{name} is no longer a parameter, and a hook that computes it would never run")


def registered_parameter(root: nn.Module, steps: Sequence[str], name: str) -> Tensor | None:
    """The same, None where no parameter is registered under that name. Raises `JobError` for modules of other kinds."""
    module = root
    for step in steps:
        module = module._modules[step]  # type: ignore[assignment]
        if not isinstance(module, NamePart):
            kind = type(module).__name__
            raise _replaced((*steps, name), f"{step} is now of class {kind}, whose forward would never run")
    return module._parameters.get(name)


def _replaced(path: Sequence[str], how: str) -> JobError:
    return JobError(
        "MOE0710",
        f"{'.'.join(path)} was replaced: {how}",
        "put another `nn.Parameter` in its place, or parametrize it (`torch.nn.utils.parametrize`), rather than use "
        "`weight_norm`, `prune` or an adapter's module; a whole layer may be any module",
    )
