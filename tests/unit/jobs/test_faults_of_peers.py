"""Faults that other trainers of mixtures had, on one rank: a test has the name of its fault and says where it was.

Of several ranks: tests/distributed/test_faults_of_peers_on_ranks.py. Faults of one op are tested beside the op.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support.one_rank_jobs import TOKENS, take_steps
from support.plans import moe_plan
from torch import Tensor

import moec
from moec.runtime.checkpoint.convert import to_safetensors
from moec.runtime.checkpoint.format.reading import Checkpoint
from moec.runtime.errors import JobError
from moec.runtime.job.job import Job
from moec.runtime.model.module import PlanModule

TIED = "embedding = tokens(tied = true)"
ONLINE = "topk(2, score = sigmoid, normalize = true, bias = online(0.01))"


@pytest.fixture
def launched() -> Iterator[Any]:
    """`launched(**options)` gives a job and a model of one rank."""
    jobs: list[Job] = []

    def launch(seed: int = 1, **options: Any) -> tuple[Job, PlanModule]:
        jobs.append(moec.launch(moe_plan(ranks=1, ep=1, **options), device="cpu").__enter__())
        return jobs[-1], jobs[-1].build(seed=seed)

    yield launch
    for job in reversed(jobs):
        job.__exit__(None, None, None)


def copied(model: PlanModule) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def saved_tensors(path: Path) -> dict[str, Tensor]:
    """What a checkpoint's files have, by name."""
    to_safetensors(Checkpoint(path), path.with_suffix(".safetensors"))
    return load_file(path.with_suffix(".safetensors"))


# ---- masters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["job.load", "load_state_dict"])
def test_masters_are_renewed_after_a_load(launched: Any, how: str, tmp_path: Path) -> None:
    """mb#80, SkyRL#2149: the step after a load started from the weights before it."""
    rate = 1e-4
    job, model = launched(dtype="bf16", optimizer=f"adamw(lr = {rate}, weight_decay = 0)")
    optimizer = job.optimizer(model)
    other = job.build(seed=2)
    wanted = copied(other)
    job.save(tmp_path / "a", other).wait()
    take_steps(job, model, optimizer)
    if how == "job.load":
        job.load(tmp_path / "a", model)
    else:
        model.load_state_dict(wanted)
    assert torch.equal(model(TOKENS).logits, other(TOKENS).logits)
    take_steps(job, model, optimizer, 1)
    for name, parameter in model.named_parameters():
        # One step of AdamW changes an element by about its rate.
        assert (parameter - wanted[name]).abs().max() < 10 * rate, name


# ---- names --------------------------------------------------------------------------------------------------


def test_expert_names_are_not_sorted_as_text(launched: Any, tmp_path: Path) -> None:
    """tt#1918: as text expert 10 comes before expert 2, and layer 10 before layer 2."""
    job, model = launched(experts=12, depth=12)

    def number(layer: int, expert: int) -> float:
        return 100.0 * layer + expert

    weights = [f"layers.{layer}.moe.experts.up.weight" for layer in range(1, 12)]
    with torch.no_grad():
        for layer, name in enumerate(weights, start=1):
            for expert in range(12):
                model.get_parameter(name)[expert] = number(layer, expert)
    job.save(tmp_path / "a", model).wait()
    other, stored = job.build(seed=2), saved_tensors(tmp_path / "a")
    job.load(tmp_path / "a", other)
    for found in (dict(other.named_parameters()), stored):
        for layer, name in enumerate(weights, start=1):
            for expert in range(12):
                assert (found[name][expert] == number(layer, expert)).all(), f"{name}, expert {expert}"


@pytest.mark.parametrize("more", ["in the checkpoint", "in the model"])
def test_unmapped_names_are_not_dropped(launched: Any, more: str, tmp_path: Path) -> None:
    """tt#3626, xt 8e2468f: names without a counterpart were left out, and their weights stayed random."""
    beside = {"beside": "shared = swiglu(8)"}
    (job, model), (there, larger) = launched(), launched(**beside)
    source, target = (there, job) if more == "in the checkpoint" else (job, there)
    source.save(tmp_path / "a", larger if source is there else model).wait()
    receiver = target.build(seed=2)
    before = copied(receiver)
    with pytest.raises(JobError, match=r"MOE0805.*layers.1.moe.shared"):
        target.load(tmp_path / "a", receiver)
    assert all(torch.equal(tensor, before[name]) for name, tensor in receiver.state_dict().items())
    with pytest.raises(RuntimeError, match=r"layers.1.moe.shared"):
        receiver.load_state_dict((larger if source is there else model).state_dict())


