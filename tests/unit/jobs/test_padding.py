"""Padding tokens go to no expert, take no place and count in no balance term, on any ranks and with any capacity."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.combinations import diagonals
from support.plans import BODY, moe_plan, moe_spec
from support.verified import require_equal
from support.wrong_plans import bypass, change_kind, change_op
from torch import Tensor

import moec
from moec.codegen.plan import Plan
from moec.passes.ir.ops import CountLabels
from moec.runtime.host.reference import reference
from moec.runtime.model.module import PlanModule
from moec.runtime.verify.verification import verify

PADDING, VOCAB, CHOICES, IGNORED_LABEL = 3, 32, 2, -100
EMBEDDING = f"embedding = tokens(padding = {PADDING})"
LENGTHS = (5, 8, 1, 3)
CAPACITIES = ["", "capacity = factor(0.7, eval = 1.2)", "capacity = dynamic()", "capacity = dynamic(max = 0.8)"]
DEGREES = [{"ep": 1}, {"ep": 4}, {"ep": 2, "tp": 2}, {"ep": 4, "tp": 2, "sequence_parallel": False}]
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def model(**options: str) -> PlanModule:
    """In float64, with weights so large that balance terms have notable gradients."""
    made = reference(moe_spec(ranks=1, ep=1, model=EMBEDDING, **options), seed=1, dtype=torch.float64)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(5 if parameter.dim() > 1 else 1)
    return made


def padded(lengths: tuple[int, ...], width: int) -> tuple[Tensor, Tensor]:
    """Sequences of these lengths, padded on the right; padding has no labels."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(PADDING + 1, VOCAB, (len(lengths), width), generator=generator)
    labels = torch.randint(VOCAB, tokens.shape, generator=generator)
    for sequence, length in enumerate(lengths):
        tokens[sequence, length:], labels[sequence, length:] = PADDING, IGNORED_LABEL
    return tokens, labels


