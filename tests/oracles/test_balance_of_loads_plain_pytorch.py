"""Balance terms over the loads of experts against their papers' definitions, group by group."""

from __future__ import annotations

import pytest
import torch
from oracles.gate_oracle import OracleMoe, Routed, compare, gshard_loss, switch_loss
from torch import Tensor

ORACLE_OF = {
    "gshard_loss": "",
    "importance_loss": "of",
}

LAYERS = """
    layers {{
      attention = gqa(heads = 4, kv_heads = 2, head_dim = 6, rope = rope())
      moe {{ experts = 5 * swiglu(20); gate = topk({k}); balance = [{term}(0.3)]; group = {group} }}
    }}
"""


class TopKMoe(OracleMoe):
    """Softmax of all logits, the k largest."""

    def route(self, x: Tensor) -> Routed:
        logits = self.logits(x)
        weights, experts = logits.softmax(-1).topk(self.topk.k, -1)
        return Routed(weights, experts, logits, logits.softmax(-1))


@pytest.mark.parametrize("group", ["sequence", "batch"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("term", ["gshard_loss", "importance_loss"])
@pytest.mark.parametrize("padding", [None, 3])
def test_reference_equals_the_definition(term: str, k: int, group: str, padding: int | None) -> None:
    compare(TopKMoe, LAYERS.format(k=k, term=term, group=group), padding=padding)


class TutelsMoe(TopKMoe):
    """Importance over the softmax of all logits: Tutel ac0e51b9, `tutel/impls/losses.py`, `load_importance_loss`."""

    def balanced(self, found: Routed, x: Tensor) -> Tensor:
        importances = found.probabilities[self.real].sum(0)
        unbiased = importances.var() / importances.mean() ** 2
        return self.terms[0].weight * unbiased * (self.num_experts - 1) / self.num_experts


@pytest.mark.parametrize("padding", [None, 3])
def test_the_importance_of_all_experts_is_tutels(padding: int | None) -> None:
    layers = LAYERS.format(k=2, term="importance_loss", group="batch").replace("(0.3)", "(0.3, of = all)")
    compare(TutelsMoe, layers, padding=padding)


def test_first_choices_are_not_all_choices() -> None:
    """With k of 2, `gshard_loss` and `switch_loss` differ."""
    logits = torch.tensor([[[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]]], dtype=torch.float64)
    weights, experts = logits.softmax(-1).topk(2, -1)
    found = Routed(weights[0], experts[0], logits[0], logits.softmax(-1)[0])
    assert gshard_loss(found, 3) == pytest.approx(3 * float(logits.softmax(-1)[0, 0, 0]))
    assert gshard_loss(found, 3) > switch_loss(found, 3)
