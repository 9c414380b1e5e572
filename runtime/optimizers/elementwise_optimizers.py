"""Element-wise optimizers, a chunk of parameters at a time.

States may be kept in bf16 between steps (DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.3): a step widens those of a
chunk to fp32, updates them and the masters, and rounds them to nearest.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from moec.grammar.spec.base import Node
from moec.grammar.spec.optimizers import AdamW as AdamWSpec
from moec.grammar.spec.optimizers import Lion as LionSpec
from moec.grammar.spec.optimizers import Sgd as SgdSpec
from moec.runtime.errors import JobError
from moec.runtime.optimizers.closures import loss_of
from moec.runtime.weights.masters import Master, by_decay, chunks, local_part


@contextmanager
def widened(states: Sequence[dict[str, Any]], key: str, dtype: torch.dtype | None) -> Iterator[list[Tensor]]:
    """This rank's parts of the state `key` of several parameters, in fp32; at the end they are rounded to `dtype`.

    Without a `dtype`, yields the states themselves.
    """
    if dtype is None:
        yield [local_part(state[key]) for state in states]
        return
    parts = [local_part(state[key]) for state in states]
    wide_parts = [part.float() for part in parts]
    yield wide_parts
    for part, wide_part in zip(parts, wide_parts, strict=True):
        part.copy_(wide_part)


def round_states(optimizer: Optimizer) -> None:
    """Casts every state to the optimizer's `state_dtype`, after `load_state_dict` has cast it to its parameter's."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                state[key] = value.to(optimizer.state_dtype)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Chunk:
    """This rank's parts of some parameters, of their gradients, and of their states by name.

    `state_dicts`: the optimizer's state of each parameter.
    """

    parts: list[Tensor]
    gradients: list[Tensor]
    states: list[list[Tensor]]
    state_dicts: list[dict[str, Any]]


def widened_chunks(
    parameters: Iterable[nn.Parameter],
    states: Mapping[Tensor, dict[str, Any]],
    names: Sequence[str],
    dtype: torch.dtype | None,
) -> Iterator[Chunk]:
    """The parameters with gradients, in chunks. Their states `names` are stored in `dtype`, or else the parameter's.

    States begin as zeros. The caller updates parts and states of a chunk before it takes the next.
    """
    for chunk in chunks(parameter for parameter in parameters if parameter.grad is not None):
        state_dicts = [states[parameter] for parameter in chunk]
        for parameter, state in zip(chunk, state_dicts, strict=True):
            for name in names:
                if name not in state:
                    state[name] = torch.zeros_like(parameter, dtype=dtype)
        gradients = [local_part(parameter.grad) for parameter in chunk if parameter.grad is not None]
        with ExitStack() as stack:
            widened_states = [stack.enter_context(widened(state_dicts, name, dtype)) for name in names]
            yield Chunk([local_part(parameter) for parameter in chunk], gradients, widened_states, state_dicts)


MOMENTS = ("exp_avg", "exp_avg_sq")


def update_by_adamw(chunk: Chunk, options: Mapping[str, Any]) -> None:
    """Fused AdamW with the states `MOMENTS`. `options` are the numbers of `torch.optim.adamw.adamw`."""
    for part, state in zip(chunk.parts, chunk.state_dicts, strict=True):
        # One that was saved without `fused` is on the CPU.
        state["step"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32, device=part.device)
    steps = [state["step"] for state in chunk.state_dicts]
    first, second = chunk.states
    options = {"maximize": False, **options}
    adamw(chunk.parts, chunk.gradients, first, second, [], steps, fused=True, amsgrad=False, **options)


class Elementwise(Optimizer):
    """Updates chunks by `update`. Its states `names` have `state_dtype` between steps, by default the parameter's."""

    names: ClassVar[tuple[str, ...]]
    state_dtype: ClassVar[torch.dtype | None] = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for chunk in widened_chunks(group["params"], self.state, self.names, self.state_dtype):
                self.update(chunk, group)
        return loss

    @abstractmethod
    def update(self, chunk: Chunk, group: Mapping[str, Any]) -> None:
        """Changes parts and states of a chunk with the options of `group`."""


