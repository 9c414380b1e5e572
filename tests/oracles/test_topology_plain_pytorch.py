"""The gate `topology` against a handwritten loss over the links of a cluster, and a bound counted choice by choice."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from oracles.gate_oracle import OracleMoe, Routed, compare, switch_loss
from torch import Tensor

from moec.grammar.spec import Level, Parallel, Spec

ORACLE_OF = {
    "topology": "k weight share",
}

EXPERTS, MEMORY = 8, 10e9
LAYERS = """
    layers {{
      attention = gqa(heads = 4, kv_heads = 2, head_dim = 6, rope = rope())
      moe {{ experts = 8 * swiglu(12); gate = topology({gate}); balance = [{balance}]; {beside} }}
    }}
"""
Levels = tuple[tuple[int, float], ...]
"""The size and the bandwidth of each level, from the innermost out."""
TWO: Levels = ((2, 4e9), (2, 1e9))
THREE: Levels = ((2, 6e9), (2, 3e9), (2, 5e8))


def on(levels: Levels, ep: int, tp: int = 1, batch: int = 8) -> Callable[[Spec], Spec]:
    """Puts a Spec on a cluster of these levels."""
    declared = tuple(Level(name=f"l{i}", size=size, bandwidth=bandwidth) for i, (size, bandwidth) in enumerate(levels))

    def placed(spec: Spec) -> Spec:
        assert spec.train is not None
        return spec.replace(
            cluster=spec.cluster.replace(levels=declared),
            parallel=Parallel(tp=tp, ep=ep),
            train=spec.train.replace(batch=batch, sequence=14),
        )

    return placed


class Links:
    """Ranks as coordinates, one per level from the outermost in; the rank of every expert, for every rank."""

    def __init__(self, levels: Levels, ep: int, tp: int) -> None:
        self.levels, self.ep, self.tp = levels, ep, tp
        self.ranks = list(product(*(range(size) for size, _ in reversed(levels))))

    def seconds(self, one: int, other: int) -> float:
        """For a byte between two ranks: over the outermost level at which they are different."""
        pairs = zip(self.ranks[one], self.ranks[other], reversed(self.levels), strict=True)
        return next((1 / bandwidth for a, b, (_, bandwidth) in pairs if a != b), 1 / MEMORY)

    def holder(self, rank: int, expert: int) -> int:
        """The rank of the same expert-parallel group that holds the expert."""
        groups = [list(range(first, first + self.ep)) for first in range(0, len(self.ranks), self.ep)]
        (group,) = (ranks for ranks in groups if rank in ranks)
        return group[expert // (EXPERTS // self.ep)]

    def own(self, data_rank: int) -> list[int]:
        return list(range(data_rank * self.tp, (data_rank + 1) * self.tp))

    def penalties(self, data_rank: int) -> Tensor:
        own = self.own(data_rank)
        each = [sum(self.seconds(rank, self.holder(rank, e)) for rank in own) for e in range(EXPERTS)]
        return torch.tensor(each, dtype=torch.float64) / (sum(each) / EXPERTS)

    def near(self, data_rank: int) -> list[int]:
        """The experts that no byte of the data rank crosses the outermost level for."""
        same = lambda rank, e: self.ranks[rank][0] == self.ranks[self.holder(rank, e)][0]  # noqa: E731
        return [e for e in range(EXPERTS) if all(same(rank, e) for rank in self.own(data_rank))]


class TopologyMoe(OracleMoe):
    links: Links
    micro = 1
    moved = 0

    def members(self, x: Tensor) -> list[tuple[int, list[int]]]:
        """Data ranks with their sequences, micro-batch by micro-batch."""
        data = len(self.links.ranks) // self.links.tp
        size = len(x) // (self.micro * data)
        return [(i % data, list(range(i * size, (i + 1) * size))) for i in range(self.micro * data)]

    def route(self, x: Tensor) -> Routed:
        logits = self.logits(x)
        p, k = logits.softmax(-1), self.topk.k
        experts = torch.stack([torch.stack([row.argsort(descending=True)[:k] for row in rows]) for rows in logits])
        if self.topk.share is not None and self.training:
            for data_rank, sequences in self.members(x):
                self.choose_again(self.links.near(data_rank), sequences, p.detach(), experts)
        return Routed(p.gather(-1, experts), experts, logits, p)

    def choose_again(self, near: list[int], sequences: list[int], p: Tensor, experts: Tensor) -> None:
        tokens = [(s, t) for s in sequences for t in range(p.shape[1]) if self.real[s, t]]
        choices = [(s, t, c) for s, t in tokens for c in range(experts.shape[-1])]
        far = [one for one in choices if int(experts[one]) not in near]
        far.sort(key=lambda one: -float(p[one[0], one[1], int(experts[one])]))
        allowed = int(self.topk.share * len(choices))  # a Fraction: the product is exact
        for one in far[allowed:]:
            experts[one] = -1
        for s, t, c in sorted(far[allowed:]):
            left = [e for e in near if e not in experts[s, t].tolist()]
            experts[s, t, c] = max(left, key=lambda e, row=p[s, t]: float(row[e]))
            self.moved += 1

    def balanced(self, found: Routed, x: Tensor) -> Tensor | float:
        """Chen et al. 2022, section 4: sum over e of p_ie · m_ie · c_ie / S, with c over the k choices of a token."""
        total = super().balanced(found, x)
        for data_rank, sequences in self.members(x):
            real = self.real[sequences].flatten()
            chosen = found.experts[sequences].flatten(0, 1)[real]
            if not len(chosen):
                continue
            shares = torch.stack([(chosen == e).sum() for e in range(EXPERTS)]).double() / chosen.numel()
            means = found.probabilities[sequences].flatten(0, 1)[real].mean(0)
            term = EXPERTS * (self.links.penalties(data_rank) * means * shares).sum()
            total = total + self.topk.weight * term * real.sum() / self.real.sum()
        return total


def oracle(links: Links, microbatches: int = 1) -> type[TopologyMoe]:
    return type("Oracle", (TopologyMoe,), {"links": links, "micro": microbatches})


PLACES = [(TWO, 4, 1), (TWO, 2, 1), (TWO, 4, 2), (THREE, 8, 1), (THREE, 4, 1), (THREE, 8, 2), (((3, 2e9),), 1, 1)]


@pytest.mark.parametrize(("levels", "ep", "tp"), PLACES)
def test_the_loss_is_that_of_the_links(levels: Levels, ep: int, tp: int) -> None:
    layers = LAYERS.format(gate="2, weight = 0.7", balance="z_loss(0.1)", beside="")
    batch = 9 if levels[0][0] == 3 else 8
    compare(oracle(Links(levels, ep, tp)), layers, ranks=on(levels, ep, tp, batch))


@pytest.mark.parametrize(
    ("levels", "ep", "tp", "k", "share"),
    [(TWO, 4, 1, 2, "0.2"), (TWO, 4, 1, 2, "1"), (THREE, 8, 2, 3, "1/7"), (THREE, 8, 2, 2, "0"), (THREE, 8, 1, 1, "0")],
)
def test_far_choices_beyond_the_share_are_made_again(levels: Levels, ep: int, tp: int, k: int, share: str) -> None:
    layers = LAYERS.format(gate=f"{k}, weight = 0.3, share = {share}", balance="switch_loss(0.2)", beside="")
    plain = compare(oracle(Links(levels, ep, tp)), layers, ranks=on(levels, ep, tp))
    assert all(bool(layer.moe.moved) == (share != "1") for layer in plain.layers)


def test_in_evaluation_no_choice_is_made_again() -> None:
    layers = LAYERS.format(gate="2, weight = 0.1, share = 0", balance="", beside="")
    compare(oracle(Links(TWO, 4, 1)), layers, ranks=on(TWO, 4), training=False)


@pytest.mark.parametrize("beside", ["", "capacity = factor(0.75)", "group = batch; capacity = factor(1.0)"])
def test_padding_has_no_part_in_the_share_and_the_loss(beside: str) -> None:
    layers = LAYERS.format(gate="2, weight = 0.7, share = 0.25", balance="", beside=beside)
    compare(oracle(Links(TWO, 4, 1)), layers, ranks=on(TWO, 4), padding=3)


def test_each_micro_batch_has_a_loss_and_a_share_of_its_own() -> None:
    layers = LAYERS.format(gate="2, weight = 0.7, share = 0.15", balance="", beside="")
    compare(oracle(Links(TWO, 4, 1), 2), layers, ranks=on(TWO, 4), microbatches=2)


class Flat(OracleMoe):
    """Top-2, whose balance terms are those of `switch_loss` for each of two data ranks."""

    def route(self, x: Tensor) -> Routed:
        logits = self.logits(x)
        p = logits.softmax(-1)
        weights, experts = p.topk(2)
        return Routed(weights, experts, logits, p)

    def balanced(self, found: Routed, x: Tensor) -> Tensor | float:
        values = (found.weights, found.experts, found.logits, found.probabilities)
        halves = zip(*(value.chunk(2) for value in values), strict=True)
        losses = [switch_loss(Routed(*(v.flatten(0, 1) for v in half)), EXPERTS) for half in halves]
        return self.topk.weight * sum(losses) / 2


@pytest.mark.parametrize(("ep", "tp"), [(1, 2), (2, 2)])
def test_where_all_experts_are_alike_the_loss_is_the_switch_loss_of_each_data_rank(ep: int, tp: int) -> None:
    layers = LAYERS.format(gate="2, weight = 0.7", balance="", beside="")
    compare(Flat, layers, ranks=on(TWO, ep, tp))
