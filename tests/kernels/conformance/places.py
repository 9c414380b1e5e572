"""The backends and devices of this machine, and the random inputs of each."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moec.runtime.backends import Backend
from moec.runtime.backends.torch import torch_backend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROUTER = (torch.float64, torch.float32)
LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Place:
    """A backend on a device, and its tested dtypes."""

    name: str
    backend: Backend
    device: str
    dtypes: tuple[torch.dtype, ...]


def places() -> list[Place]:
    """All that are present, in this process: Triton is either interpreted or not, from its import on."""
    from moec.runtime.backends.triton.triton_support import complaint

    if INTERPRETED:
        from moec.runtime.backends.triton import triton_backend

        # No bf16, which the interpreter computes wrongly (`triton_launch.dtype_name`).
        return [Place("triton interpreted", triton_backend, "cpu", (*ROUTER, torch.float16))]
    # Plain torch in float64 is the definition itself.
    found = [Place("torch on cpu", torch_backend, "cpu", (torch.float32, *LOW))]
    if torch.cuda.is_available():
        found.append(Place("torch on cuda", torch_backend, "cuda", (*ROUTER, *LOW)))
        if complaint("cuda") is None:
            from moec.runtime.backends.triton import triton_backend

            found.append(Place("triton on cuda", triton_backend, "cuda", (*ROUTER, *LOW)))
    return found


PLACES = places()
NO_CUDA = "" if torch.cuda.is_available() or INTERPRETED else "no CUDA device here"

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    # Inputs are rounded before either side sees them; three roundings lie between them and a result: of the
    # pre-activation, of what is activated, of the result.
    torch.bfloat16: 3 * 2**-8,
    torch.float16: 3 * 2**-11,
}
"""The largest allowed error, relative to the result's largest number or 1."""


@dataclass(slots=True)
class Numbers:
    """Random inputs, drawn alike for all: rounded to `dtype`; `exact` gives the same ones in float64, on CPU."""

    dtype: torch.dtype
    device: str = "cpu"
    exact: bool = False
    draw: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Activations, weights and their gradients."""
        return self._given(torch.randn(shape, generator=self.draw, dtype=torch.float64) * scale, self.dtype)

    def of_router(self, *shape: int) -> Tensor:
        """Gradients and weights of choices, which are float32 at least."""
        return self._given(torch.randn(shape, generator=self.draw, dtype=torch.float64), self.router_dtype)

    def logits(self, tokens: int, experts: int) -> Tensor:
        """[1, tokens, experts], from −9 to 9; no two logits of a token are so close that rounding could swap them."""
        order = torch.rand(1, tokens, experts, generator=self.draw).argsort(-1).double()
        return self._given(order * (18 / experts) - 9 + 9 / experts, self.router_dtype)

    def choices(self, batch: int, tokens: int, experts: int, k: int, skew: float = 0.0) -> Tensor:
        """[batch, tokens, k] different experts a token; with `skew`, some more often than others."""
        liking = torch.randn(experts, generator=self.draw) * skew
        return self.whole((torch.rand(batch, tokens, experts, generator=self.draw) + liking).argsort(-1)[..., :k])

    def whole(self, integers: Tensor) -> Tensor:
        """Integers, unrounded."""
        return integers.contiguous().to(self.device)

    @property
    def router_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def _given(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).double() if self.exact else x.to(dtype).to(self.device)
