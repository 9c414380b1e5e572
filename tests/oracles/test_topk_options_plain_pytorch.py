"""Options of `topk` against a handwritten model: logits, loss and every gradient."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from oracles.optioned_moe import OptionedMoe, pair, require_equal
from oracles.plain_philox import SEED, STEP, words_of
from oracles.specs import small_spec
from plain_moe import PlainMoe
from support.combinations import diagonals

from moec.grammar.spec import TopK
from moec.passes.ir.ops import Route
from moec.passes.lower.lower_model import lower
from moec.runtime import ops

ORACLE_OF = {
    "topk": "scale groups keep_groups group_score bias noise",
    "attention_router": "k",
    "dense": "",
    "load_loss": "of",
}

LAYERS = """
    layers {{
      attention = gqa(heads = 4, kv_heads = 2, head_dim = 6, rope = rope())
      moe {{ experts = {experts} * swiglu(20); gate = {gate}; balance = [switch_loss(0.3), z_loss(0.05)] }}
    }}
"""
MODES = list(itertools.product(("softmax", "sigmoid"), ("before", "after"), ("false", "true")))
every_mode = pytest.mark.parametrize(("score", "order", "normalize"), MODES)


@every_mode
def test_scaled_weights_are_those_of_the_handwritten_model(score: str, order: str, normalize: str) -> None:
    gate = f"topk(2, score = {score}, order = {order}, normalize = {normalize}, scale = 2.5)"
    require_equal(*pair(small_spec(LAYERS.format(experts=5, gate=gate)), OptionedMoe))


@pytest.mark.parametrize(("mode", "group_score"), diagonals(MODES, ["top2_sum", "max"]))
def test_groups_are_those_of_the_handwritten_model(mode: tuple[str, str, str], group_score: str) -> None:
    score, order, normalize = mode
    gate = f"""topk(3, score = {score}, order = {order}, normalize = {normalize}, groups = 4, keep_groups = 2,
                    group_score = {group_score})"""
    require_equal(*pair(small_spec(LAYERS.format(experts=12, gate=gate)), OptionedMoe))


@pytest.mark.parametrize("gate", ["topk(3, groups = 4)", "topk(3, groups = 4, keep_groups = 4)"])
def test_all_groups_kept_are_no_groups(gate: str) -> None:
    spec = small_spec(LAYERS.format(experts=12, gate=gate))
    require_equal(*pair(spec, OptionedMoe))
    assert {op.groups for block in lower(spec).blocks for op in block.ops if isinstance(op, Route)} == {1}


@every_mode
def test_a_learned_bias_is_part_of_the_logits(score: str, order: str, normalize: str) -> None:
    gate = f"topk(2, score = {score}, order = {order}, normalize = {normalize}, bias = learned)"
    ours, plain = pair(small_spec(LAYERS.format(experts=5, gate=gate)), OptionedMoe)
    require_equal(ours, plain)
    gradients = [parameter.grad for name, parameter in ours.named_parameters() if name.endswith("moe.gate.bias")]
    assert len(gradients) == 2
    assert all(gradient is not None and gradient.abs().max() > 1e-3 for gradient in gradients)


def test_the_router_of_gpt_oss_has_a_bias_and_its_weights_are_normalised_once() -> None:
    """tt#2319: the bias was left out, and a softmax of the chosen was divided by its sum again."""
    ours, plain = pair(small_spec(LAYERS.format(experts=5, gate="topk(2, order = after, bias = learned)")), OptionedMoe)
    require_equal(ours, plain)
    logits = torch.tensor([[[0.0, 3.0, 1.0, 2.0]]])
    weights = ops.route(logits, None, 2, "softmax", "after", False)[1]
    torch.testing.assert_close(weights, torch.tensor([[[3.0, 2.0]]]).softmax(-1))