# ---- heads --------------------------------------------------------------------------------------------------


def test_untied_heads_are_not_tied_again(launched: Any, tmp_path: Path) -> None:
    """am#2942: a loaded head became the embedding again, here with equal values as after an untying."""
    job, model = launched()
    head, embedding = (next(p for n, p in model.named_parameters() if word in n) for word in ("head", "embedding"))
    with torch.no_grad():
        head.copy_(embedding)
    job.save(tmp_path / "a", model).wait()
    other = job.build(seed=2)
    optimizer = job.optimizer(other)
    job.load(tmp_path / "a", other, None)
    head, embedding = (next(p for n, p in other.named_parameters() if word in n) for word in ("head", "embedding"))
    assert torch.equal(head, embedding)
    assert head.data_ptr() != embedding.data_ptr()
    take_steps(job, other, optimizer)
    assert not torch.equal(head, embedding)
    job.save(tmp_path / "b", other).wait()
    stored = saved_tensors(tmp_path / "b")
    for name, parameter in other.named_parameters():
        assert torch.equal(stored[name], parameter), name


def test_a_tied_head_is_no_empty_file(launched: Any, tmp_path: Path) -> None:
    """tt#3764: the head's own file had no tensor, and could not be loaded."""
    job, model = launched(model=TIED)
    optimizer = job.optimizer(model)
    take_steps(job, model, optimizer)
    job.save(tmp_path / "a", model, optimizer).wait()
    stored = saved_tensors(tmp_path / "a")
    assert set(stored) >= set(dict(model.named_parameters()))
    assert not any("head" in name for name in stored)
    assert all(tensor.numel() for tensor in stored.values())
    other = job.build(seed=2)
    job.load(tmp_path / "a", other, job.optimizer(other))
    assert torch.equal(other(TOKENS).logits, model(TOKENS).logits)


# ---- states -------------------------------------------------------------------------------------------------


def test_a_bias_is_updated_in_place_and_zeros_are_not_saved(launched: Any, tmp_path: Path) -> None:
    """tt#1226: each update made a new tensor; the registered one, which was saved, stayed zeros."""
    job, model = launched(gate=ONLINE)
    optimizer = job.optimizer(model)
    name = "layers.1.moe.gate.bias"
    before = model.get_buffer(name)
    take_steps(job, model, optimizer, 3)
    assert model.get_buffer(name) is before
    assert before.abs().max() > 0
    job.save(tmp_path / "a", model, optimizer).wait()
    assert torch.equal(saved_tensors(tmp_path / "a")[name], before)
    assert torch.equal(model.state_dict()[name], before)
    resumed = job.build(seed=2)
    bias = resumed.get_buffer(name)
    job.load(tmp_path / "a", resumed)
    take_steps(job, resumed, job.optimizer(resumed), 1)
    assert resumed.get_buffer(name) is bias
    assert not torch.equal(bias, before)
    job.save(tmp_path / "b", resumed).wait()
    assert torch.equal(saved_tensors(tmp_path / "b")[name], bias)


# ---- micro-batches ------------------------------------------------------------------------------------------


def test_the_loss_is_no_mean_of_the_means_of_micro_batches(launched: Any) -> None:
    """tt#2206: every micro-batch weighed as much, however many of its labels were ignored."""
    job, model = launched(balance="[]")
    labels = TOKENS.roll(-1, 1).clone()
    labels[:6, 1:] = -100
    logits = model(TOKENS).logits.detach().flatten(0, 1)
    wanted = F.cross_entropy(logits, labels.flatten(), ignore_index=-100).item()
    means = [
        F.cross_entropy(part, label, ignore_index=-100)
        for part, label in zip(logits.chunk(4), labels.flatten().chunk(4), strict=True)
    ]
    assert abs(sum(means) / 4 - wanted) > 1e-3
    for microbatches in (1, 4):
        assert job.step(model, TOKENS, labels, microbatches=microbatches).item() == pytest.approx(wanted, rel=1e-5)


def test_counts_are_not_those_of_the_last_micro_batch(launched: Any) -> None:
    """mg#7197: the loads of all micro-batches were divided by the tokens of one; am#3359: the scale was another."""
    found = []
    for microbatches in (1, 4):
        job, model = launched(gate=ONLINE, balance="[switch_loss(0.5)]")
        job.step(model, TOKENS, TOKENS, microbatches=microbatches)
        router = model.get_parameter("layers.1.moe.gate.weight")
        found.append((model.get_buffer("layers.1.moe.gate.bias").clone(), router.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
