"""The optimizers of torch over an unsharded model, every matrix a parameter of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moec.grammar.spec.optimizers import Adafactor, AdamW, Lion, Muon, Optimizer, Sgd


def torch_optimizers(spec: Optimizer, named: Mapping[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Optimizers that together update every parameter once; no norm and no bias decays."""
    match spec:
        case AdamW():
            return [_adamw(spec, named)]
        case Sgd():
            options = {"lr": spec.lr, "momentum": spec.momentum, "nesterov": spec.nesterov}
            return [torch.optim.SGD(_by_decay(named, spec.weight_decay), **options)]
        case Lion():
            return [PaperLion(_by_decay(named, spec.weight_decay), {"lr": spec.lr, "betas": (spec.beta1, spec.beta2)})]
        case Adafactor():
            options = {"lr": spec.lr, "beta2_decay": -spec.decay, "d": spec.clip, "eps": (None, spec.eps)}
            groups = _by_decay(named, spec.weight_decay)
            return [_OfMatrices(named, lambda slices: torch.optim.Adafactor(slices, **options), groups)]
        case Muon():
            outside = ("embedding", "positions", "head", "moe.gate", "moe.coefficient", "moe.shared_gate")
            hidden = {n: p for n, p in named.items() if decays(n, p) and not any(part in n for part in outside)}
            others = {name: p for name, p in named.items() if name not in hidden}
            options = {"lr": spec.lr, "momentum": spec.momentum, "nesterov": spec.nesterov, "ns_steps": spec.ns_steps}
            options |= {"adjust_lr_fn": {"shape": "original", "rms": "match_rms_adamw"}[spec.scale]}
            groups = _by_decay(hidden, spec.weight_decay)
            return [
                _OfMatrices(hidden, lambda slices: torch.optim.Muon(slices, **options), groups),
                _adamw(spec.adamw, others),
            ]


def decays(name: str, parameter: Tensor) -> bool:
    """Whether the parameter is neither a norm nor a bias."""
    return parameter.dim() > 1 and not name.endswith((".bias", "norm.weight"))


def matrices_of(name: str, tensor: Tensor) -> Tensor:
    """The tensor as `[matrices, rows, columns]`, or biases of experts as `[experts, elements]`."""
    if name.endswith("moe.experts.up.weight"):
        return tensor.flatten(0, 1)
    if "attention" in name and name.endswith(("q.weight", "k.weight", "v.weight")):
        return tensor.flatten(0, 1)[None]
    if name.endswith("attention.o.weight"):
        return tensor.flatten(1, 2)[None]
    if "experts" in name and name.endswith("bias"):
        return tensor.flatten(1)
    return tensor if tensor.dim() == 3 else tensor[None]


class PaperLion(torch.optim.Optimizer):
    """Chen et al. 2023, arXiv 2302.06675, algorithm 2, line by line."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
            for theta in group["params"]:
                g, m = theta.grad, self.state[theta].get("m", torch.zeros_like(theta))
                if g is not None:
                    c = beta1 * m + (1 - beta1) * g
                    theta -= lr * (torch.sign(c) + decay * theta)
                    self.state[theta]["m"] = beta2 * m + (1 - beta2) * g


class _OfMatrices(torch.optim.Optimizer):
    """An optimizer of torch over the matrices of every parameter, which share its memory."""

    def __init__(self, named: Mapping[str, nn.Parameter], make: Any, groups: list[dict[str, Any]]) -> None:
        super().__init__(list(named.values()), {})
        self._slices = {n: [nn.Parameter(part) for part in matrices_of(n, p.detach())] for n, p in named.items()}
        self._named = named
        ids = {id(p): name for name, p in named.items()}
        self._inner = make(
            [
                {**group, "params": [part for p in group["params"] for part in self._slices[ids[id(p)]]]}
                for group in groups
                if group["params"]
            ]
        )

    def step(self) -> None:  # type: ignore[override]
        for name, slices in self._slices.items():
            gradient = self._named[name].grad
            for i, part in enumerate(slices):
                part.grad = None if gradient is None else matrices_of(name, gradient)[i]
        self._inner.step()


def _by_decay(named: Mapping[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    decayed = [p for name, p in named.items() if decays(name, p)]
    others = [p for name, p in named.items() if not decays(name, p)]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def _adamw(spec: AdamW, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    groups = _by_decay(named, spec.weight_decay)
    return torch.optim.AdamW(groups, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, fused=True)
