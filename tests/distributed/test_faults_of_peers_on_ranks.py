"""Faults that other trainers of mixtures had, on several ranks: a test has the name of its fault and says where it was.

They share four calls of the pool. Of one rank: tests/unit/jobs/test_faults_of_peers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.plans import moe_plan
from support.ranks import contract
from support.ranks.contract import MIXED, TWO, Gradients
from support.ranks.gloo_pool import GlooPool
from support.ranks.training import gradients_of
from torch import Tensor
from torch.distributed.tensor import DTensor

import moec
from moec.passes.ir import local_slices
from moec.runtime.host.reference import reference
from moec.runtime.job.job import Job
from moec.runtime.model.module import PlanModule
from moec.runtime.weights.masters import local_part

ALONE = {"ranks": 1, "ep": 1}
FRAGMENTS = {"ranks": 4, "ep": 2, "tp": 2, "zero": 1}
"""Experts lie on two ranks each, which have a part of the master each."""
HALVES = {"ranks": 2, "ep": 2, "zero": 3}
BOUND = 1e-5


# ---- checkpoints: every expert has its number -----------------------------------------------------------------


def numbered() -> dict[str, Tensor]:
    """The whole model's tensors. An element of an expert is 1,000 times the expert's number and its own place."""
    state = reference(moe_plan(**ALONE).spec, seed=1).state_dict()
    for name, tensor in state.items():
        if ".experts." in name:
            places = torch.arange(tensor[0].numel()).view(tensor[0].shape)
            experts = torch.arange(len(tensor)).view(-1, *[1] * (tensor.dim() - 1))
            state[name] = 1000.0 * experts + places
    return state


def save_numbered(options: dict[str, Any], path: Path) -> None:
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model = job.build(seed=2)
        model.load_state_dict(numbered())
        job.save(path, model)


def load_numbered(options: dict[str, Any], path: Path) -> dict[str, Any]:
    """This rank's parts after a load, the layouts of parameters before and after it, and their local shapes."""
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model = job.build(seed=2)
        before = layouts(model)
        job.load(path, model)
        parts = {name: local_part(p).clone() for name, p in model.named_parameters()}
        logits = job.whole_logits(model(torch.zeros(2, 8, dtype=torch.int64))).detach()
        return {"parts": parts, "layouts": (before, layouts(model)), "finite": bool(logits.isfinite().all())}


def layouts(model: PlanModule) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {n: (str(p.placements), p.to_local().shape) for n, p in model.named_parameters() if isinstance(p, DTensor)}


