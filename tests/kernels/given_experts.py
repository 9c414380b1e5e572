"""A layer's experts through its operators, forward and backward, beside plain torch in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moec.runtime import ops
from moec.runtime.backends import plain_torch

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 6 * 3 * 2**-11}
"""The largest error, relative to a tensor's largest number or 1: as in `conformance/`."""


@dataclass(frozen=True, slots=True)
class Given:
    """The inputs of experts by name, the gradient of their output, and what is no tensor.

    `counts` [sources, E] for rows, `choices` [B, S, k] for tokens. `ways`: the text of how products are computed.
    """

    tensors: dict[str, Tensor]
    grad: Tensor
    counts: Tensor | None = None
    choices: Tensor | None = None
    activation: str = "swiglu"
    ways: str | None = None

    def run(self) -> dict[str, Tensor]:
        """The output, and the gradients by the names of the inputs."""
        return next(self.runs(1))

    def runs(self, times: int) -> Iterator[dict[str, Tensor]]:
        """Forward once, then backward as often as asked."""
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in self.tensors.items()}
        beside = (*(leaves.get(name) for name in ("up", "down", "up_bias", "down_bias")),)
        how: tuple[Any, ...] = (self.activation, None, None, self.ways)
        if self.choices is None:
            out = ops.expert_mlp(leaves["rows"], self.counts, *beside, leaves.get("weights"), *how)[0]
        else:
            out = ops.mixture_mlp(leaves["x"], self.choices, leaves["weights"], *beside, *how)[0]
        for _ in range(times):
            gradients = torch.autograd.grad(out, list(leaves.values()), self.grad, retain_graph=True)
            yield {"out": out.detach().clone(), **dict(zip(leaves, gradients, strict=True))}

    def exact(self) -> dict[str, Tensor]:
        """The same by plain torch in float64."""
        doubles = {name: tensor.double() for name, tensor in self.tensors.items()}
        with plain_torch():
            return replace(self, tensors=doubles, grad=self.grad.double(), ways=None).run()

    def require_right(self, found: dict[str, Tensor] | None = None) -> None:
        """Every result is within the tolerance; none is NaN."""
        found, dtype = self.run() if found is None else found, self.grad.dtype
        for name, exact in self.exact().items():
            if exact.numel():
                error = float((found[name].double() - exact).abs().max()) / max(1.0, float(exact.abs().max()))
                assert error <= TOLERANCE[dtype], f"{name} is {error:.1e} off"


class Drawn:
    """Random tensors of unit variance, of one dtype; weights of rows and choices are float32 at least."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.dtype, self.draw = dtype, torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.draw, dtype=torch.float64) * scale).to(self.dtype)

    def weights(self, *shape: int) -> Tensor:
        return self.normal(*shape).to(torch.promote_types(self.dtype, torch.float32))

    def experts(self, experts: int, dim: int, hidden: int, bias: bool) -> dict[str, Tensor]:
        """Of a gated activation."""
        of = {
            "up": self.normal(experts, 2, hidden, dim, scale=dim**-0.5),
            "down": self.normal(experts, dim, hidden, scale=hidden**-0.5),
        }
        if bias:
            of |= {"up_bias": self.normal(experts, 2, hidden), "down_bias": self.normal(experts, dim)}
        return of


def of_rows(
    counts: Sequence[Sequence[int]],
    dim: int = 40,
    hidden: int = 24,
    *,
    bias: bool = False,
    weighted: bool = False,
    dtype: torch.dtype = torch.float32,
    ways: str | None = None,
) -> Given:
    """Experts over rows, as an exchange delivers them: counts [sources, E]."""
    drawn, of_experts = Drawn(dtype), torch.tensor(counts)
    num_rows = int(of_experts.sum())
    tensors = {"rows": drawn.normal(num_rows, dim), **drawn.experts(of_experts.shape[1], dim, hidden, bias)}
    if weighted:
        tensors["weights"] = drawn.weights(num_rows)
    return Given(tensors, drawn.normal(num_rows, dim), counts=of_experts, ways=ways)


def of_tokens(
    choices: Tensor,
    experts: int,
    dim: int = 40,
    hidden: int = 24,
    *,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    ways: str | None = None,
) -> Given:
    """A mixture over tokens that stay: choices [B, S, k], −1 for none."""
    drawn = Drawn(dtype)
    tensors = {
        "x": drawn.normal(*choices.shape[:2], dim),
        "weights": drawn.weights(*choices.shape),
        **drawn.experts(experts, dim, hidden, bias),
    }
    return Given(tensors, drawn.normal(*choices.shape[:2], dim), choices=choices, ways=ways)


def choices_with(counts: Sequence[int], k: int) -> Tensor:
    """[1, S, k] choices in random order, `counts` of each expert: S · k in all. A token may choose an expert twice."""
    of_experts = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    order = torch.randperm(len(of_experts), generator=torch.Generator().manual_seed(0))
    return of_experts[order].view(1, -1, k)


@contextmanager
def memory_full_of_nan() -> Iterator[None]:
    """Fresh memory of floating dtypes holds NaN, as a device's may: what nobody writes is seen in every result."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
            patch.setattr(owner, name, _filled(getattr(owner, name)))
        yield


def _filled(make: Any) -> Any:
    def made(*arguments: Any, **options: Any) -> Tensor:
        tensor: Tensor = make(*arguments, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    return made
