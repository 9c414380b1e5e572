"""A mixture whose gate has the options of DeepSeek-V3's and gpt-oss's, written by hand in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from oracles.specs import VOCAB
from plain_moe import PlainModel, PlainMoe
from plain_weights import plain_state_dict
from torch import Tensor, nn

from moec.grammar.spec import Spec
from moec.runtime.job.module import PlanModule
from moec.runtime.job.reference import reference
from moec.runtime.verify.unsharded import training_loss

TIGHT = {"rtol": 1e-10, "atol": 1e-10}


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
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    for module in plain.modules():
        if isinstance(module, PlainMoe):
            module.__class__ = mixture
            if getattr(module.topk, "bias", "none") == "learned":
                module.gate.bias = nn.Parameter(torch.zeros(module.num_experts, dtype=torch.float64))
    return ours, plain


def require_equal(ours: PlanModule, plain: PlainModel) -> None:
    """Logits, loss and gradients agree to 1e-10."""
    plain.load_state_dict(plain_state_dict(dict(ours.named_parameters())))
    draw = torch.Generator().manual_seed(2)
    tokens, labels = (torch.randint(VOCAB, (3, 13), generator=draw) for _ in range(2))
    output, (logits, loss) = ours(tokens, labels), plain(tokens, labels)
    torch.testing.assert_close(output.logits, logits, **TIGHT)
    own = training_loss(ours, output)
    torch.testing.assert_close(own, loss, **TIGHT)
    own.backward()
    loss.backward()
    found = plain_state_dict({name: parameter.grad for name, parameter in ours.named_parameters()})
    assert found.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[name], expected, **TIGHT, msg=lambda text, name=name: f"{name}: {text}")
