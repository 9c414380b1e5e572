"""Every optimizer of the language over sharded parameters, against the optimizers of torch on the unsharded model."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from support.plans import moe_plan, moe_spec
from support.ranks.gloo_pool import GlooPool
from support.ranks.training import (
    MAX_NORM,
    batches_of,
    own_part,
    require_learning,
    require_same_training,
    train_as_rank,
    train_unsharded,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import _muon

import moec
from moec.codegen.plan import Plan
from moec.grammar.spec import Update
from moec.grammar.spec.optimizers import Adafactor, Muon
from moec.passes.ir import Matrices
from moec.runtime.optimizers.optimizer import make_optimizer
from moec.runtime.weights.masters import Master, local_part

OPTIMIZERS = {
    "sgd": "sgd(lr = 0.3, momentum = 0.9, nesterov = true, weight_decay = 1e-3)",
    "adafactor": "adafactor(lr = 3e-2, weight_decay = 0.1)",
    "muon": "muon(adamw = adamw(lr = 3e-3))",
    "lion": "lion(lr = 1e-3, weight_decay = 0.3)",
    "rms": "muon(lr = 3e-3, scale = rms, nesterov = false, adamw = adamw(lr = 3e-3))",
}


def newton_schulz(gradient: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Torch's iteration of one matrix in fp32: torch's own is in bf16."""
    a, b, c = coefficients
    x = gradient / gradient.norm().clamp(min=eps)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


@cache
def of_torch(optimizer: str, steps: int, dtype: str = "fp32") -> dict[str, Any]:
    """The training of the unsharded model by torch's optimizer, whose matrices of Muon are in fp32 here."""
    given: dict[str, Any] = {"batch": 8, "bias": "all", "dtype": dtype, "optimizer": OPTIMIZERS[optimizer]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_muon, "_zeropower_via_newtonschulz", newton_schulz)
        return train_unsharded(moe_spec(**given), steps)


def require_the_curve_of_torch(gloo: GlooPool, optimizer: str, steps: int = 20, **degrees: Any) -> None:
    plan = moe_plan(batch=8, bias="all", optimizer=OPTIMIZERS[optimizer], **degrees)
    results, expected = gloo.run(plan.world_size, train_as_rank, plan, steps), of_torch(optimizer, steps)
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-3)
    require_learning(expected["losses"])
    if steps < 20:  # after twenty steps of adafactor one weight in 2,000 is off by 1.3e-3: its gradients are near 0
        require_same_training(results, expected, plan)


@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.slow), "adafactor", "muon"])
def test_steps_over_tp_ep_and_edp_are_those_of_torch_unsharded(gloo: GlooPool, optimizer: str):
    require_the_curve_of_torch(gloo, optimizer, 5, ranks=4, tp=2, ep=2)


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_steps_of_experts_that_etp_and_zero_cut_are_those_of_torch_unsharded(gloo: GlooPool, optimizer: str):
    require_the_curve_of_torch(gloo, optimizer, 5, ranks=4, ep=1, etp=2, cp=2, zero=1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_over_ep_and_edp_with_zero_are_those_of_torch_unsharded(gloo: GlooPool, optimizer: str):
    require_the_curve_of_torch(gloo, optimizer, 5, ranks=2, ep=2, zero=3)


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"tp": 2, "ep": 2}, {"ep": 4}, {"ep": 2, "zero": 3}, {"tp": 4, "ep": 1}], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_twenty_steps_over_any_degrees_are_those_of_torch_unsharded(
    gloo: GlooPool, optimizer: str, degrees: dict[str, Any]
):
    require_the_curve_of_torch(gloo, optimizer, ranks=4, **degrees)


@pytest.mark.parametrize(
    ("ranks", "zero", "steps"), [(2, 3, 5), *(pytest.param(4, z, 9, marks=pytest.mark.slow) for z in (1, 2, 3))]
)
def test_muon_in_bf16_at_every_stage_of_zero_learns_as_unsharded(gloo: GlooPool, ranks: int, zero: int, steps: int):
    model = "keep_in_fp32 = [routers]"  # weights of two dtypes are gathered
    plan = moe_plan(
        batch=8, bias="all", dtype="bf16", model=model, optimizer=OPTIMIZERS["muon"], ranks=ranks, ep=2, zero=zero
    )
    expected = of_torch("muon", steps, "bf16")["losses"]
    for result in gloo.run(ranks, train_as_rank, plan, steps):
        assert result["losses"] == pytest.approx(expected, abs=0.02)
    require_learning(expected)


# ---- parameters cut by hand, over several axes and dims --------------------------------------------------

SHAPES: dict[str, tuple[tuple[int, ...], Matrices, tuple[int, int]]] = {
    "rows and columns": ((8, 12), Matrices(rows=1, hidden=True), (0, 1)),
    "rows twice": ((8, 12), Matrices(rows=1, hidden=True), (0, 0)),
    "heads and widths": ((2, 4, 6), Matrices(rows=2, hidden=True), (1, 0)),
    "experts and rows": ((4, 2, 6, 10), Matrices(2, 1, hidden=True), (0, 2)),
    "halves and columns": ((4, 2, 6, 10), Matrices(2, 1, hidden=True), (1, 3)),
    "experts twice": ((4, 6, 10), Matrices(1, 1, hidden=True), (0, 0)),
    "a table": ((8, 12), Matrices(rows=1), (1, 0)),
    "biases of experts": ((4, 6), Matrices(stack=1), (0, 1)),
}


