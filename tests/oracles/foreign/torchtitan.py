"""torchtitan's router. Source: torchtitan 0.2.2 (commit b5bcd76c), torchtitan/models/common/moe.py."""

from __future__ import annotations

from oracles.foreign.routing import Routing, in_best_groups, spread
from torch import Tensor


def route(
    logits: Tensor,
    top_k: int = 1,
    *,
    score_func: str = "sigmoid",
    route_norm: bool = False,
    route_scale: float = 1.0,
    num_expert_groups: int | None = None,
    num_limited_groups: int | None = None,
    expert_bias: Tensor | None = None,
) -> Routing:
    """`TokenChoiceTopKRouter.forward`. Biases choose, and do not weigh; a group counts its two best experts."""
    scores = logits.sigmoid() if score_func == "sigmoid" else logits.softmax(-1)
    choosing = scores if expert_bias is None else scores + expert_bias
    if num_expert_groups is not None:
        assert num_limited_groups is not None
        choosing = in_best_groups(choosing, num_expert_groups, num_limited_groups, 2)
    chosen = choosing.topk(top_k, -1).indices
    weights = scores.gather(-1, chosen)
    if route_norm:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(spread(weights * route_scale, chosen, logits.shape[-1]))


def updated_bias(counts: Tensor, bias: Tensor, coefficient: float) -> Tensor:
    """`register_moe_load_balancing_hook` (components/optimizer/optimizer.py): a step whose mean over experts is 0."""
    step = coefficient * (counts.double().mean() - counts).sign()
    return bias + step - step.mean()