@pytest.fixture(scope="module")
def from_fragments(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Parameters on one rank, of a checkpoint that four ranks with fragments of experts saved."""
    path = tmp_path_factory.mktemp("fragments") / "a"
    gloo.run(4, save_numbered, FRAGMENTS, path)
    parts: dict[str, Tensor] = load_numbered(ALONE, path)["parts"]
    return parts


@pytest.fixture(scope="module")
def of_halves(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks with half of the experts each load, of a checkpoint that one rank saved."""
    path = tmp_path_factory.mktemp("whole") / "a"
    save_numbered(ALONE, path)
    return gloo.run(2, load_numbered, HALVES, path)


def experts_of(parts: dict[str, Tensor]) -> dict[str, list[int]]:
    """The number of every expert, by the name of a tensor of experts."""
    return {name: (t.flatten(1).amin(1) // 1000).int().tolist() for name, t in parts.items() if ".experts." in name}


def test_the_last_writer_does_not_win_where_ids_are_local(from_fragments: dict[str, Tensor]) -> None:
    """mo#1631, KempnerForge#202: ranks wrote their experts under local numbers, over each other's."""
    found = experts_of(from_fragments)
    assert len(found) == 4
    for name, numbers in found.items():
        assert numbers == list(range(8)), name


def test_fragments_of_experts_are_not_merged_like_any_tensor(from_fragments: dict[str, Tensor]) -> None:
    """ds#8198: parts of experts that several ranks had were put together as parts of dense weights."""
    wanted = numbered()
    for name, parameter in from_fragments.items():
        assert torch.equal(parameter, wanted[name]), name


def test_both_ranks_do_not_load_the_first_experts(of_halves: list[dict[str, Any]]) -> None:
    """ds#6589: each rank loaded the experts with its local numbers."""
    for rank, result in enumerate(of_halves):
        assert len(experts_of(result["parts"])) == 4
        for name, numbers in experts_of(result["parts"]).items():
            assert numbers == list(range(4 * rank, 4 * rank + 4)), f"rank {rank}: {name}"


def test_replicate_is_not_left_on_a_slice(of_halves: list[dict[str, Any]]) -> None:
    """tt#2227, tt#4230: a loaded slice said that it was a whole tensor."""
    plan, wanted = moe_plan(**HALVES), numbered()
    for rank, result in enumerate(of_halves):
        before, after = result["layouts"]
        assert before == after
        assert any("Shard" in placements for placements, _ in after.values())
        assert result["finite"]
        for name, data in plan.parameters.items():
            part = wanted[name][local_slices(data.shape, data.master, plan.meshes[data.mesh], rank)]
            assert torch.equal(result["parts"][name], part), f"rank {rank}: {name}"


# ---- gradients and their norm ---------------------------------------------------------------------------------


TIED = {"model": "embedding = tokens(tied = true)"}
TIES = {"ranks": 2, "ep": 2, "recompute": "layer", "beside": "capacity = factor(0.75)"}
"""Every router logit is equal; a capacity drops choices."""

GRADIENTS: dict[str, dict[str, Any]] = {
    "tied, tp 2": {"ranks": 2, "ep": 2, "tp": 2, **TIED},
    "tied, zero 3": {**MIXED, "zero": 3, **TIED},
    "labels, zero 0": {**MIXED, "microbatches": 2},
    "labels, zero 2": {**MIXED, "microbatches": 2, "zero": 2},
    "edp 1, zero 3": {"ranks": 2, "ep": 2, "zero": 3},
    "dp 1, zero 3": {"ranks": 2, "ep": 1, "tp": 2, "zero": 3},
}
NORMS: dict[str, dict[str, Any]] = {
    "ep 2, tp 2": {"ranks": 4, "ep": 2, "tp": 2},
    "ep 2, zero 3": {**TWO, "zero": 3},
    "ep per layer": MIXED,
}


def step(job: Job, model: PlanModule) -> Gradients:
    job.step(model, *contract.mine(job, *contract.batch()))
    return gradients_of(model)


def level(model: PlanModule) -> None:
    """Makes all router logits 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.zero_()


def with_ties(job: Job, model: PlanModule) -> Gradients:
    level(model)
    return step(job, model)


def with_ties_unsharded(model: PlanModule, tokens: Tensor, labels: Tensor) -> Tensor:
    level(model)
    return contract.plain(model, tokens, labels)


def norm_error(options: dict[str, Any]) -> float:
    """The relative error of the global norm."""
    whole = contract.whole_gradients(**options)
    wanted = sum(float(gradient.double().square().sum()) for gradient in whole.values()) ** 0.5
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model = job.build(seed=1)
        step(job, model)
        return abs(job.clip_grad_norm_(model, 1e6).item() - wanted) / wanted


def replicas_after_two_steps(options: dict[str, Any]) -> float:
    """0.0; raises unless all copies of parameters have the same bits."""
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        for _ in range(2):
            step(job, model)
            optimizer.step()
            optimizer.zero_grad()
        job.check_replicas(model)
    return 0.0


ON_TWO: dict[str, Callable[[], float]] = {
    **{name: partial(contract.off, options, step) for name, options in GRADIENTS.items()},
    **{f"norm, {name}": partial(norm_error, options) for name, options in NORMS.items() if options["ranks"] == 2},
    "ties": partial(contract.off, TIES, with_ties, with_ties_unsharded),
}
ON_FOUR: dict[str, Callable[[], float]] = {
    "norm, ep 2, tp 2": partial(norm_error, NORMS["ep 2, tp 2"]),
    "replicas": partial(replicas_after_two_steps, {"ranks": 4, "ep": 2, "tp": 2, "zero": 2}),
}
"""Each gives an error, or raises."""


Errors = Callable[[str], float]


@pytest.fixture(scope="module")
def outcomes(gloo: GlooPool) -> list[dict[str, float | str]]:
    """What every rank found."""
    two, four = (
        gloo.run(ranks, contract.outcomes, cases, initialize=False) for ranks, cases in ((2, ON_TWO), (4, ON_FOUR))
    )
    return [two[rank % 2] | each for rank, each in enumerate(four)]


@pytest.fixture
def error_of(outcomes: list[dict[str, float | str]]) -> Errors:
    """The largest error of any rank, by case; fails where a rank raised."""

    def largest(case: str) -> float:
        found = [each[case] for each in outcomes]
        assert not [each for each in found if isinstance(each, str)]
        return max(each for each in found if isinstance(each, float))

    return largest


@pytest.mark.parametrize("case", NORMS)
def test_the_norm_is_neither_averaged_nor_that_of_one_group_of_experts(error_of: Errors, case: str) -> None:
    """ds#8478, am#3816, mg#5916; am#2012: ranks with other numbers of tensors waited for each other."""
    assert error_of(f"norm, {case}") < BOUND


@pytest.mark.parametrize("case", ["tied, tp 2", "tied, zero 3"])
def test_a_tied_weights_gradient_is_not_counted_twice(error_of: Errors, case: str) -> None:
    """tt#3174: once for each of its uses."""
    assert error_of(case) < BOUND


@pytest.mark.parametrize("case", ["labels, zero 0", "labels, zero 2"])
def test_the_loss_is_no_mean_of_the_means_of_ranks_and_micro_batches(error_of: Errors, case: str) -> None:
    """tt#2206: ranks and micro-batches with few valid labels weighed as much as others."""
    assert error_of(case) < BOUND


@pytest.mark.parametrize("case", ["edp 1, zero 3", "dp 1, zero 3"])
def test_a_mesh_of_one_rank_skips_no_divisor(error_of: Errors, case: str) -> None:
    """vo#577: gradients were divided only where a mesh had several ranks."""
    assert error_of(case) < BOUND


def test_a_recomputed_dispatch_is_that_of_the_first_pass(error_of: Errors) -> None:
    """am#3743, am#2635: choices or their places fell otherwise the second time, where scores tie."""
    assert error_of("ties") < BOUND


def test_replicas_of_sharded_parameters_are_synchronised(error_of: Errors) -> None:
    """am#3135: copies of a shard were updated by gradients of their own."""
    assert error_of("replicas") == 0.0
