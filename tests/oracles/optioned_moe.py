"""A mixture whose gate has the options of DeepSeek-V3's and gpt-oss's, written by hand in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from oracles.same import batch, copy_parameters, enlarge, require_same
from plain_moe import PlainModel, PlainMoe
from torch import Tensor, nn

from moec.grammar.spec import Spec
from moec.runtime.host.reference import reference
from moec.runtime.model.module import PlanModule


class OptionedMoe(PlainMoe):
    """`PlainMoe` with the options of `topk` that its base class lacks."""

    bias: Tensor | None = None
    """Biases that choose and do not weigh."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        logits = self.logits(x)
        weights, chosen = self.choose(logits)
        mixed = self.mix(x.flatten(0, 1), weights, chosen).view_as(x)
        return self.with_dense_paths(x, mixed), self.balance(logits, chosen)

    def logits(self, x: Tensor) -> Tensor:
        """With the router's own bias, where it has one."""
        return F.linear(x, self.gate.weight, self.gate.bias)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's experts and their weights."""
        gate = self.topk
        score: Callable[[Tensor], Tensor] = torch.sigmoid if gate.score == "sigmoid" else lambda z: z.softmax(-1)
        keys = self.keys(logits, score)
        chosen = keys.topk(gate.k).indices
        weights = score(logits.gather(-1, chosen)) if gate.order == "after" else score(logits).gather(-1, chosen)
        if gate.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * gate.scale, chosen

    def keys(self, logits: Tensor, score: Callable[[Tensor], Tensor]) -> Tensor:
        """The numbers by which experts are chosen."""
        gate = self.topk
        keys = logits if gate.order == "after" else score(logits)
        keys = keys if self.bias is None else score(logits) + self.bias
        if getattr(gate, "keep_groups", None) is None or gate.keep_groups in (None, gate.groups):
            return keys
        by_group = keys.unflatten(-1, (gate.groups, -1))
        best = min(by_group.shape[-1], 2 if gate.group_score == "top2_sum" else 1)
        kept = by_group.topk(best).values.sum(-1).topk(gate.keep_groups).indices
        mask = torch.zeros(by_group.shape[:-1], dtype=torch.bool).scatter(-1, kept, True)
        return by_group.masked_fill(~mask[..., None], -torch.inf).flatten(-2)


def pair(spec: Spec, mixture: type[PlainMoe]) -> tuple[PlanModule, PlainModel]:
    """moec's model and the handwritten one, whose mixtures are `mixture`, with the same large parameters."""
    ours, plain = reference(spec, dtype=torch.float64), PlainModel(spec, torch.float64)
    enlarge(ours)
    for module in plain.modules():
        if isinstance(module, PlainMoe):
            module.__class__ = mixture
            if getattr(module.topk, "bias", "none") == "learned":
                module.gate.bias = nn.Parameter(torch.zeros(module.num_experts, dtype=torch.float64))
    return ours, plain


def require_equal(ours: PlanModule, plain: PlainModel) -> None:
    """With the same parameters: logits, loss and gradients."""
    copy_parameters(ours, plain)
    require_same(ours, plain, *batch())
