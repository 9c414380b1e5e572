"""Optimizers that keep their states in bf16 between steps (DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.3).

A step widens the states of a chunk of parameters to fp32, updates them and the masters, and rounds them to nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from moec.runtime.weights.masters import chunks, local_part, loss_of


@contextmanager
def widened(states: Sequence[dict[str, Any]], key: str, dtype: torch.dtype | None) -> Iterator[list[Tensor]]:
    """This rank's parts of `key` of several parameters, in fp32. What they are at the end is kept in `dtype`.

    Without `dtype` the states themselves.
    """
    if dtype is None:
        yield [local_part(state[key]) for state in states]
        return
    kept = [local_part(state[key]) for state in states]
    wide = [part.float() for part in kept]
    yield wide
    for part, values in zip(kept, wide, strict=True):
        part.copy_(values)


def narrow(optimizer: Optimizer) -> None:
    """Gives every state the optimizer's `state_dtype`: `load_state_dict` gives it its parameter's."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                state[key] = value.to(optimizer.state_dtype)  # type: ignore[attr-defined]


def update_by_adamw(
    parameters: Iterable[nn.Parameter],
    states: Mapping[Tensor, dict[str, Any]],
    dtype: torch.dtype | None,
    options: Mapping[str, Any],
) -> None:
    """Fused AdamW of the parameters that have gradients, chunk by chunk.

    Moments are kept in `dtype`, by default the parameter's. `options` are the numbers of `torch.optim.adamw.adamw`.
    """
    for chunk in chunks(parameter for parameter in parameters if parameter.grad is not None):
        found = [states[parameter] for parameter in chunk]
        for parameter, state in zip(chunk, found, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = torch.zeros_like(parameter, dtype=dtype)
        with widened(found, "exp_avg", dtype) as first, widened(found, "exp_avg_sq", dtype) as second:
            adamw(
                [local_part(parameter) for parameter in chunk],
                _gradients(chunk),
                first,
                second,
                [],
                [state["step"] for state in found],
                fused=True,
                amsgrad=False,
                **{"maximize": False, **options},
            )


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]


class NarrowAdamW(AdamW):
    """`torch.optim.AdamW`, fused, with moments in bf16 between steps.

    As in torch's, `grad_scale` divides gradients and a `found_inf` of 1 leaves all as it is: `GradScaler` sets both.
    """

    kind = "torch.optim.AdamW with states in bf16"
    state_dtype = torch.bfloat16

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update."""
        loss = loss_of(closure)
        for group in self.param_groups:
            options = {name: group[name] for name in ("lr", "weight_decay", "eps", "maximize")}
            options |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
            options |= {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
            update_by_adamw(group["params"], self.state, torch.bfloat16, options)
        return loss


class NarrowSgd(SGD):
    """`torch.optim.SGD` with momentum, which is bf16 between steps."""

    kind = "torch.optim.SGD with states in bf16"
    state_dtype = torch.bfloat16

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for chunk in chunks(p for p in group["params"] if p.grad is not None):
                self._update(chunk, group)
        return loss

    def _update(self, parameters: Sequence[nn.Parameter], group: Mapping[str, Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:  # zeros before the first gradient give the first momentum: the gradient
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        states = [self.state[parameter] for parameter in parameters]
        names = ("lr", "momentum", "dampening", "nesterov", "weight_decay", "maximize")
        with widened(states, "momentum_buffer", torch.bfloat16) as momentum:
            buffers: list[Tensor | None] = [*momentum]
            sgd(
                [local_part(parameter) for parameter in parameters],
                _gradients(parameters),
                buffers,
                foreach=True,
                **{name: group[name] for name in names},
            )
