"""Orders of places in a capacity against a handwritten model that fills queues choice by choice."""

from __future__ import annotations

import math

import pytest
import torch
from oracles.plain_philox import SEED, STEP, words_of
from oracles.same import batch, copy_parameters, enlarge, require_same
from oracles.specs import small_spec
from plain_moe import PlainModel, PlainMoe, choose
from torch import Tensor

from moec.runtime.host.reference import reference

ORACLE_OF = {
    "factor": "factor eval min order renormalize",
    "dynamic": "max order",
    "batch_priority": "k",
    "moe": "overflow",
}

QUEUES, EXPERTS = 7, 5
EPS = torch.finfo(torch.float32).eps
LAYERS = """
    layers {{
      attention = gqa(heads = 4, kv_heads = 2, head_dim = 6, rope = rope())
      moe {{ experts = 5 * {body}; gate = {gate}; {beside} }}
    }}
"""


def drawn(number: int, place: int, layer: int) -> int:
    """The random number of a token in a layer's queue."""
    return words_of(number, place, 1, layer, QUEUES)[0] >> 8


class QueuedMoe(PlainMoe):
    """`PlainMoe` that fills places in the order of `how`, one choice after the other."""

    how: str
    number: int
    renormalized: bool = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        logits = self.logits(x)
        weights, chosen = choose(logits, self.topk)
        weights, given = self.placed(logits.detach(), weights, chosen)
        mixed = self.mix(x.flatten(0, 1), weights, given).view_as(x)
        return self.with_dense_paths(x, mixed), self.balance(logits, chosen)

    def placed(self, logits: Tensor, weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        kept = torch.zeros_like(chosen)
        for tokens, places in self.groups(chosen):
            taken = [0] * EXPERTS
            for s, t, j in self.queue(tokens, logits, weights):
                expert = int(chosen[s, t, j])
                kept[s, t, j] = taken[expert] < places
                taken[expert] += 1
        weights = weights * kept
        if self.renormalized:
            weights = self.topk.scale * weights / weights.sum(-1, keepdim=True).clamp_min(EPS)
        return weights, chosen

    def queue(self, tokens: list[tuple[int, int]], logits: Tensor, weights: Tensor) -> list[tuple[int, int, int]]:
        """The choices of a group, (sequence, place, j), in the order in which they take places."""
        k = weights.shape[2]
        if self.how in ("token", "weight"):
            choices = [(s, t, j) for s, t in tokens for j in range(k)]
            return choices if self.how == "token" else sorted(choices, key=lambda at: -float(weights.detach()[at]))
        return [(s, t, j) for j in range(k) for s, t in sorted(tokens, key=lambda at: self.rank(logits, *at))]

    def groups(self, chosen: Tensor) -> list[tuple[list[tuple[int, int]], int]]:
        """The tokens of each group, (sequence, place), and the places of each expert."""
        batch, length, k = chosen.shape
        groups = [[s] for s in range(batch)] if self.group == "sequence" else [list(range(batch))]
        factor, least = self.places()
        assert factor is not None
        return [
            (
                [(s, t) for s in of_group for t in range(length)],
                max(least, math.ceil(factor * k * len(of_group) * length / EXPERTS)),
            )
            for of_group in groups
        ]

    def rank(self, logits: Tensor, s: int, t: int) -> float:
        """What tokens of a group are sorted by, the first the smallest; the sort is stable."""
        if self.how == "priority":
            scores = logits[s, t].sigmoid() if self.topk.score == "sigmoid" else logits[s, t].exp()
            return -float((scores / scores.sum()).max())
        return -drawn(s, t, self.number) if self.how == "random" and self.training else 0.0


class RenormalizedMoe(QueuedMoe):
    """`QueuedMoe` that divides a token's weights by the sum of those with a place (DeepSpeed, `topkgating`)."""

    renormalized = True


def compare(gate: str, beside: str, body: str, how: str, kind: type[QueuedMoe] = QueuedMoe) -> None:
    """The reference and the handwritten model, of the same parameters, in training and in evaluation."""
    text = LAYERS.format(gate=gate, body=body, beside=beside)
    spec = small_spec(text)
    ours = reference(spec, dtype=torch.float64)
    plain = PlainModel(small_spec(text.replace("batch_priority", "topk")), torch.float64)
    enlarge(ours)
    copy_parameters(ours, plain)
    for number, layer in enumerate(plain.layers):
        layer.moe.__class__, layer.moe.how, layer.moe.number = kind, how, number
    ours.set(seed=SEED, step=STEP)
    require_same(ours, plain, *batch(), evaluated=True)


CAPACITIES = [
    ("topk(2)", "capacity = factor(0.6, order = {})", "swiglu(20)"),
    ("topk(2, normalize = true)", "capacity = factor(0.5, eval = 0.8, order = {}); group = batch", "gelu(12)"),
    ("topk(3, score = sigmoid, order = after)", "capacity = dynamic(max = 0.5, order = {})", "swiglu(8)"),
    ("switch", "capacity = factor(0.4, min = 3, order = {}); balance = [switch_loss(0.1)]", "swiglu(8)"),
]


@pytest.mark.parametrize("order", ["random", "priority", "weight", "token"])
@pytest.mark.parametrize(("gate", "beside", "body"), CAPACITIES)
def test_places_are_taken_in_the_order_that_the_capacity_says(gate: str, beside: str, body: str, order: str) -> None:
    compare(gate, beside.format(order), body, order)


RENORMALIZED = [
    ("topk(2)", "capacity = factor(0.6, renormalize = true)", "sequence"),
    ("topk(3)", "capacity = factor(0.5, renormalize = true, order = weight); group = batch", "weight"),
    ("topk(3)", "capacity = factor(0.5, eval = 0.9, renormalize = true, order = token)", "token"),
    ("topk(2, normalize = true, scale = 2.5)", "capacity = factor(0.7, renormalize = true)", "sequence"),
]


@pytest.mark.parametrize(("gate", "beside", "how"), RENORMALIZED)
def test_weights_are_divided_by_the_sum_of_those_that_find_a_place(gate: str, beside: str, how: str) -> None:
    compare(gate, beside, "swiglu(8)", how, RenormalizedMoe)


@pytest.mark.parametrize("beside", ["capacity = factor(0.6)", "capacity = dynamic(max = 0.5); group = batch"])
def test_batch_priority_is_topk_with_the_best_scores_first(beside: str) -> None:
    compare("batch_priority(2)", beside, "swiglu(8)", "priority")


class ReroutedMoe(QueuedMoe):
    """`QueuedMoe` whose choices without a place ask other experts, in rounds (Switch, appendix B)."""

    bias: Tensor | None = None

    def placed(self, logits: Tensor, weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        kept, given = torch.zeros_like(chosen), chosen.clone()
        for tokens, places in self.groups(chosen):
            room, waiting = [places] * EXPERTS, []
            for j in range(chosen.shape[2]):
                for s, t in sorted(tokens, key=lambda at: self.rank(logits, *at)):
                    if room[int(chosen[s, t, j])]:
                        room[int(chosen[s, t, j])] -= 1
                        kept[s, t, j] = 1
                    else:
                        waiting.append((s, t, j))
            tried = {(s, t): set(chosen[s, t].tolist()) for s, t in tokens}
            while waiting:
                before, asked, left = list(room), set(), []
                for s, t, j in waiting:
                    others = [e for e in range(EXPERTS) if before[e] and e not in tried[s, t]]
                    if (s, t) in asked:
                        left.append((s, t, j))
                        continue
                    asked.add((s, t))
                    if not others:
                        continue
                    best = max(others, key=lambda e, at=(s, t): float(logits[at][e]))
                    if room[best]:
                        room[best] -= 1
                        given[s, t, j], kept[s, t, j] = best, 1
                        tried[s, t].add(best)
                    else:
                        left.append((s, t, j))
                waiting = left
        return self.weigh(given) * kept, given

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        self.seen = self.logits(x)
        return super().forward(x)

    def weigh(self, given: Tensor) -> Tensor:
        """The gate's rule for the experts that choices got; a dropped choice counts as its first one."""
        score = torch.sigmoid if self.topk.score == "sigmoid" else lambda values: values.softmax(-1)
        if self.topk.order == "after":
            weights = score(self.seen.gather(-1, given))
        else:
            weights = score(self.seen).gather(-1, given)
        return weights / weights.sum(-1, keepdim=True) if self.topk.normalize else weights


REROUTED = [
    ("topk(2)", "capacity = factor(0.7)", "sequence"),
    ("topk(2, normalize = true)", "capacity = factor(0.9, eval = 0.4, order = priority); group = batch", "priority"),
    ("topk(3, score = sigmoid, normalize = true)", "capacity = dynamic(max = 0.8, order = random)", "random"),
    ("topk(2, score = sigmoid, order = after)", "capacity = factor(1.0)", "sequence"),
    ("topk(3, order = after)", "capacity = factor(0.6); group = batch", "sequence"),
    ("switch", "capacity = factor(1.0); balance = [switch_loss(0.1), z_loss(0.1)]", "sequence"),
    ("batch_priority(2)", "capacity = factor(1.0)", "priority"),
]


@pytest.mark.parametrize(("gate", "beside", "how"), REROUTED)
def test_choices_of_full_experts_go_to_the_next_best_with_room(gate: str, beside: str, how: str) -> None:
    compare(gate, f"{beside}; overflow = reroute", "swiglu(8)", how, ReroutedMoe)


def test_places_of_pad_hold_what_drop_keeps() -> None:
    compare("topk(2)", "capacity = factor(0.6); overflow = pad", "swiglu(8)", "sequence")
