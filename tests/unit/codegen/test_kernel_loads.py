"""Rows per expert: expectations against enumeration, against draws, and against sums that are known."""

from __future__ import annotations

from itertools import permutations, product
from math import ceil, comb

import numpy as np
import pytest
from support.tables import each_row
from zipf_loads import inclusions, zipf

from moec.codegen.kernels.model.model_loads import Load


def test_expected_tiles_of_uniform_routing_are_those_of_the_binomial() -> None:
    tokens, experts, k = 40, 8, 3
    load, chance = Load.uniform(tokens, experts, k), k / experts
    for height in (1, 4, 16, 64):
        terms = (comb(tokens, n) * chance**n * (1 - chance) ** (tokens - n) * ceil(n / height) for n in range(41))
        assert load.tiles(height) == pytest.approx(experts * sum(terms), rel=1e-12)
    assert load.tiles(1) == pytest.approx(load.rows) == tokens * k
    assert load.used_experts() == pytest.approx(experts * (1 - (1 - chance) ** tokens))


def test_expected_tiles_agree_with_drawn_routing() -> None:
    tokens, experts, k = 512, 16, 4
    draws = np.random.default_rng(0)
    found = []
    for _ in range(200):
        chosen = draws.random((tokens, experts)).argsort(axis=1)[:, :k]
        counts = np.bincount(chosen.ravel(), minlength=experts)
        found.append(np.ceil(counts / 64).sum())
    assert Load.uniform(tokens, experts, k).tiles(64) == pytest.approx(np.mean(found), rel=0.01)


def test_chances_of_draws_without_replacement_are_those_of_enumeration() -> None:
    shares = (0.5, 0.25, 0.15, 0.1)
    expected = [0.0] * 4
    for order in permutations(range(4), 2):
        chance, left = 1.0, 1.0
        for expert in order:
            chance, left = chance * shares[expert] / left, left - shares[expert]
        for expert in order:
            expected[expert] += chance
    assert inclusions(shares, 2) == pytest.approx(expected, rel=1e-6)


@each_row(("experts", "k"), [(8, 2), (128, 8), (256, 8), (64, 1)])
def test_chances_of_zipf_add_up_to_the_choices(experts: int, k: int) -> None:
    chances = zipf(1000, experts, k).chances
    assert sum(chances) == pytest.approx(k, rel=1e-6)
    assert list(chances) == sorted(chances, reverse=True)


def test_every_token_chooses_every_expert_when_there_are_as_many_choices() -> None:
    assert inclusions((0.7, 0.2, 0.1), 3) == (1, 1, 1)
    assert zipf(100, 3, 3).tiles(64) == 6


def test_known_counts_are_used_as_they_are() -> None:
    load = Load(counts=(0, 1, 64, 65))
    assert (load.rows, load.tiles(64), load.used_experts(), load.most_rows) == (130, 4, 3, 65)
    assert load.padding_efficiency(64) == 130 / 256


def test_no_tokens_have_no_tiles() -> None:
    load = Load.uniform(0, 8, 2)
    assert (load.rows, load.tiles(128), load.padding_efficiency(128)) == (0, 0, 1)


def test_a_rank_s_experts_get_as_many_rows_from_the_tokens_of_all_ranks() -> None:
    alone, of_rank = Load.uniform(2, 2, 2), Load.uniform_over_ranks(2, 2, 2, ranks=2)
    assert of_rank.rows == alone.rows == 4
    # SingleProcessHome both experts are always chosen; each of 4 tokens chooses 2 of the 4 experts of both ranks.
    assert (alone.used_experts(), of_rank.used_experts()) == (2, pytest.approx(2 * (1 - 0.5**4)))


def test_tiles_of_many_rows_are_a_half_more_than_full_ones() -> None:
    """An expert's last tile is half empty on average."""
    for tokens, height in product((65_536, 131_072), (64, 128)):
        load = Load.uniform(tokens, 16, 2)
        assert load.tiles(height) == pytest.approx(load.rows / height + 16 / 2, rel=2e-3)
