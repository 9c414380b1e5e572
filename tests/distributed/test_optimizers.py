"""Every optimizer of the language over sharded parameters, against the optimizers of torch on the unsharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.combinations import some
from support.plans import moe_plan
from support.ranks import torch_optimizers
from support.ranks.gloo_pool import GlooPool
from support.ranks.training import MAX_NORM, train_as_rank, train_clipping_in_the_step, train_unsharded
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import _muon

import moec
from moec.grammar.spec import Adafactor, Muon
from moec.passes.ir import Matrices
from moec.runtime.job.masters import Master, local_part
from moec.runtime.job.optimizer import make_optimizer

STEPS = 20
OPTIMIZERS = {
    "sgd": "sgd(lr = 0.3, momentum = 0.9, nesterov = true, weight_decay = 1e-3)",
    "adafactor": "adafactor(lr = 3e-2, weight_decay = 0.1)",
    "muon": "muon(adamw = adamw(lr = 3e-3))",
    "rms": "muon(lr = 3e-3, scale = rms, nesterov = false, adamw = adamw(lr = 3e-3))",
}


def require_the_curve_of_torch(gloo: GlooPool, optimizer: str, **options: Any) -> None:
    given = {"batch": 8, "bias": "all", "optimizer": OPTIMIZERS[optimizer]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_muon, "_zeropower_via_newtonschulz", torch_optimizers.newton_schulz)
        expected = train_unsharded(given, STEPS)
    for result in gloo.run(4, train_as_rank, {**given, "ranks": 4, **options}, None, STEPS):
        assert result["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-3)
    assert expected["losses"][-2] < expected["losses"][1] - 0.1, "the run learns nothing, so it proves nothing"


@pytest.mark.parametrize("optimizer", ["sgd", "adafactor", "muon"])
def test_twenty_steps_over_tp_ep_and_edp_are_those_of_torch_unsharded(gloo: GlooPool, optimizer: str):
    require_the_curve_of_torch(gloo, optimizer, tp=2, ep=2)


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"ep": 4}, {"ep": 2, "zero": 3}, {"tp": 4, "ep": 1}], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_twenty_steps_over_other_degrees_are_those_of_torch_unsharded(
    gloo: GlooPool, optimizer: str, degrees: dict[str, Any]
):
    require_the_curve_of_torch(gloo, optimizer, **degrees)


@pytest.mark.parametrize("zero", some([1, 2, 3], [3]))
def test_muon_in_bf16_at_every_stage_of_zero_learns_as_unsharded(gloo: GlooPool, zero: int):
    given: dict[str, Any] = {"batch": 8, "dtype": "bf16", "optimizer": OPTIMIZERS["muon"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_muon, "_zeropower_via_newtonschulz", torch_optimizers.newton_schulz)
        expected = train_unsharded(given, 9)["losses"]
    for result in gloo.run(4, train_as_rank, {**given, "ranks": 4, "ep": 2, "zero": zero}, None, 9):
        assert result["losses"] == pytest.approx(expected, abs=0.02)
    assert expected[-2] < expected[1] - 0.1, "the run learns nothing, so it proves nothing"


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


def three_steps_cut_by_hand(kind: str, frozen: str, missing: int | None) -> dict[str, Tensor]:
    """Parameters after three steps, whole; `frozen` has no gradient, and rank `missing` has none in the last step."""
    spec = Muon(adamw=Muon().adamw.replace(lr=0.1)) if kind == "muon" else Adafactor(lr=0.3, weight_decay=0.1)
    with moec.launch(moe_plan(ranks=4, tp=2, ep=2), device="cpu") as job:
        mesh = job._meshes["dense"]
        axes = mesh.mesh_dim_names
        masters = {}
        for name, (_, matrices, dims) in SHAPES.items():
            cuts = dict(zip(("dp", "tp"), dims, strict=True))
            whole = DTensor.from_local(values(name, 0), mesh, run_check=False)
            parameter = nn.Parameter(whole.redistribute(mesh, [Shard(cuts[axis]) for axis in axes]))
            groups = tuple((job.number + axis, dim) for axis, dim in cuts.items())
            masters[name] = Master(parameter, matrices.rows > 0, matrices, groups)
        optimizer = make_optimizer(spec, list(masters.values()))
        masters[frozen].parameter.requires_grad_(False)
        for step in (1, 2, 3):
            for name, master in masters.items():
                gradient = DTensor.from_local(values(name, step), mesh, run_check=False)
                if name != frozen and not (step == 3 and job.rank == missing):
                    master.parameter.grad = gradient.redistribute(mesh, master.parameter.placements)
            optimizer.step()
            optimizer.zero_grad()
        return {name: master.parameter.full_tensor().detach() for name, master in masters.items()}


def three_steps_whole(kind: str, frozen: str) -> dict[str, Tensor]:
    spec = Muon(adamw=Muon().adamw.replace(lr=0.1)) if kind == "muon" else Adafactor(lr=0.3, weight_decay=0.1)
    masters = {n: Master(nn.Parameter(values(n, 0)), m.rows > 0, m) for n, (_, m, _) in SHAPES.items()}
    optimizer = make_optimizer(spec, list(masters.values()))
    for step in (1, 2, 3):
        for name, master in masters.items():
            master.parameter.grad = values(name, step) if name != frozen else None
        optimizer.step()
    return {name: local_part(master.parameter) for name, master in masters.items()}


@pytest.mark.parametrize("kind", ["muon", "adafactor"])
def test_cuts_of_any_dims_over_two_axes_change_no_update(gloo: GlooPool, kind: str):
    frozen = "heads and widths"
    expected = three_steps_whole(kind, frozen)
    for result in gloo.run(4, three_steps_cut_by_hand, kind, frozen, None):
        for name, tensor in expected.items():
            torch.testing.assert_close(
                result[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
            )
    assert torch.equal(expected[frozen], values(frozen, 0)), "a frozen parameter decays"


@pytest.mark.parametrize("kind", ["muon", "adafactor"])
def test_a_rank_without_gradients_still_takes_part_in_every_collective(gloo: GlooPool, kind: str):
    complete = gloo.run(4, three_steps_cut_by_hand, kind, "a table", None)[0]
    lacking = gloo.run(4, three_steps_cut_by_hand, kind, "a table", 3)[0]
    assert not torch.equal(complete["rows twice"], lacking["rows twice"])
    assert torch.equal(complete["a table"], lacking["a table"])


@pytest.mark.parametrize("optimizer", some(["adamw(lr = 3e-3)", OPTIMIZERS["muon"]], [OPTIMIZERS["muon"]]))
def test_clipping_inside_of_the_step_gives_the_same_curve(gloo: GlooPool, optimizer: str):
    options = {"batch": 8, "ranks": 4, "tp": 2, "ep": 2, "optimizer": optimizer}
    for result in gloo.run(4, train_clipping_in_the_step, options):
        (losses, norms), (others, other_norms) = result["before"], result["inside"]
        assert others == pytest.approx(losses, abs=1e-5)
        assert other_norms == pytest.approx(norms, rel=1e-3)
        assert max(norms) > MAX_NORM, "nothing was clipped"
