"""The optimizer that `train { optimizer = … }` names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from moec.grammar.spec import AdamW as AdamWSpec


class MasterAdamW(AdamW):
    """AdamW on fp32 copies of parameters that are narrower; the copies are rounded back after every step."""

    def __init__(self, groups: Iterable[dict[str, Any]], **options: Any) -> None:
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        mastered = []
        for group in groups:
            masters = [nn.Parameter(p.detach().float()) for p in group["params"]]
            self._pairs += zip(group["params"], masters, strict=True)
            mastered.append({**group, "params": masters})
        super().__init__(mastered, **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of the masters from the parameters' gradients, copied back."""
        for parameter, master in self._pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()
        loss: float | None = super().step(closure)
        for parameter, master in self._pairs:
            parameter.copy_(master)
            master.grad = None
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the parameters; the masters keep none between steps."""
        for parameter, _ in self._pairs:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()


def make_optimizer(spec: AdamWSpec, decayed: list[nn.Parameter], undecayed: list[nn.Parameter]) -> AdamW:
    """AdamW as `spec` says, with fp32 master weights where parameters are narrower than fp32."""
    groups = [
        {"params": decayed, "weight_decay": spec.weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {"lr": spec.lr, "betas": (spec.beta1, spec.beta2), "eps": spec.eps, "fused": True}
    narrow = any(p.dtype in (torch.bfloat16, torch.float16) for p in (*decayed, *undecayed))
    return MasterAdamW(groups, **options) if narrow else AdamW(groups, **options)
