"""Generation by full recomputation: a model's logits of whole sequences, one more token at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moec.runtime.model.module import PlanModule
from moec.runtime.weights.masters import local_part


def lively(model: PlanModule, seed: int = 5) -> PlanModule:
    """The model with parameters so large that every token depends on the tokens before it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            of_norms = parameter.dim() == 1 and "norm" in name
            parameter.copy_(1 + 0.1 * drawn if of_norms else drawn * (0.5 if parameter.dim() < 2 else 1 / 3))
    return model


def livelier(model: PlanModule, factor: float = 14.0) -> PlanModule:
    """The model with larger weights, the same on one rank as on several."""
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            local_part(parameter).mul_(factor)
    return model


def recomputed(model: PlanModule, prompts: Sequence[Tensor], new: int) -> Tensor:
    """The `new` best tokens after each prompt [length], one sequence at a time: int64 [batch, new]."""
    training, found = model.training, []
    model.eval()
    with torch.no_grad():
        for prompt in prompts:
            whole = prompt
            for _ in range(new):
                logits = model(whole[None]).logits[0, -1]
                best = logits.topk(2).values
                assert best[0] - best[1] > 1e-4, "a near tie: choose another seed"
                whole = torch.cat([whole, logits.argmax()[None]])
            found.append(whole[len(prompt) :])
    model.train(training)
    return torch.stack(found)


def uneven(vocab: int, lengths: Sequence[int], *, seed: int = 0, without: int | None = None) -> list[Tensor]:
    """Prompts of these lengths; none has the id `without`."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(vocab, (length,), generator=generator) for length in lengths]
    return drawn if without is None else [torch.where(ids == without, (without + 1) % vocab, ids) for ids in drawn]
