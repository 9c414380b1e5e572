"""Orders of places in a capacity against a handwritten model that fills queues choice by choice."""

from __future__ import annotations

import math

import pytest
import torch
from oracles.plain_philox import SEED, STEP, words_of
from oracles.specs import VOCAB, small_spec
from plain_moe import PlainModel, PlainMoe, choose
from plain_weights import plain_state_dict
from torch import Tensor

from moec.runtime.job.module import PlanModule
from moec.runtime.job.reference import reference

ORACLE_OF = {
    "factor": "factor eval min order",
    "dynamic": "max order",
    "batch_priority": "k",
    "moe": "overflow",
}

QUEUES, EXPERTS = 7, 5
LAYERS = """
    layers {{
      attention = gqa(heads = 4, kv_heads = 2, head_dim = 6, rope = rope())
      moe {{ experts = 5 * {body}; gate = {gate}; {beside} }}
    }}
"""
TIGHT = {"rtol": 1e-10, "atol": 1e-10}


def drawn(number: int, place: int, layer: int) -> int:
    """The random number of a token in a layer's queue."""
    return words_of(number, place, 1, layer, QUEUES)[0] >> 8


class QueuedMoe(PlainMoe):
    """`PlainMoe` that fills places in the order of `how`, one choice after the other."""

    how: str
    number: int

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
            for j in range(chosen.shape[2]):
                for s, t in sorted(tokens, key=lambda at: self.rank(logits, *at)):
                    expert = int(chosen[s, t, j])
                    kept[s, t, j] = taken[expert] < places
                    taken[expert] += 1
        return weights * kept, chosen

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


def both(
    gate: str, beside: str, body: str, how: str, kind: type[QueuedMoe] = QueuedMoe
) -> tuple[PlanModule, PlainModel]:
    """moec's reference and the handwritten model, with the same weights."""
    text = LAYERS.format(gate=gate, body=body, beside=beside)
    spec = small_spec(text)
    ours = reference(spec, dtype=torch.float64)
    plain = PlainModel(small_spec(text.replace("batch_priority", "topk")), torch.float64)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    plain.load_state_dict(plain_state_dict(dict(ours.named_parameters())))
    for number, layer in enumerate(plain.layers):
        layer.moe.__class__, layer.moe.how, layer.moe.number = kind, how, number
    ours.set(seed=SEED, step=STEP)
    return ours, plain


def assert_same(ours: PlanModule, plain: PlainModel) -> None:
    """The same logits, loss and gradients in training, and the same logits in evaluation."""
    generator = torch.Generator().manual_seed(2)
    tokens, labels = (torch.randint(VOCAB, (3, 13), generator=generator) for _ in range(2))
    output, (logits, loss) = ours(tokens, labels), plain(tokens, labels)
    torch.testing.assert_close(output.logits, logits, **TIGHT)
    torch.testing.assert_close(output.loss, loss, **TIGHT)
    output.loss.backward()
    loss.backward()
    found = plain_state_dict({name: parameter.grad for name, parameter in ours.named_parameters()})
    for name, parameter in plain.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[name], expected, **TIGHT, msg=lambda text, name=name: f"{name}: {text}")
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(tokens).logits, plain.eval()(tokens)[0], **TIGHT)


CAPACITIES = [
    ("topk(2)", "capacity = factor(0.6, order = {})", "swiglu(20)"),
    ("topk(2, normalize = true)", "capacity = factor(0.5, eval = 0.8, order = {}); group = batch", "gelu(12)"),
    ("topk(3, score = sigmoid, order = after)", "capacity = dynamic(max = 0.5, order = {})", "swiglu(8)"),
    ("switch", "capacity = factor(0.4, min = 3, order = {}); balance = [switch_loss(0.1)]", "swiglu(8)"),
]


@pytest.mark.parametrize("order", ["random", "priority"])
@pytest.mark.parametrize(("gate", "beside", "body"), CAPACITIES)
def test_places_are_taken_in_the_order_that_the_capacity_says(gate: str, beside: str, body: str, order: str) -> None:
    assert_same(*both(gate, beside.format(order), body, order))


@pytest.mark.parametrize("beside", ["capacity = factor(0.6)", "capacity = dynamic(max = 0.5); group = batch"])
def test_batch_priority_is_topk_with_the_best_scores_first(beside: str) -> None:
    assert_same(*both("batch_priority(2)", beside, "swiglu(8)", "priority"))


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
    assert_same(*both(gate, f"{beside}; overflow = reroute", "swiglu(8)", how, ReroutedMoe))


def test_places_of_pad_hold_what_drop_keeps() -> None:
    assert_same(*both("topk(2)", "capacity = factor(0.6); overflow = pad", "swiglu(8)", "sequence"))