def gradients(of: PlanModule, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*of.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def test_a_padded_batch_is_its_sequences_one_by_one() -> None:
    """Logits of real tokens, loss, balance terms and every gradient: the means weighted by labels and by tokens."""
    made, (tokens, labels) = model(), padded(LENGTHS, 8)
    together = made(tokens, labels)
    cross_entropy = aux_loss = torch.zeros((), dtype=torch.float64)
    for row, row_labels, length, logits in zip(tokens, labels, LENGTHS, together.logits, strict=True):
        alone = made(row[None, :length], row_labels[None, :length])
        torch.testing.assert_close(logits[:length], alone.logits[0], **CLOSE)
        cross_entropy = cross_entropy + (alone.loss - alone.aux_loss) * length
        aux_loss = aux_loss + alone.aux_loss * length
    cross_entropy, aux_loss = cross_entropy / sum(LENGTHS), aux_loss / sum(LENGTHS)
    torch.testing.assert_close(together.aux_loss, aux_loss, **CLOSE)
    torch.testing.assert_close(together.loss, cross_entropy + aux_loss, **CLOSE)
    expected = gradients(made, cross_entropy + aux_loss)
    for name, gradient in gradients(made, together.loss).items():
        torch.testing.assert_close(gradient, expected[name], **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("group", ["sequence", "batch", "rank"])
def test_padding_changes_no_balance_term_of_any_routing_group(group: str) -> None:
    made, (tokens, labels) = model(beside=f"group = {group}"), padded((5, 5, 5), 8)
    together, alone = made(tokens, labels), made(tokens[:, :5], labels[:, :5])
    torch.testing.assert_close(together.aux_loss, alone.aux_loss, **CLOSE)
    torch.testing.assert_close(together.loss, alone.loss, **CLOSE)
    expected = gradients(made, alone.loss)
    for name, gradient in gradients(made, together.loss).items():
        torch.testing.assert_close(gradient, expected[name], **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


def test_a_sequence_of_padding_alone_changes_nothing() -> None:
    made, (tokens, labels) = model(), padded((5, 8, 0), 8)
    found, expected = made(tokens, labels), made(tokens[:2], labels[:2])
    torch.testing.assert_close(found.loss, expected.loss, **CLOSE)
    torch.testing.assert_close(found.aux_loss, expected.aux_loss, **CLOSE)


def test_a_batch_of_padding_alone_has_no_balance_terms_and_finite_gradients() -> None:
    made, (tokens, labels) = model(), padded((0, 0), 8)
    output = made(tokens, labels)
    assert output.aux_loss == 0
    assert output.loss == 0
    assert all((gradient == 0).all() for gradient in gradients(made, output.loss).values())


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_expert_counts_leave_padding_out(capacity: str) -> None:
    made, (tokens, _) = model(beside=capacity), padded(LENGTHS, 8)
    made(tokens)
    for counts in made.expert_counts.values():
        if "factor" in capacity or "max" in capacity:
            assert 0 < counts.sum() <= CHOICES * sum(LENGTHS)
        else:
            assert counts.sum() == CHOICES * sum(LENGTHS)


@pytest.mark.parametrize("group", ["sequence", "batch", "rank"])
def test_padding_makes_no_real_token_lose_its_place(group: str) -> None:
    """The number of places follows from all tokens of the group, and only real tokens fill them."""
    made, (tokens, _) = model(depth=2, beside=f"capacity = factor(1.0); group = {group}"), padded((4, 4), 8)
    made(tokens[:, :4])
    (alone,) = made.expert_counts.values()
    assert alone.sum() < CHOICES * 8, "nothing is dropped: it proves nothing"
    made(tokens)
    (together,) = made.expert_counts.values()
    assert (together >= alone).all()


GROUPS = ("sequence", "batch", "rank")


@pytest.mark.parametrize(("capacity", "group", "degrees"), diagonals(CAPACITIES, GROUPS, DEGREES))
def test_plans_with_padding_equal_the_unsharded_model(capacity: str, group: str, degrees: dict[str, int]) -> None:
    require_equal(moe_plan(model=EMBEDDING, beside=f"{capacity}; group = {group}", **degrees))


def test_a_plan_with_padding_is_verified_at_toy_widths_too() -> None:
    require_equal(moe_plan(model="embedding = tokens(padding = 31)"), scale=True)


THROUGH: dict[str, tuple[str, Callable[[Plan], Plan]]] = {
    "to an expert": ("mask_choices", lambda p: bypass(p, BODY, "e.1")),
    "into the Switch loss": ("switch_loss", lambda p: without_mask(p, "switch_loss")),
    "into the z-loss": ("z_loss", lambda p: without_mask(p, "z_loss")),
    "as another id": ("real_tokens", lambda p: change_op(p, "forward", "real", padding=PADDING - 1)),
}
"""Faults by which padding reaches experts or terms: the op that should mask it, and the change."""


def without_mask(plan: Plan, value: str) -> Plan:
    """Removes the mask of real tokens, the last operand of the op that computes `value`."""
    (op,) = [op for op in plan.program.block(BODY).ops if op.results[0].name == value]
    assert op.operands[-1].startswith("real")
    return change_op(plan, BODY, value, operands=op.operands[:-1])


@pytest.mark.parametrize("place", THROUGH)
def test_a_plan_that_lets_padding_through_in_one_place_is_refused(place: str) -> None:
    mnemonic, let_through = THROUGH[place]
    plan = moe_plan(model=EMBEDDING, ep=4)
    assert any(op.mnemonic == mnemonic for block in plan.program.blocks for op in block.ops)
    report = verify(let_through(plan), float32=False)
    assert not report.ok
    assert report.first_difference is not None


@pytest.mark.parametrize(
    "wrong",
    [
        lambda p: change_kind(p, "num_tokens", "count", CountLabels, valid_only=False),
        lambda p: change_op(p, "num_tokens", "count", padding=PADDING - 1),
    ],
    ids=["all tokens", "all but another id"],
)
def test_a_plan_that_counts_other_tokens_is_refused(wrong: Callable[[Plan], Plan]) -> None:
    report = verify(wrong(moe_plan(model=EMBEDDING)), float32=False)
    assert not report.ok
    assert report.first_difference is not None


@pytest.mark.parametrize("capacity", ["capacity = dropless", "capacity = factor(8.0)"])
def test_padding_is_not_taken_for_dropped_choices(capacity: str) -> None:
    plan = moe_plan(ranks=1, ep=1, model=EMBEDDING, beside=capacity)
    with moec.launch(plan, device="cpu") as job:
        made = job.build()
        job.step(made, *padded(LENGTHS, 8))
        assert all(int(load.sum()) == CHOICES * sum(LENGTHS) for load in job.expert_loads(made).values())
        assert set(job.drop_rates(made).values()) == {0.0}
