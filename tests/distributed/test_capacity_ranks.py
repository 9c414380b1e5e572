"""Capacities, padding and loads on gloo ranks: choices are dropped and counted as in the unsharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.combinations import some
from support.plans import moe_plan
from support.ranks.gloo_pool import GlooPool
from support.ranks.training import (
    STEPS,
    batches,
    batches_of,
    gradients_of,
    own_part,
    parts_of_rank,
    require_same_training,
    require_the_unsharded_training,
    train_as_rank,
    train_unsharded,
)
from torch import Tensor

import moec
from moec.codegen.plan import Plan
from moec.runtime.errors import JobError

PADDED = "embedding = tokens(padding = 3)"


@pytest.mark.parametrize(
    ("ranks", "degrees", "capacity", "sizes"),
    [
        (2, {"ep": 2}, "dropless", [8, 0]),
        pytest.param(4, {"ep": 4}, "dropless", [2, 0, 5, 1], marks=pytest.mark.slow),
        pytest.param(4, {"ep": 2, "tp": 2}, "dropless", None, marks=pytest.mark.slow),
        (2, {"ep": 2, "tp": 2}, "factor(0.75); group = batch", None),
        pytest.param(4, {"ep": 4}, "dynamic()", None, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_model_with_padding_trains_as_unsharded_and_its_loads_leave_padding_out(
    gloo: GlooPool, ranks: int, degrees: dict[str, int], capacity: str, sizes: list[int] | None
):
    model = {"beside": f"capacity = {capacity}", "model": PADDED}
    results = require_the_unsharded_training(gloo, model, {**degrees, "ranks": ranks}, sizes)
    real = [int((tokens != 3).sum()) for tokens, _ in batches(32, 8, 8, STEPS)]
    assert min(real) < 64, "there is no padding, so it proves nothing"
    for number, loads in zip(real, results[0]["loads"], strict=True):
        for counts in loads.values():
            assert sum(counts) <= 2 * number if "factor" in capacity else sum(counts) == 2 * number


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (2, [3, 5]),
        pytest.param(4, None, marks=pytest.mark.slow),
        pytest.param(4, [2, 2, 3, 1], marks=pytest.mark.slow),
    ],
)
def test_a_dynamic_capacity_drops_nothing_whatever_each_rank_has(
    gloo: GlooPool, ranks: int, sizes: list[int] | None
) -> None:
    model = {"beside": "capacity = dynamic()"}
    results = require_the_unsharded_training(gloo, model, {"ranks": ranks, "ep": 2}, sizes)
    assert all(rate == 0 for step in results[0]["drops"] for rate in step.values())


CAPACITIES = (
    "factor(1.0); group = sequence",
    "factor(0.75, min = 2); group = batch",
    "dynamic(max = 0.8); group = sequence",
    "dynamic(max = 1.1); group = batch",
)


def of_capacities(ranks: int, **degrees: int) -> Plan:
    """A plan of a model whose layers have all of `CAPACITIES`."""
    layers = "".join(
        f"layers {number} {{ moe {{ experts = 8 * swiglu(16); gate = topk(2); capacity = {capacity} }} }}\n"
        for number, capacity in enumerate(CAPACITIES, start=1)
    )
    return moec.compile(f"""\