class DenseMoe(PlainMoe):
    """Every token goes through every expert (Jacobs et al. 1991, eq. 1)."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = x @ self.gate.weight.T
        p = logits.softmax(-1)
        mixed = sum(p[..., [i]] * expert(x) for i, expert in enumerate(self.experts))
        # Every expert gets 1 / E of the choices, so the switch loss is E · Σ P / E = 1.
        return mixed, 0.3 * p.mean((0, 1)).sum() + 0.05 * logits.logsumexp(-1).square().mean()


@pytest.mark.parametrize("experts", [1, 5])
def test_dense_is_the_sum_of_all_experts(experts: int) -> None:
    require_equal(*pair(small_spec(LAYERS.format(experts=experts, gate="dense")), DenseMoe))


class AttendingMoe(PlainMoe):
    """The attention router of Yuan 2.0-M32, expert by expert."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ self.gate.weight.T).split(self.num_experts, -1)
        attended = []
        for i in range(self.num_experts):
            e = (q[..., [i]] * k).exp()
            attended.append((e * v).sum(-1) / e.sum(-1))
        return torch.stack(attended, -1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        logits = self.logits(x)
        best, chosen = logits.topk(self.topk.k)
        mixed = self.mix(x.flatten(0, 1), best.softmax(-1), chosen).view_as(x)
        self.topk = TopK(k=self.topk.k)  # the balance terms are over the softmax of all logits
        return mixed, self.balance(logits, chosen)


@pytest.mark.parametrize(("experts", "k"), [(5, 2), (1, 1), (7, 3)])
def test_the_attention_router_is_attention_between_experts(experts: int, k: int) -> None:
    spec = small_spec(LAYERS.format(experts=experts, gate=f"attention_router({k})"))
    ours, plain = pair(spec, AttendingMoe)
    for layer in plain.layers:
        layer.moe.gate = torch.nn.Linear(24, 3 * experts, bias=False, dtype=torch.float64)
    require_equal(ours, plain)


# ---- noise -----------------------------------------------------------------------------------------------

STD = 0.8


def noise(batch: int, sequence: int, experts: int, layer: int) -> torch.Tensor:
    """Box and Muller's numbers for each logit: `[batch, sequence, experts]`."""

    def of_token(number: int, place: int) -> list[float]:
        u = [((word >> 8) + 1) / 2**24 for word in words_of(number, place, 4 * (-(-experts // 4)), layer, 1)]
        found: list[float] = []
        for one, two in zip(u[::2], u[1::2], strict=True):
            radius = math.sqrt(-2 * math.log(one))
            found += [radius * math.cos(2 * math.pi * two), radius * math.sin(2 * math.pi * two)]
        return found[:experts]

    return torch.tensor([[of_token(n, i) for i in range(sequence)] for n in range(batch)], dtype=torch.float64)


class NoisyMoe(OptionedMoe):
    """Logits have noise in training."""

    number: int

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        clean = super().logits(x)
        return clean + STD * noise(*clean.shape, self.number) if self.training else clean


@pytest.mark.parametrize("gate", ["topk(2, noise = 0.8)", "topk(3, score = sigmoid, normalize = true, noise = 0.8)"])
@pytest.mark.parametrize("training", [True, False])
def test_noise_is_drawn_by_token_in_training_alone(training: bool, gate: str) -> None:
    ours, plain = pair(small_spec(LAYERS.format(experts=6, gate=gate)), NoisyMoe)
    for number, layer in enumerate(plain.layers):
        layer.moe.number = number
    ours.set(seed=SEED, step=STEP)
    require_equal(ours.train(training), plain.train(training))


class TutelsMoe(NoisyMoe):
    """Balanced by the mean of an importance and a load term: Tutel ac0e51b9, `losses.py`, `load_importance_loss`."""

    def balance(self, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        flat, ids = logits.flatten(0, 1), chosen.flatten(0, 1)
        scores = (logits - STD * noise(*logits.shape, self.number)).softmax(-1).flatten(0, 1)
        normal = torch.distributions.Normal(0.0, STD)
        loads = normal.cdf(scores - flat.gather(1, ids)[:, -1:]).sum(0)
        terms = [sums.var() / sums.mean() ** 2 for sums in (scores.sum(0), loads)]
        return WEIGHT * (terms[0] + terms[1]) / 2


WEIGHT = 0.7


def test_importance_and_load_by_probabilities_are_tutels() -> None:
    half = WEIGHT / 2 * 6 / 5
    terms = f"balance = [importance_loss({half}, of = all), load_loss({half}, of = probabilities)]; group = batch"
    layers = LAYERS.format(experts=6, gate="topk(2, normalize = true, noise = 0.8)")
    plain_terms = "balance = [switch_loss(0.3), z_loss(0.05)]"
    assert plain_terms in layers
    ours, plain = pair(small_spec(layers.replace(plain_terms, terms)), TutelsMoe)
    for number, layer in enumerate(plain.layers):
        layer.moe.number = number
    ours.set(seed=SEED, step=STEP)
    require_equal(ours, plain)
