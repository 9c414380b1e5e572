"""Choices of experts that one run makes and others repeat.

Rounding moves router logits a little, and where two are almost equal another expert wins. Such a token's gradients
differ entirely, in a right plan too, so runs in two dtypes can be compared only where they make the same choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moec.codegen.plan import Plan
from moec.passes.ir import REPLICATED, Layout, local_slices
from moec.passes.ir.interface import layer_calls
from moec.passes.ir.mixture_values import choices_of

ROUTE = "moec.route.default"


class Routes:
    """`moec::route` on all ranks of a run. `given` (module path → experts of every rank) replaces its choices."""

    def __init__(self, given: Mapping[str, Sequence[Tensor]] | None = None) -> None:
        self.experts: dict[str, dict[int, Tensor]] = {}
        """The choices of this run: module path → rank → int64 `[B, S, k]`."""
        self.logits: dict[str, dict[int, Tensor]] = {}
        """The router logits of this run, in the same order."""
        self._given = given

    def __call__(
        self, path: str, rank: int, logits: Tensor, k: int, score: str, order: str, normalize: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `moec::route` gives, with the weights of the given choices where there are any."""
        probabilities, weights, experts = torch.ops.moec.route.default(logits, k, score, order, normalize)
        if self._given is not None:
            experts = self._given[path][rank]
            weights = _weights(logits, probabilities, experts, score, order, normalize)
        self.experts.setdefault(path, {})[rank] = experts
        self.logits.setdefault(path, {})[rank] = logits.detach()
        return probabilities, weights, experts


def shared_out(plan: Plan, experts: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Each rank's part of the global batch's choices (module path → `[B, S, k]`)."""
    dense = plan.meshes["dense"]
    layouts = layouts_of_choices(plan)
    return {
        path: [whole[local_slices(whole.shape, layouts[path], dense, rank)] for rank in range(plan.world_size)]
        for path, whole in experts.items()
    }


def layouts_of_choices(plan: Plan) -> dict[str, Layout]:
    """How the choices of each layer's tokens lie on the dense mesh, by the layer's path."""
    chosen = ((call.layer, choices_of(plan.program.block(call.block))) for call in layer_calls(plan.program))
    return {f"layers.{layer}.": (choices.layout or REPLICATED) for layer, choices in chosen if choices is not None}


def _weights(logits: Tensor, probabilities: Tensor, experts: Tensor, score: str, order: str, normalize: bool) -> Tensor:
    """The weights of given experts, as `moec::route` defines them for those that it chooses."""
    sigmoid = score == "sigmoid"
    if normalize or (order == "after" and not sigmoid):
        return (F.logsigmoid(logits) if sigmoid else logits).gather(-1, experts).softmax(-1)
    return logits.gather(-1, experts).sigmoid() if sigmoid else probabilities.gather(-1, experts)