def values(name: str, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * list(SHAPES).index(name) + step)
    return torch.randn(SHAPES[name][0], generator=generator)


FROZEN = "heads and widths"
"""A parameter that has no gradient."""


def three_steps_cut_by_hand(kind: str) -> list[dict[str, Tensor]]:
    """Parameters after three steps, whole; and again where the last rank has no gradients in the last step."""
    with moec.launch(moe_plan(ranks=4, tp=2, ep=2), device="cpu") as job:
        mesh = job._meshes["dense"]
        axes = mesh.mesh_dim_names
        found = []
        for missing in (None, job.world_size - 1):
            masters = {}
            for name, (_, matrices, dims) in SHAPES.items():
                cuts = dict(zip(("dp", "tp"), dims, strict=True))
                whole = DTensor.from_local(values(name, 0), mesh, run_check=False)
                parameter = nn.Parameter(whole.redistribute(mesh, [Shard(cuts[axis]) for axis in axes]))
                groups = tuple((job.number + axis, dim) for axis, dim in cuts.items())
                masters[name] = Master(parameter, matrices.rows > 0, matrices, groups)
            optimizer = make_optimizer(Update(spec_of(kind)), list(masters.values()))
            masters[FROZEN].parameter.requires_grad_(False)
            for step in (1, 2, 3):
                for name, master in masters.items():
                    gradient = DTensor.from_local(values(name, step), mesh, run_check=False)
                    if name != FROZEN and not (step == 3 and job.rank == missing):
                        master.parameter.grad = gradient.redistribute(mesh, master.parameter.placements)
                optimizer.step()
                optimizer.zero_grad()
            found.append({name: master.parameter.full_tensor().detach() for name, master in masters.items()})
        return found


def spec_of(kind: str) -> Muon | Adafactor:
    return Muon(adamw=Muon().adamw.replace(lr=0.1)) if kind == "muon" else Adafactor(lr=0.3, weight_decay=0.1)


def three_steps_whole(kind: str) -> dict[str, Tensor]:
    masters = {n: Master(nn.Parameter(values(n, 0)), m.rows > 0, m) for n, (_, m, _) in SHAPES.items()}
    optimizer = make_optimizer(Update(spec_of(kind)), list(masters.values()))
    for step in (1, 2, 3):
        for name, master in masters.items():
            master.parameter.grad = values(name, step) if name != FROZEN else None
        optimizer.step()
    return {name: local_part(master.parameter) for name, master in masters.items()}


@pytest.mark.parametrize("kind", ["muon", "adafactor"])
def test_cuts_of_any_dims_over_two_axes_change_no_update_and_a_rank_without_gradients_takes_part(
    gloo: GlooPool, kind: str
) -> None:
    expected = three_steps_whole(kind)
    assert torch.equal(expected[FROZEN], values(FROZEN, 0)), "a frozen parameter decays"
    for complete, lacking in gloo.run(4, three_steps_cut_by_hand, kind):
        for name, tensor in expected.items():
            torch.testing.assert_close(
                complete[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
            )
        assert not torch.equal(complete["rows twice"], lacking["rows twice"])
        assert torch.equal(complete[FROZEN], lacking[FROZEN])


CLIPPED: list[tuple[dict[str, int], str]] = [
    ({"ranks": 2, "ep": 2, "zero": 3}, "muon"),
    ({"ranks": 4, "tp": 2, "ep": 2}, "muon"),
    ({"ranks": 4, "tp": 2, "ep": 2}, "adafactor"),
]


def train_clipping_in_the_step(plan: Plan, steps: int) -> dict[str, Any]:
    """Trains as a rank twice: clipped before the step and in it. Gives both curves."""
    curves: dict[str, Any] = {}
    with moec.launch(plan, device="cpu") as job:
        for where in ("before", "inside"):
            model = job.build(seed=1)
            optimizer = job.optimizer(model)
            losses, norms = [], []
            for tokens, labels in batches_of(plan.spec, steps):
                losses.append(job.step(model, *own_part(job, tokens, labels)).item())
                given = {"optimizer": optimizer} if where == "inside" else {}
                norms.append(job.clip_grad_norm_(model, MAX_NORM, **given).item())
                optimizer.step()
                optimizer.zero_grad()
            curves[where] = losses, norms
    return curves


@pytest.mark.parametrize(
    ("degrees", "optimizer"),
    [pytest.param(*case, marks=() if case is CLIPPED[0] else pytest.mark.slow) for case in CLIPPED],
    ids=str,
)
def test_clipping_inside_of_the_step_gives_the_same_curve(gloo: GlooPool, degrees: dict[str, int], optimizer: str):
    plan = moe_plan(batch=8, optimizer=OPTIMIZERS[optimizer], **degrees)
    for result in gloo.run(plan.world_size, train_clipping_in_the_step, plan, 4):
        (losses, norms), (others, other_norms) = result["before"], result["inside"]
        assert others == pytest.approx(losses, abs=1e-5)
        assert other_norms == pytest.approx(norms, rel=1e-3)
        assert max(norms) > MAX_NORM, "nothing was clipped"
