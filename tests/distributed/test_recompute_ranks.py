"""gloo processes with micro-batches and recomputation train as the unsharded model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.combinations import some
from support.plans import moe_plan, moe_spec
from support.ranks.gloo_pool import GlooPool
from support.ranks.training import STEPS, batches, own_part, require_same_training, train_as_rank, unsharded
from torch import Tensor

import moec
from moec.runtime.host.reference import reference

BASE = {"batch": 8, "optimizer": "adamw(lr = 3e-3)"}
PARTS = 2
RANGES = "layers 1 { recompute = experts } layers 2 { recompute = layer }"
CASES: dict[str, tuple[int, dict[str, int], dict[str, Any], str]] = {
    "layer, tp 2, ep 4": (4, {"tp": 2, "ep": 4}, {}, "layer"),
    "experts, dp 4, ep 2": (4, {"ep": 2}, {"beside": "capacity = factor(0.75)"}, "experts"),
    "per range, jitter, capacity, shared": (
        2, {"ep": 2},
        {"gate": "topk(2, jitter = 0.2)", "beside": "capacity = dynamic(max = 1.1); shared = swiglu(8)"}, RANGES,
    ),
    "per range, jitter": (2, {"ep": 2}, {"gate": "topk(2, jitter = 0.2)"}, RANGES),
    "layer, tp 2, ep 2, tokens whole": (4, {"tp": 2, "ep": 2, "sequence_parallel": False}, {}, "layer"),
    "layer, ep 4, dynamic": (4, {"ep": 4}, {"beside": "capacity = dynamic(max = 1.1); shared = swiglu(8)"}, "layer"),
    "experts, tp 2, ep 4, padding": (4, {"tp": 2, "ep": 4}, {"model": "embedding = tokens(padding = 3)"}, "experts"),
}  # fmt: skip
FAST = ("per range, jitter, capacity, shared",)


@pytest.mark.parametrize("name", some(list(CASES), FAST))
def test_recomputation_in_micro_batches_gives_the_unsharded_loss_curve(gloo: GlooPool, name: str) -> None:
    ranks, degrees, model, recompute = CASES[name]
    options = {**BASE, **model, **degrees, "ranks": ranks, "microbatches": PARTS, "recompute": recompute}
    plan = moe_plan(**options)
    require_same_training(gloo.run(ranks, train_as_rank, plan, STEPS), unsharded(**BASE, **model), plan)


# ---- groups of one micro-batch, and states -----------------------------------------------------------------

BIASED = {
    **BASE,
    "gate": "topk(2, score = sigmoid, normalize = true, bias = online(0.002))",
    "beside": "capacity = factor(0.75); group = batch",
}
BIASES = [f"layers.{layer}.moe.gate.bias" for layer in (1, 2)]


def one_run(options: dict[str, Any]) -> dict[str, Any]:
    """Losses, biases and loads of three steps as this process's rank of a plan."""
    found: dict[str, Any] = {"losses": [], "biases": [], "loads": []}
    with moec.launch(moe_plan(**options), device="cpu", check_replicas=1) as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        for tokens, labels in batches(32, 8, 8, 3):
            mine = own_part(job, tokens, labels)
            found["losses"].append(job.step(model, *mine).item())
            found["biases"].append([model.get_buffer(name).clone() for name in BIASES])
            found["loads"].append(job.expert_loads(model))  # of the last micro-batch
            optimizer.step()
            optimizer.zero_grad()
    return found


def by_hand(options: dict[str, Any], dp: int) -> dict[str, Any]:
    """The same by one unsharded model, with the rule of the biases. Micro-batch k has part k of every rank."""
    model, found = reference(moe_spec(**options), seed=1), {"losses": [], "biases": [], "loads": []}
    with moec.launch(moe_plan(**{**options, "ranks": 1, "ep": 1}), device="cpu") as job:
        optimizer = job.optimizer(model)
        for tokens, labels in batches(32, 8, 8, 3):
            cut: list[Tensor] = [t.view(dp, PARTS, -1, 8).transpose(0, 1).flatten(1, 2) for t in (tokens, labels)]
            loss, loads = torch.zeros(()), [torch.zeros(8, dtype=torch.int64) for _ in BIASES]
            for part in zip(*cut, strict=True):
                output = model(*part)
                cross_entropy = (output.loss - output.aux_loss) * (part[1] != -100).sum() / (labels != -100).sum()
                loss = loss + cross_entropy + output.aux_loss / PARTS
                loads = [total + model.expert_counts[layer] for layer, total in enumerate(loads, start=1)]
            loss.backward()
            with torch.no_grad():
                for name, load in zip(BIASES, loads, strict=True):
                    model.get_buffer(name).add_(0.002 * (load.double().mean() - load).sign().float())
            optimizer.step()
            optimizer.zero_grad()
            found["losses"].append(loss.item())
            found["biases"].append([model.get_buffer(name).clone() for name in BIASES])
            found["loads"].append(dict(model.expert_counts))
    return found


@pytest.mark.parametrize(
    ("degrees", "recompute"),
    [
        ({"ranks": 2, "ep": 2}, "layer"),
        pytest.param({"ranks": 4, "ep": 2, "tp": 2}, "layer", marks=pytest.mark.slow),
        pytest.param({"ranks": 4, "ep": 2, "tp": 2}, "experts", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_states_advance_once_and_a_batch_is_one_micro_batch_of_all_ranks(
    gloo: GlooPool, degrees: dict[str, int], recompute: str
) -> None:
    """Loads that recomputation counted again (tt#1593, am#3247) would move other biases."""
    options = {**BIASED, **degrees, "microbatches": PARTS, "recompute": recompute}
    results, expected = gloo.run(degrees["ranks"], one_run, options), by_hand(BIASED, dp=2)
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], abs=1e-4)
        for step in range(3):
            assert all(map(torch.equal, result["biases"][step], expected["biases"][step]))
            for layer, load in expected["loads"][step].items():
                assert torch.equal(result["loads"][step][layer], load)
