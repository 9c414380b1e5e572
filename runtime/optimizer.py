"""The optimizer that `train { optimizer = … }` names."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from moec.grammar.spec import AdamW as AdamWSpec
from moec.runtime.home import home_of
from moec.runtime.state import KEY, require_own


def make_optimizer(
    spec: AdamWSpec, decayed: list[nn.Parameter], undecayed: list[nn.Parameter], model: nn.Module | None = None
) -> AdamW:
    """AdamW as `spec` says, over fp32 masters. Its state is that of this rank's parts of `model`, and is signed so."""
    groups = [
        {"params": decayed, "weight_decay": spec.weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, fused=True)
    if model is not None:
        _sign(optimizer, model)
    return optimizer


def _sign(optimizer: Optimizer, model: nn.Module) -> None:
    signature = home_of(model).signature()
    # The rank is part of the name: `torch.distributed.checkpoint` keeps one value of each name, and so keeps them all.
    own = f"{KEY}.rank{signature['rank']}"

    def sign(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, own: signature}

    def require(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        signed = {name: value for name, value in state.items() if name.startswith(KEY)}
        if signed:
            require_own(model, signed.get(own) or next(iter(signed.values())), "this optimizer state")
        return {name: value for name, value in state.items() if name not in signed}

    optimizer.register_state_dict_post_hook(sign)
    optimizer.register_load_state_dict_pre_hook(require)
