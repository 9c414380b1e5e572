"""States for real: gloo processes have the biases that one process has, however ranks and micro-batches are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.plans import moe_plan, moe_spec
from support.ranks.gloo_pool import GlooPool
from support.ranks.training import batches, own_part
from torch import Tensor

import moec
from moec.runtime.errors import JobError
from moec.runtime.host.reference import reference

RATE, STEPS = 0.002, 4
OPTIONS = {
    "gate": f"topk(2, score = sigmoid, normalize = true, bias = online({RATE}))",
    "batch": 8,
    "optimizer": "adamw(lr = 3e-3)",
}
NAMES = ["layers.1.moe.gate.bias", "layers.2.moe.gate.bias"]
LOOPS = {"one micro-batch": 1, "micro-batches": 2, "accumulated by hand": 2, "a custom loop": 1}


def train(options: dict[str, Any], loop: str) -> dict[str, Any]:
    """The biases after every step, as this process's rank of a plan."""
    plan, found = moe_plan(**options), []
    with moec.launch(plan, device="cpu", check_replicas=1) as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        for tokens, labels in batches(32, 8, 8, STEPS):
            parts = [each.chunk(LOOPS[loop]) for each in own_part(job, tokens, labels)]
            mine = [torch.cat(part) for part in parts]
            if loop == "accumulated by hand":
                with job.accumulate(model, *parts[1]):
                    for part in zip(*parts, strict=True):
                        model(*part).loss.backward()
            elif loop == "a custom loop":
                model(*mine).loss.backward()
                job.update_states(model)
            else:
                job.step(model, *mine, microbatches=LOOPS[loop])
            optimizer.step()
            optimizer.zero_grad()
            model.eval()(mine[0])  # evaluation does not change biases
            model.train()
            found.append({name: model.get_buffer(name).clone() for name in NAMES})
        logits = job.whole_logits(model.eval()(mine[0])).detach()
    return {"states": found, "logits": logits}


def train_alone(options: dict[str, Any]) -> dict[str, Any]:
    """The same training of the unsharded model over whole batches, and the rule written out here."""
    plan, found = moe_plan(**{**options, "ranks": 1, "ep": 1, "tp": 1}), []
    with moec.launch(plan, device="cpu") as job:
        model = reference(moe_spec(**options), seed=1)
        optimizer = job.optimizer(model)
        for tokens, labels in batches(32, 8, 8, STEPS):
            model(tokens, labels).loss.backward()
            for layer, name in enumerate(NAMES, start=1):
                loads = model.expert_counts[layer].double()
                model.get_buffer(name).add_(RATE * (loads.mean() - loads).sign().float())
            optimizer.step()
            optimizer.zero_grad()
            found.append({name: model.get_buffer(name).clone() for name in NAMES})
        return {"states": found, "logits": model.eval()(tokens).logits.detach()}


@pytest.mark.parametrize(
    ("ranks", "degrees", "loop"),
    [
        (2, {"ep": 2}, "micro-batches"),
        (2, {"ep": 1}, "a custom loop"),
        (2, {"ep": 2, "tp": 2}, "accumulated by hand"),
        pytest.param(4, {"ep": 2}, "one micro-batch", marks=pytest.mark.slow),
        pytest.param(4, {"ep": 4, "tp": 2}, "micro-batches", marks=pytest.mark.slow),
    ],
)
def test_biases_are_those_of_one_process_on_every_rank(
    gloo: GlooPool, ranks: int, degrees: dict[str, int], loop: str
) -> None:
    results = gloo.run(ranks, train, {**OPTIONS, **degrees, "ranks": ranks}, loop)
    expected = train_alone(OPTIONS)
    plan = moe_plan(**{**OPTIONS, **degrees}, ranks=ranks)
    parts = expected["logits"].chunk(plan.data_size)
    for rank, result in enumerate(results):
        for step, (states, wanted) in enumerate(zip(result["states"], expected["states"], strict=True)):
            for name in NAMES:
                assert torch.equal(states[name], results[0]["states"][step][name]), f"{name}, step {step}, rank {rank}"
                torch.testing.assert_close(states[name], wanted[name], msg=lambda m, s=step: f"step {s}: {m}")
        torch.testing.assert_close(result["logits"], parts[plan.data_rank(rank)], rtol=1e-2, atol=1e-3)
    assert expected["states"][-1][NAMES[0]].abs().max() > 2 * RATE


def changed_on_rank_one(options: dict[str, Any]) -> str:
    """What a job says of a bias that one rank has changed, and of an update that one rank has no rows for."""
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model = job.build(seed=1)
        if job.rank == 1:
            model.get_buffer(NAMES[0])[3] += 1e-6
        with pytest.raises(JobError) as drifted:
            job.check_replicas(model)
        with pytest.raises(JobError) as nothing:
            job.update_states(model)
    return f"{drifted.value} {nothing.value}"


def test_a_bias_that_differs_on_one_rank_is_named_on_every_rank(gloo: GlooPool) -> None:
    for said in gloo.run(2, changed_on_rank_one, {**OPTIONS, "ranks": 2, "ep": 2}):
        assert "MOE0704" in said
        assert f"{NAMES[0]}: rank 0 and rank 1 differ" in said
        assert "MOE0713" in said


def load_elsewhere(options: dict[str, Any]) -> list[Tensor]:
    """Biases that a rank takes from an unsharded model's `state_dict`, and a wrong shape refused."""
    whole = reference(moe_spec(**options), seed=2)
    for name in NAMES:
        whole.get_buffer(name).copy_(torch.arange(8) / 8)
    state = whole.state_dict()
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model = job.build(seed=1)
        model.load_state_dict(state)
        state[NAMES[0]] = state[NAMES[0]][:-1]
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict(state)
        return [model.get_buffer(name).clone() for name in NAMES]


def test_every_rank_takes_whole_biases_from_a_model_that_is_not_sharded(gloo: GlooPool) -> None:
    for found in gloo.run(2, load_elsewhere, {**OPTIONS, "ranks": 2, "ep": 2}):
        assert all(torch.equal(bias, torch.arange(8) / 8) for bias in found)


def not_finite_on_rank_one(options: dict[str, Any]) -> str:
    """What a job says of a bias that is NaN on one rank."""
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model = job.build(seed=1)
        (tokens, labels), *_ = batches(32, 8, 8, 1)
        mine = [each.chunk(job.data_size)[job.data_rank] for each in (tokens, labels)]
        job.step(model, *mine)
        if job.rank == 1:
            model.get_buffer(NAMES[0])[3] = torch.nan
        with pytest.raises(JobError) as refused:
            job.step(model, *mine)
    return str(refused.value)


def test_a_bias_that_is_nan_on_one_rank_is_refused_on_all(gloo: GlooPool) -> None:
    said = gloo.run(2, not_finite_on_rank_one, {**OPTIONS, "ranks": 2, "ep": 2})
    assert all("MOE0708" in each and f"rank 1, step 2: the state {NAMES[0]}" in each for each in said)
