"""Routing groups: results depend on no ranks, and with `sequence` on no split into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from support.combinations import diagonals
from support.plans import moe_plan, moe_spec
from torch import Tensor

from moec.passes.ir import Layout, Mesh, local_slices
from moec.passes.ir.roles import IGNORED_LABEL
from moec.runtime.errors import JobError
from moec.runtime.host.reference import reference
from moec.runtime.verify.cluster.virtual import VirtualCluster

BATCH, SEQUENCE, CHOICES = 8, 8, 2
BOUND = 1e-12
OTHER = 1e-4
"""Results that differ by less are equal."""


RANKS = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 4, 2), (4, 1, 1), (4, 4, 1)]
SPLITS = [(1, 1, 1, 1), (1, 1, 1, 4), (2, 4, 2, 1), (4, 2, 1, 2)]
GROUPS = ["sequence", "batch", "rank"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one step: loss, whole gradients, the logits of all sequences, and each layer's drop rate."""

    loss: Tensor
    gradients: dict[str, Tensor]
    logits: Tensor
    drops: dict[int, float]


def batch(vocab: int) -> tuple[Tensor, Tensor]:
    """One label of each sequence is ignored: the mean of equal parts' losses is then the loss of all.

    Half of the sequences are of three tokens only, so that some experts fill up.
    """
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(vocab, (BATCH, SEQUENCE), generator=generator)
    tokens[BATCH // 2 :] %= 3
    labels = torch.randint(vocab, (BATCH, SEQUENCE), generator=generator)
    labels[:, 3] = IGNORED_LABEL
    return tokens, labels


@cache
def outcome(
    group: str, dp: int = 1, ep: int = 1, tp: int = 1, micro_batches: int = 1, capacity: str = "factor(1.0)"
) -> Outcome:
    """A step in float64, its gradients those of the mean of its micro-batches' losses."""
    beside = f"capacity = {capacity}; group = {group}"
    plan = moe_plan(ranks=dp * tp, tp=tp, ep=ep, batch=BATCH, sequence=SEQUENCE, beside=beside)
    model = reference(plan.spec, seed=2, dtype=torch.float64)
    cluster = VirtualCluster(plan, dict(model.named_parameters()))
    loss, logits, kept = torch.zeros((), dtype=torch.float64), [], dict.fromkeys((1, 2), 0)
    gradients = {name: torch.zeros_like(whole) for name, whole in model.named_parameters()}
    parts = (ids.chunk(micro_batches) for ids in batch(plan.spec.model.vocab))
    for tokens, labels in zip(*parts, strict=True):
        of_rank = [[ids.chunk(dp)[plan.data_rank(rank)] for rank in range(plan.world_size)] for ids in (tokens, labels)]
        step = cluster.step(*of_rank)
        step.run()
        loss += step.losses[0][0].detach() / micro_batches
        # A sequence's logits lie on the ranks of its own tp group.
        shape = (len(tokens), SEQUENCE, plan.spec.model.vocab)
        logits.append(whole(shape, step.stage_values.result, plan.result_layout, plan.meshes["dense"]))
        for layer, counts in step.stage_values.counts["counts"].items():
            kept[layer] += int(torch.cat(counts).sum())
        for name, found in step.gradients.items():
            data = plan.parameters[name]
            gradient = whole(data.shape, found, data.layout, plan.meshes[data.mesh])
            gradients[name] += gradient / micro_batches
    drops = {layer: 1 - rows / (CHOICES * BATCH * SEQUENCE) for layer, rows in kept.items()}
    return Outcome(loss, gradients, torch.cat(logits), drops)


def whole(shape: Sequence[int], parts: Sequence[Tensor], layout: Layout, mesh: Mesh) -> Tensor:
    """The whole tensor of the ranks' parts."""
    found = torch.full(tuple(shape), torch.nan, dtype=torch.float64)
    for rank, part in enumerate(parts):
        found[local_slices(shape, layout, mesh, rank)] = part.detach()
    return found


def distance(one: Outcome, other: Outcome) -> float:
    """The largest difference of losses, logits and gradients, which all are of the order of 1."""
    pairs = [(one.loss, other.loss), (one.logits, other.logits)]
    pairs += [(gradient, other.gradients[name]) for name, gradient in one.gradients.items()]
    return max(float((a - b).abs().max()) for a, b in pairs)


def require_drops(found: Outcome) -> None:
    assert all(0.05 < rate < 0.9 for rate in found.drops.values()), "hardly any choice is dropped: it proves nothing"


@pytest.mark.parametrize(("ranks", "micro_batches"), diagonals(RANKS, [2, 1]))
def test_sequences_keep_the_same_choices_on_any_ranks_and_in_any_micro_batches(
    ranks: tuple[int, int, int], micro_batches: int
):
    alone = outcome("sequence")
    require_drops(alone)
    found = outcome("sequence", *ranks, micro_batches)
    assert found.drops == alone.drops
    assert distance(found, alone) < BOUND


@pytest.mark.parametrize(("dp", "ep", "tp"), [(2, 1, 1), (2, 2, 1), (2, 4, 2), (4, 1, 1), (4, 4, 1), (8, 4, 1)])
def test_a_batch_keeps_the_same_choices_on_any_ranks(dp: int, ep: int, tp: int):
    alone = outcome("batch")
    require_drops(alone)
    found = outcome("batch", dp, ep, tp)
    assert found.drops == alone.drops
    assert distance(found, alone) < BOUND


@pytest.mark.parametrize(("group", "split"), diagonals(GROUPS, SPLITS, number=2))
def test_a_dynamic_capacity_up_to_a_factor_keeps_what_the_factor_keeps(group: str, split: tuple[int, int, int, int]):
    dp, ep, tp, micro_batches = split
    factor = outcome(group, dp, micro_batches=micro_batches)
    found = outcome(group, dp, ep, tp, micro_batches, capacity="dynamic(max = 1.0)")
    assert found.drops == factor.drops
    assert distance(found, factor) < BOUND


def test_a_batch_in_micro_batches_is_another_one():
    assert distance(outcome("batch", micro_batches=2), outcome("batch")) > OTHER


@pytest.mark.parametrize("dp", [2, 4])
def test_what_a_rank_keeps_depends_on_how_many_there_are(dp: int):
    alone = outcome("rank")
    require_drops(alone)
    found = outcome("rank", dp)
    assert found.drops != alone.drops
    assert distance(found, alone) > OTHER


def test_one_rank_is_the_batch_and_a_rank_with_one_sequence_is_that_sequence():
    assert distance(outcome("rank"), outcome("batch")) < BOUND
    assert distance(outcome("rank", dp=BATCH), outcome("sequence")) < BOUND


@pytest.mark.parametrize("group", ["sequence", "batch", "rank"])
@pytest.mark.parametrize("capacity", ["dropless", "factor(1.0)", "dynamic()", "dynamic(max = 1.0)"])
def test_a_batch_of_no_sequences_runs_forward_and_backward(capacity: str, group: str) -> None:
    model = reference(moe_spec(ranks=4, beside=f"capacity = {capacity}; group = {group}"))
    tokens = torch.zeros(0, 8, dtype=torch.int64)
    output = model(tokens, tokens)
    assert output.loss is not None
    output.loss.backward()
    assert output.loss.item() == 0
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("capacity", ["dropless", "factor(1.0)"])
def test_a_batch_that_routing_groups_do_not_divide_is_refused(capacity: str) -> None:
    model = reference(moe_spec(ranks=4, beside=f"capacity = {capacity}; group = rank"))
    with pytest.raises(JobError, match=r"tokens have 3 sequences, not a multiple of this rank.s 4 routing groups"):
        model(torch.zeros(3, 8, dtype=torch.int64))
