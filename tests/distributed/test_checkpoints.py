"""A checkpoint of any plan loads under any other plan of the same model, bit for bit, and training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.combinations import some
from support.ranks.checkpoints import (
    STEPS,
    Options,
    assembled,
    optimizer_of,
    part_of_rank,
    plan_of,
    train,
    values_of,
)
from support.ranks.gloo_pool import GlooPool
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

import moec

SECONDS = 150.0
"""How long a job may take on a busy machine."""
ONE: Options = {"ranks": 1, "ep": 1}
PLANS: dict[str, Options] = {
    "one rank": ONE,
    "dp 2": {"ranks": 2, "ep": 1},
    "tp 2": {"ranks": 2, "ep": 1, "tp": 2},
    "ep 2": {"ranks": 2, "ep": 2},
    "dp 4": {"ranks": 4, "ep": 1},
    "tp 2, ep 2": {"ranks": 4, "ep": 2, "tp": 2},
    "ep 4": {"ranks": 4, "ep": 4},
    "ep per layer": {"ranks": 4, "mixtures": ((8, 2), (8, 4))},
    "zero 1": {"ranks": 4, "ep": 2, "zero": 1, "recompute": "experts"},
    "zero 2": {"ranks": 2, "ep": 1, "zero": 2, "microbatches": 2},
    "zero 3": {"ranks": 4, "ep": 1, "tp": 2, "zero": 3, "microbatches": 2, "recompute": "layer"},
    "slices": {"ranks": 4, "ep": 1, "etp": 2, "cp": 2, "zero": 2},
}
SAVED = [
    ("tp 2, ep 2", ["tp 2, ep 2", "zero 3"]),
    ("one rank", ["ep per layer"]),
    ("ep per layer", ["dp 2"]),
    ("zero 3", ["slices"]),
    ("slices", ["one rank"]),
]
"""`make test-all` loads every plan's checkpoint under every plan."""


def lies_as(state: DTensor, parameter: DTensor) -> bool:
    """Whether a state lies as its parameter; dims of size 1, of Adafactor's factors, are whole."""
    placements = [Replicate() if p.is_shard() and state.shape[p.dim] == 1 else p for p in parameter.placements]
    return state.placements == tuple(placements)


def save(options: Options, kind: str, path: Path) -> dict[str, Any]:
    """Trains, saves, trains on. The values at the save, and the losses after it."""
    with moec.launch(plan_of(options, kind), device="cpu") as job:
        model = job.build(seed=1)
        optimizer = optimizer_of(job, model, kind)
        train(job, model, optimizer, 0)
        values = values_of(model, optimizer)
        job.save(path, model, optimizer)
        losses = train(job, model, optimizer, STEPS)  # while a thread writes
    return {"values": values, "losses": losses}


def load(plans: Sequence[Options], kind: str, path: Path) -> list[dict[str, Any]]:
    """Under each plan: the values after loading, the losses of training on, and whether parameters are the same."""
    found = []
    for options in plans:
        with moec.launch(plan_of(options, kind), device="cpu", check_replicas=1) as job:
            model = job.build(seed=2)
            optimizer = optimizer_of(job, model, kind)
            before = {name: id(p) for name, p in model.named_parameters()}
            job.load(path, model, optimizer)
            values = values_of(model, optimizer)
            lie = [
                isinstance(value, DTensor) and lies_as(value, p)
                for p in model.parameters()
                for value in optimizer.state[p].values()
                if isinstance(p, DTensor) and isinstance(value, Tensor) and value.dim()
            ]
            losses = train(job, model, optimizer, STEPS)
            same = before == {name: id(p) for name, p in model.named_parameters()} and all(lie)
            found.append({"values": values, "losses": losses, "same": same, "steps": job.steps})
    return found


def load_all(gloo: GlooPool, kind: str, path: Path, names: list[str]) -> dict[str, list[dict[str, Any]]]:
    """What every rank of every plan has after loading, by the plan's name."""
    found: dict[str, list[dict[str, Any]]] = {}
    for ranks in sorted({int(PLANS[name]["ranks"]) for name in names}):
        of_size = [name for name in names if PLANS[name]["ranks"] == ranks]
        plans = [PLANS[name] for name in of_size]
        results = gloo.run(ranks, load, plans, kind, path, timeout=SECONDS)
        found |= {name: [result[i] for result in results] for i, name in enumerate(of_size)}
    return found


def check(gloo: GlooPool, kind: str, saved_under: str, names: list[str], folder: Path) -> None:
    path = folder / "100"
    options = PLANS[saved_under]
    saved = gloo.run(options["ranks"], save, options, kind, path, timeout=SECONDS)
    wholes = assembled(plan_of(options), [result["values"] for result in saved])
    assert any("|" in name and value.dim() for name, value in wholes.items())
    assert any(name.endswith("gate.bias") and value.abs().max() > 0 for name, value in wholes.items())
    for name, results in load_all(gloo, kind, path, names).items():
        plan = plan_of(PLANS[name])
        for rank, result in enumerate(results):
            assert result["same"], f"{name}: parameters were replaced, or states lie otherwise"
            assert result["steps"] == 2 * STEPS
            assert result["values"].keys() == wholes.keys()
            for tensor, whole in wholes.items():
                wanted = part_of_rank(plan, tensor, whole, rank)
                assert torch.equal(result["values"][tensor], wanted), f"{name}, rank {rank}: {tensor}"
            if name == saved_under:
                assert result["losses"] == saved[rank]["losses"]
            assert result["losses"] == pytest.approx(saved[0]["losses"], rel=1e-4)


@pytest.mark.parametrize(("saved_under", "loaded_under"), SAVED)
def test_a_checkpoint_loads_under_other_plans_bit_for_bit(
    gloo: GlooPool, saved_under: str, loaded_under: list[str], tmp_path: Path
) -> None:
    """Parameters with every expert (tt#1918, mo#1631, ds#6589), moments by name (tt#3356), the biases of `online`."""
    check(gloo, "adamw", saved_under, loaded_under, tmp_path)


@pytest.mark.parametrize("kind", [pytest.param("sgd", marks=pytest.mark.slow), "nadam"])
def test_other_optimizers_of_torch_load_too(gloo: GlooPool, kind: str, tmp_path: Path) -> None:
    check(gloo, kind, "ep 2", ["tp 2"], tmp_path)


@pytest.mark.parametrize(
    "kind",
    some(["muon", "adafactor", "narrow muon", "lion", "narrow lion"], ["adafactor", "narrow muon", "narrow lion"]),
)
def test_the_files_optimizers_load_under_another_zero(gloo: GlooPool, kind: str, tmp_path: Path) -> None:
    check(gloo, kind, "zero 1", ["zero 3", "one rank"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", "sgd", "nadam", "narrow adamw"])
@pytest.mark.parametrize("saved_under", list(PLANS))
def test_every_plan_loads_under_every_plan(gloo: GlooPool, saved_under: str, kind: str, tmp_path: Path) -> None:
    check(gloo, kind, saved_under, list(PLANS), tmp_path)
