"""The experts that `topology(share = …)` gives a token in place of those in other nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from support.tables import each_row

from moec.codegen.emit.gating.emit_topology import _chosen_near
from moec.runtime.ops import route

LOGITS = {
    "spread": torch.randn(64, 8, generator=torch.Generator().manual_seed(0)),
    "probabilities that are equal where logits are not": 1e-8
    * torch.randn(64, 8, generator=torch.Generator().manual_seed(1)),
    "probabilities of 0": torch.tensor([[-200.0, -150, -160, -170, 100, -190, -180, -185]] * 2),
}


@each_row("name", LOGITS)
def test_a_token_gets_its_best_near_experts_that_it_has_not_chosen(name: str) -> None:
    """Two nodes of four experts; every far choice is given up."""
    logits = LOGITS[name][None]
    _, _, experts, *_ = route(logits, None, 3, "softmax", "before", False)
    kept = torch.where(experts < 4, experts, -1)
    op: Any = SimpleNamespace(
        levels=(1, 2), parts=(8,), sharers=1, ep=2, etp=1, results=[SimpleNamespace(shape=kept.shape)]
    )
    chosen = _chosen_near(op, 1, logits, kept, torch.tensor([0]))
    for scores, before, after in zip(logits[0].tolist(), kept[0].tolist(), chosen[0].tolist(), strict=True):
        wanted = list(before)
        left = sorted({0, 1, 2, 3} - set(before), key=lambda expert: -scores[expert])
        for place, expert in enumerate(wanted):
            wanted[place] = left.pop(0) if expert < 0 else expert
        assert after == wanted
        assert len(set(after)) == 3
