"""Balance terms of sequences and of groups of experts: padding, and faults in their plans."""

from __future__ import annotations

import pytest
import torch
from faults import change_op
from models import moe_plan, moe_spec
from torch import Tensor

from moec.runtime.job.reference import reference
from moec.runtime.verify.verification import verify

BODY = "layers[1..2]"
PADDED = "embedding = tokens(padding = 3)"
V3 = "topk(2, score = sigmoid, normalize = true, groups = 4, keep_groups = 2, bias = online(0.01))"
TERMS = ["sequence_loss(0.5)"]


def values(terms: str, group: str, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The balance terms and their gradients."""
    spec = moe_spec(ranks=1, ep=1, model=PADDED, gate=V3, balance=f"[{terms}]", beside=f"group = {group}")
    model = reference(spec, seed=1, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.dim() > 1 else 1)
    loss = model(tokens).aux_loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("group", ["sequence", "batch"])
def test_padding_changes_no_term_and_no_gradient(group: str, terms: str) -> None:
    tokens = torch.randint(4, 32, (3, 8), generator=torch.Generator().manual_seed(4))
    tokens[:, 5:] = 3
    loss, gradients = values(terms, group, tokens)
    alone, expected = values(terms, group, tokens[:, :5])
    torch.testing.assert_close(loss, alone, rtol=1e-12, atol=1e-14)
    assert loss > 0.1
    torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-12)


def test_a_sequence_loss_over_other_scores_is_found() -> None:
    plan = moe_plan(ep=2, tp=2, gate=V3, balance="[sequence_loss(0.5)]")
    (largest,) = (op for op in plan.program.block(BODY).ops if op.mnemonic == "largest_scores")
    (counts,) = (op for op in plan.program.block(BODY).ops if op.mnemonic == "count_choices")
    chosen = next(op for op in plan.program.block(BODY).ops if op.mnemonic == "route").results[2].name
    assert counts.operands == (largest.results[0].name,)
    assert not verify(change_op(plan, BODY, counts.results[0].name, operands=(chosen,)), float32=False).ok
