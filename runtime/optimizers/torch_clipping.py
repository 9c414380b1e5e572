"""torch's own clipping: of layers of `moec.layer` the norm counts the experts of every rank; of stages it is refused.

`torch.nn.utils.clip_grad_norm_`, `get_total_norm` and `clip_grads_with_norm_`, which accelerate and the `Trainer` of
transformers call too, read the gradients of this rank alone: each rank would scale by a different factor, and replicas
would diverge. The first layer that is made replaces them by functions that count the experts of all ranks, and that
accept DTensors beside experts. For gradients without experts they are unchanged. Of a model with pipeline stages, each
rank has the gradients of some.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from moec.runtime.errors import JobError
from moec.runtime.ranks.norms_over_ranks import by_span, canonical, norms

_staged: WeakSet[nn.Module] = WeakSet()
"""Models of which this rank has only some stages."""

_sharded: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Modules of experts, and the name of the group whose ranks have different experts."""


def count_experts(experts: nn.Module, group: str) -> None:
    """From now on torch's clipping counts the gradients of `experts` over the ranks of the group of this name.

    With an empty name every rank has all experts, and clipping only accepts them beside DTensors, which torch refuses.
    """
    _install()
    _sharded[experts] = group


def refuse_stages(model: nn.Module) -> None:
    """From now on torch's norms of gradients of `model`, of which this rank has only some stages, raise `JobError`."""
    _install()
    _staged.add(model)


def _require_no_stages(gradients: Sequence[Tensor]) -> None:
    gradient_ids = set(map(id, gradients))
    for model in list(_staged):
        if any(id(p.grad) in gradient_ids for p in model.parameters() if p.grad is not None):
            message = "torch's norm of the gradients of a model with pipeline stages, of which this rank has only some"
            raise JobError("MOE0711", message, "`job.clip_grad_norm_(model, max_norm)` counts those of all stages")


@functools.cache
def _install() -> None:
    _replace(clip_grad._get_total_norm, _total_norm)
    _replace(clip_grad._clip_grads_with_norm_, _clip_with_norm)


def _replace(decorated: Any, make: Callable[[Any], Any]) -> None:
    """Replaces the function inside of torch's decorator `_no_grad` (torch 2.13, torch/nn/utils/clip_grad.py).

    A new function under the old name would not be found by scripts that have imported the old one.
    """
    cell = decorated.__closure__[decorated.__code__.co_freevars.index("func")]
    cell.cell_contents = torch.compiler.disable(make(cell.cell_contents))  # type: ignore[no-untyped-call]


def _total_norm(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(inner)
    def get_total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        _require_no_stages(gradients)
        groups = _groups_of(gradients)
        if groups:
            gradients = norms(by_span(gradients, groups), lambda part: inner(part, norm_type, False, foreach))
        return inner(gradients, norm_type, error_if_nonfinite, foreach)

    return get_total_norm


def _clip_with_norm(inner: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(inner)
    def clip_grads_with_norm_(
        parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor, foreach: bool | None = None
    ) -> None:
        parameter_list = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        with_gradient = [parameter for parameter in parameter_list if parameter.grad is not None]
        if not _groups_of([parameter.grad for parameter in with_gradient if parameter.grad is not None]):
            inner(parameter_list, max_norm, total_norm, foreach)
            return
        by_mesh: dict[object, list[Tensor]] = {}
        for parameter in with_gradient:  # an operator takes DTensors of one mesh, or none
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
        for group in by_mesh.values():
            inner(group, max_norm, total_norm, foreach)

    return clip_grads_with_norm_


def _groups_of(gradients: Sequence[Tensor]) -> dict[int, str]:
    """The name of the group whose ranks have different experts, by the id of each gradient of experts."""
    gradient_ids = set(map(id, gradients))
    all_groups = {
        id(parameter.grad): group
        for experts, group in list(_sharded.items())
        for parameter in experts.parameters()
        if parameter.is_leaf and parameter.grad is not None
    }
    all_groups = {gradient: group for gradient, group in all_groups.items() if gradient in gradient_ids}
    if not any(all_groups.values()) and not any(isinstance(gradient, DTensor) for gradient in gradients):
        return {}
    names = canonical(all_groups.values())
    return {gradient: names[group] for gradient, group in all_groups.items()}
