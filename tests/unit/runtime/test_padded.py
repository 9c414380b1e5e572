"""Padded rows of a capacity, against a queue in Python."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from moec.runtime import ops
from moec.runtime.backends.torch.torch_padded import places_of

EXPERTS = 4


def chosen(batch: int = 3, tokens: int = 5, k: int = 2, seed: int = 0) -> Tensor:
    scores = torch.rand(batch, tokens, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return scores.topk(k, dim=-1)[1]


def by_hand(experts: Tensor, groups: int, capacity: int) -> Tensor:
    """Whether each choice is kept: first choices before second choices, in token order."""
    batch, tokens, k = experts.shape
    kept = torch.zeros_like(experts, dtype=torch.bool)
    for members in torch.arange(batch).chunk(groups or batch):
        taken = [0] * EXPERTS
        for choice in range(k):
            for sequence in members.tolist():
                for token in range(tokens):
                    expert = int(experts[sequence, token, choice])
                    kept[sequence, token, choice] = taken[expert] < capacity
                    taken[expert] += 1
    return kept


def permuted(x: Tensor, experts: Tensor, groups: int, parts: int, whole: int, least: int = 1) -> tuple[Tensor, ...]:
    starts = ops.queue_starts(ops.count_queues(experts, EXPERTS), groups)
    return ops.permute_padded(x, experts, starts, None, parts, whole, parts, whole, least, groups, 1)


@pytest.mark.parametrize("groups", [0, 1, 3])
@pytest.mark.parametrize(("parts", "whole", "least"), [(1, 2, 1), (1, 1, 1), (5, 4, 1), (1, 4, 3), (4, 1, 1)])
def test_kept_choices_are_those_of_a_queue_kept_by_hand(groups: int, parts: int, whole: int, least: int):
    experts, x = chosen(), torch.randn(3, 5, 6)
    rows, counts, positions = permuted(x, experts, groups, parts, whole, least)
    capacity, places = places_of(3, 5, 2, EXPERTS, groups, 1, parts, whole, least)
    assert torch.equal(positions >= 0, by_hand(experts, groups, capacity))
    assert rows.shape == (EXPERTS, places, 6)
    assert counts.sum() == (positions >= 0).sum()
    for sequence, token, choice in (positions >= 0).nonzero().tolist():
        place = int(positions[sequence, token, choice])
        assert place // places == experts[sequence, token, choice]
        assert place % places < counts[0, place // places]
        assert torch.equal(rows.flatten(0, 1)[place], x[sequence, token])
    assert len(set(positions[positions >= 0].tolist())) == int(counts.sum()), "a place is taken twice"
    assert rows.abs().sum(-1).count_nonzero() == counts.sum(), "an empty place is not zeros"


@pytest.mark.parametrize("groups", [0, 1])
def test_a_setting_says_which_of_two_capacities_is_in_force(groups: int):
    experts, x = chosen(), torch.randn(3, 5, 6)
    starts = ops.queue_starts(ops.count_queues(experts, EXPERTS), groups)
    for training, factor in ((1, (1, 2)), (0, (3, 2))):
        setting, capacity = torch.tensor(training), (1, 2, 3, 2, 1, groups, 1)
        found = ops.permute_padded(x, experts, starts, setting, *capacity)
        for got, wanted in zip(found, permuted(x, experts, groups, *factor), strict=True):
            assert torch.equal(got, wanted)
        kept = ops.keep_choices(experts, starts, setting, *capacity)
        assert torch.equal(kept, ops.keep_choices(experts, starts, None, *factor, *factor, 1, groups, 1))


def test_pieces_of_a_sequence_stand_in_one_queue():
    """With sequences sharded, as under tensor parallelism, the same choices are kept."""
    experts, x = chosen(tokens=6), torch.randn(3, 6, 2)
    _, _, whole = permuted(x, experts, 0, 1, 1)
    pieces = experts.chunk(2, dim=1)
    queues = torch.cat([ops.count_queues(piece, EXPERTS) for piece in pieces], 1)
    starts = ops.queue_starts(queues, 0).chunk(2, dim=1)
    cut = [
        ops.permute_padded(part, piece, start, None, 1, 1, 1, 1, 1, 0, 2)[2]
        for part, piece, start in zip(x.chunk(2, dim=1), pieces, starts, strict=True)
    ]
    assert torch.equal(torch.cat(cut, 1) >= 0, whole >= 0)


def test_dynamic_places_are_as_many_as_the_busiest_expert_has_rows():
    experts, x = chosen(), torch.randn(3, 5, 6)
    largest = ops.largest_load(experts, EXPERTS)
    assert largest == torch.bincount(experts.flatten(), minlength=EXPERTS).max()
    rows, counts, positions = ops.permute_dynamic(x, experts, largest, EXPERTS)
    assert rows.shape == (EXPERTS, int(largest), 6)
    assert torch.equal(counts[0], torch.bincount(experts.flatten(), minlength=EXPERTS))
    assert torch.equal(rows.flatten(0, 1)[positions], x[:, :, None].expand(3, 5, 2, 6))


@pytest.mark.parametrize("groups", [0, 1, 3])
@pytest.mark.parametrize(("parts", "whole"), [(1, 2), (1, 1), (4, 1)])
def test_choices_are_kept_as_a_capacity_keeps_them(groups: int, parts: int, whole: int):
    experts, x = chosen(), torch.randn(3, 5, 6)
    _, counts, positions = permuted(x, experts, groups, parts, whole)
    starts = ops.queue_starts(ops.count_queues(experts, EXPERTS), groups)
    kept = ops.keep_choices(experts, starts, None, parts, whole, parts, whole, 1, groups, 1)
    assert torch.equal(kept, experts.where(positions >= 0, -1))
    largest = ops.largest_load(kept, EXPERTS)
    assert largest == counts.max()
    rows, dynamic_counts, dynamic_positions = ops.permute_dynamic(x, kept, largest, EXPERTS)
    assert rows.shape == (EXPERTS, int(largest), 6)
    assert torch.equal(dynamic_counts, counts)
    assert torch.equal(dynamic_positions >= 0, positions >= 0)


def test_where_nothing_is_kept_nothing_has_a_place():
    kept = torch.full((2, 3, 2), -1)
    assert ops.largest_load(kept, EXPERTS) == 0
    rows, counts, positions = ops.permute_dynamic(torch.randn(2, 3, 4), kept, torch.tensor(0), EXPERTS)
    assert rows.shape == (EXPERTS, 0, 4)
    assert counts.sum() == 0
    assert (positions == -1).all()


def test_what_is_dropped_adds_nothing_and_other_weights_stay():
    experts, x = chosen(), torch.randn(3, 5, 6)
    rows, _, positions = permuted(x, experts, 0, 1, 2)
    weights = torch.rand(3, 5, 2)
    expected = (weights * (positions >= 0)).sum(-1, keepdim=True) * x
    torch.testing.assert_close(ops.combine_padded(rows, positions, weights), expected)


@pytest.mark.parametrize("groups", [0, 1])
def test_gradients_are_those_of_finite_differences(groups: int):
    experts = chosen()
    x = torch.randn(3, 5, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(3, 5, 2, dtype=torch.float64, requires_grad=True)

    def layer(x: Tensor, weights: Tensor) -> Tensor:
        rows, _, positions = permuted(x, experts, groups, 1, 2)
        return ops.combine_padded(rows.square(), positions, weights)

    assert gradcheck(layer, (x, weights))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_no_tokens_have_no_rows_and_still_a_gradient(shape: tuple[int, int]):
    experts = torch.zeros(*shape, 2, dtype=torch.int64)
    x = torch.randn(*shape, 3, requires_grad=True)
    rows, counts, positions = permuted(x, experts, 0, 1, 1)
    assert counts.sum() == 0
    ops.combine_padded(rows, positions, torch.rand(*shape, 2)).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_sequences_that_are_no_equal_shares_are_refused():
    with pytest.raises(RuntimeError, match="3 sequences are not 2 equal shares"):
        ops.queue_starts(ops.count_queues(chosen(), EXPERTS), 2)