model "m" {{
  vocab = 32; dim = 16; depth = {len(CAPACITIES) + 1}; dtype = fp32
  layers {{ attention = gqa(heads = 4, kv_heads = 2); ffn = gelu(32) }}
{layers}}}
cluster "c" {{ device = cpu; level "node" {{ size = {ranks} }} }}
train {{ batch = 8; sequence = 8; optimizer = adamw(lr = 3e-3) }}
parallel {{ {"; ".join(f"{name} = {degree}" for name, degree in degrees.items())} }}
""")


@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [
        (2, {"ep": 2}),
        (4, {"ep": 2, "tp": 2}),
        pytest.param(4, {"ep": 4}, marks=pytest.mark.slow),
        pytest.param(4, {"ep": 4, "tp": 2}, marks=pytest.mark.slow),
        pytest.param(8, {"ep": 4, "tp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_capacity_drops_the_same_choices_however_it_is_sharded(gloo: GlooPool, ranks: int, degrees: dict[str, int]):
    plan, whole = of_capacities(ranks, **degrees), of_capacities(1)
    results = gloo.run(ranks, train_as_rank, plan, STEPS)
    require_same_training(results, train_unsharded(plan.spec, STEPS), plan)
    (alone,) = gloo.run(1, train_as_rank, whole, STEPS)
    assert all(result["drops"] == alone["drops"] for result in results)
    for layer in range(1, 1 + len(CAPACITIES)):
        rates = [step[layer] for step in alone["drops"]]
        assert any(0 < rate < 0.9 for rate in rates), f"layer {layer} drops nothing, so it proves nothing"


def accumulate(plan: Plan, micro_batches: int) -> dict[str, Any]:
    """A batch in micro-batches without clearing between: means of losses and drop rates, and of the gradients.

    Of every sequence one label is ignored, so that each micro-batch weighs as much.
    """
    ((tokens, _),) = batches_of(plan.spec, 1)
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    losses, drops = [], []
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        for each in zip(tokens.chunk(micro_batches), labels.chunk(micro_batches), strict=True):
            losses.append(job.step(model, *own_part(job, *each)).item())
            drops.append(job.drop_rates(model))
    gradients = {name: gradient / micro_batches for name, gradient in gradients_of(model).items()}
    rates = {layer: sum(step[layer] for step in drops) / micro_batches for layer in drops[0]}
    return {"loss": sum(losses) / micro_batches, "drops": rates, "gradients": gradients}


CUT = [(1, 1, 2), (2, 2, 1), (2, 1, 2), (4, 4, 1), (4, 2, 2)]


@pytest.mark.parametrize("cut", some(CUT, [(2, 1, 2)]))
def test_sequences_drop_the_same_choices_on_any_ranks_and_in_micro_batches(gloo: GlooPool, cut: tuple[int, int, int]):
    ranks, ep, micro_batches = cut
    options: dict[str, Any] = {"batch": 8, "beside": "capacity = factor(1.0); group = sequence"}
    (alone,) = gloo.run(1, accumulate, moe_plan(**options, ranks=1, ep=1), 1)
    assert any(rate > 0.05 for rate in alone["drops"].values()), "nothing is dropped, so it proves nothing"
    plan = moe_plan(**options, ranks=ranks, ep=ep)
    for rank, found in enumerate(gloo.run(ranks, accumulate, plan, micro_batches)):
        assert found["drops"] == pytest.approx(alone["drops"], abs=1e-12)
        assert found["loss"] == pytest.approx(alone["loss"], abs=1e-5)
        for name, gradient in parts_of_rank(plan, alone["gradients"], rank).items():
            torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-4, atol=1e-6)


def test_a_rank_drops_other_choices_where_there_are_more(gloo: GlooPool):
    options: dict[str, Any] = {"batch": 8, "ep": 1, "beside": "capacity = factor(1.0); group = rank"}
    alone, spread = (gloo.run(ranks, accumulate, moe_plan(**options, ranks=ranks), 1)[0] for ranks in (1, 2))
    assert alone["drops"] != pytest.approx(spread["drops"], abs=1e-3)


def evaluated_as_rank(plan: Plan) -> list[Tensor]:
    """The logits of a rank's part of one batch, in training and in evaluation."""
    with moec.launch(plan, device="cpu") as job, torch.no_grad():
        model = job.build(seed=1)
        tokens, _ = batches_of(plan.spec, 1)[0]
        mine = tokens.chunk(job.data_size)[job.data_rank]
        return [job.whole_logits(model.train(mode)(mine)) for mode in (True, False)]


@pytest.mark.parametrize(
    ("ranks", "degrees"), [(2, {"ep": 2}), pytest.param(4, {"ep": 4, "tp": 2}, marks=pytest.mark.slow)], ids=str
)
def test_evaluation_has_its_own_capacity_on_every_rank(gloo: GlooPool, ranks: int, degrees: dict[str, int]):
    options: dict[str, Any] = {"batch": 8, "beside": "capacity = factor(0.5, eval = 1.5); group = batch"}
    plan = moe_plan(**options, ranks=ranks, **degrees)
    sharded = gloo.run(ranks, evaluated_as_rank, plan)
    (alone,) = gloo.run(1, evaluated_as_rank, moe_plan(**options, ranks=1, ep=1))
    for logits, whole in zip(zip(*sharded, strict=True), alone, strict=True):
        for rank, part in enumerate(logits):
            torch.testing.assert_close(part, whole.chunk(2)[plan.data_rank(rank)], rtol=1e-4, atol=1e-5)
    assert (alone[0] - alone[1]).abs().max() > 1e-3


def test_unequal_batches_with_a_capacity_are_refused_on_every_rank(gloo: GlooPool):
    plan = moe_plan(batch=8, beside="capacity = factor(1.0)", ranks=2, ep=2)
    with pytest.raises(JobError, match=r"MOE0702.*shapes from \[2, 8\] to \[6, 8\]"):
        gloo.run(2, train_as_rank, plan, STEPS, [2, 6])