class LocalAdamW(Elementwise, AdamW):
    """`torch.optim.AdamW`, fused, of this rank's parts: on DTensors, torch finds the layouts of all states first.

    As in torch's, `grad_scale` divides gradients, and a `found_inf` of 1 skips the update: `GradScaler` sets both.
    """

    kind = "torch.optim.AdamW"
    names = MOMENTS

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. Raises `JobError` for `amsgrad`, which a group may have been given since."""
        if any(group["amsgrad"] for group in self.param_groups):
            help = "give `torch.optim.AdamW(model.parameters(), amsgrad=True)` in the place of `job.optimizer`"
            raise JobError("MOE0715", "a group of the file's AdamW was given `amsgrad`, which it does not have", help)
        return super().step(closure)

    def update(self, chunk: Chunk, group: Mapping[str, Any]) -> None:
        """By torch's fused kernel."""
        options = {name: group[name] for name in ("lr", "weight_decay", "eps", "maximize")}
        options |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
        options |= {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        update_by_adamw(chunk, options)


class NarrowAdamW(LocalAdamW):
    """`LocalAdamW` with moments in bf16 between steps."""

    kind = "torch.optim.AdamW with states in bf16"
    state_dtype = torch.bfloat16


class NarrowSgd(Elementwise, SGD):
    """`torch.optim.SGD` with momentum, which is bf16 between steps."""

    kind = "torch.optim.SGD with states in bf16"
    names = ("momentum_buffer",)  # zeros before the first gradient give the first momentum: the gradient
    state_dtype = torch.bfloat16

    def update(self, chunk: Chunk, group: Mapping[str, Any]) -> None:
        """By torch's foreach functions."""
        options = ("lr", "momentum", "dampening", "nesterov", "weight_decay", "maximize")
        momentum: list[Tensor | None] = [*chunk.states[0]]
        sgd(chunk.parts, chunk.gradients, momentum, foreach=True, **{name: group[name] for name in options})


class Lion(Elementwise):
    """Chen et al. 2023, algorithm 2, by torch's foreach functions."""

    kind = "lion"
    names = ("exp_avg",)

    def update(self, chunk: Chunk, group: Mapping[str, Any]) -> None:
        """Moves every element by `lr` against the sign of its blended momentum."""
        (momentum,), (beta1, beta2) = chunk.states, group["betas"]
        directions = torch._foreach_lerp(momentum, chunk.gradients, 1 - beta1)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(chunk.parts, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(chunk.parts, directions, alpha=-group["lr"])
        torch._foreach_lerp_(momentum, chunk.gradients, 1 - beta2)


class NarrowLion(Lion):
    """`Lion` with a momentum in bf16 between steps."""

    state_dtype = torch.bfloat16


def _adamw(masters: Sequence[Master], spec: AdamWSpec, state_dtype: torch.dtype | None) -> Optimizer:
    kind = NarrowAdamW if state_dtype else LocalAdamW
    groups = by_decay(masters, spec.weight_decay)
    return kind(groups, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, fused=True)


def _sgd(masters: Sequence[Master], spec: SgdSpec, state_dtype: torch.dtype | None) -> Optimizer:
    kind = NarrowSgd if state_dtype and spec.momentum else SGD
    groups = by_decay(masters, spec.weight_decay)
    return kind(groups, lr=spec.lr, momentum=spec.momentum, nesterov=spec.nesterov, foreach=True)


def _lion(masters: Sequence[Master], spec: LionSpec, state_dtype: torch.dtype | None) -> Optimizer:
    options = {"lr": spec.lr, "betas": (spec.beta1, spec.beta2)}
    return (NarrowLion if state_dtype else Lion)(by_decay(masters, spec.weight_decay), options)


Maker = Callable[[Sequence[Master], Any, torch.dtype | None], Optimizer]
"""Makes an optimizer of masters, the file's options, and the dtype of states if it is not the masters'."""

MAKERS: Mapping[type[Node], Maker] = {AdamWSpec: _adamw, SgdSpec: _sgd, LionSpec: _lion}
