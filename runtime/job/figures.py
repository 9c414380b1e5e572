"""Figures of training steps for `job.metrics` and `job.progress`: a script's numbers, and a plan's FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsFloat

from torch import Tensor
from torch.distributed.tensor import DTensor

from moec.codegen.plan import Plan
from moec.passes.cost.model_flops import ModelFlops
from moec.runtime.errors import wrong_argument


def require_figures(figures: Mapping[str, object]) -> None:
    """Raises `CallError` for the first figure that is not one number. Reads no tensor's values.

    A DTensor is refused: the first rank alone would read it, and wait for the other ranks.
    """
    for name, value in figures.items():
        if isinstance(value, DTensor):
            help = f"call it on every rank: `{name}={name}.full_tensor()`"
            raise wrong_argument(f"the figure {name} is a DTensor, and must be one number", help)
        if isinstance(value, Tensor):
            is_number, description = value.numel() == 1 and not value.is_complex(), f"{value.dtype} {list(value.shape)}"
        else:
            is_number, description = isinstance(value, SupportsFloat), repr(value)
        if not is_number:
            message = f"the figure {name} is {description}, and must be one number"
            raise wrong_argument(message, f"give a number or a tensor of one element, or leave `{name}` out")


def number(value: Tensor | float) -> float:
    """The value as a float. Waits for the device of a tensor."""
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def model_flops(plan: Plan) -> ModelFlops:
    """FLOPs of the model for batches of any lengths, forward and backward without recomputation."""
    return ModelFlops.of_program(plan.program, plan.spec)


def peak_flops(plan: Plan) -> float | None:
    """FLOP/s of all ranks in the model's dtype; None where the cluster's device states none."""
    peaks: Mapping[str, Any] = vars(plan.spec.cluster.device.peak)
    peak = peaks.get(plan.spec.subject.dtype)
    return None if peak is None else float(peak) * plan.world_size
