"""Jobs on this machine's device train as they do on the CPU, and their checkpoints have equal bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.plans import moe_plan
from torch import Tensor

import moec
from moec.codegen.plan import Plan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or AMD device")

CASES: dict[str, dict[str, object]] = {
    "dropless": {},
    "capacity": {"beside": "capacity = factor(1.0); shared = swiglu(32)"},
    "experts choose": {"gate": "expert_choice(2)", "balance": "[]"},
    "sigmoid": {"gate": "topk(2, score = sigmoid, bias = online(1e-3), normalize = true)", "balance": "[]"},
    "recompute": {"recompute": "layer", "microbatches": 2},
    "lion": {"optimizer": "lion(lr = 1e-3)"},
    "muon": {"optimizer": "muon(lr = 1e-3)"},
    "relu": {"expert": "relu(64)"},
}
TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}
"""Of losses, relative. The kernels' products of float32 may be TF32's, and sums have another order than the CPU's."""


def plan_of(dtype: str, **options: object) -> Plan:
    return moe_plan(ranks=1, ep=1, dim=64, dtype=dtype, **{"expert": "swiglu(64)", **options})


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(32, (8, 9), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def losses(plan: Plan, device: str, steps: int = 6) -> list[float]:
    with moec.launch(plan, device=device) as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        found = []
        for step in range(steps):
            found.append(float(job.step(model, *(each.to(device) for each in batch(step)))))
            job.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return found


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_a_job_trains_as_on_cpu(case: str, dtype: str) -> None:
    plan = plan_of(dtype, **CASES[case])
    assert losses(plan, "cuda") == pytest.approx(losses(plan, "cpu"), rel=TOLERANCE[dtype])


def test_a_second_run_has_the_same_bits() -> None:
    assert losses(plan_of("bf16"), "cuda") == losses(plan_of("bf16"), "cuda")


def test_initial_weights_are_those_of_the_cpu() -> None:
    weights = []
    for device in ("cuda", "cpu"):
        with moec.launch(plan_of("fp32", experts=64), device=device) as job:
            weights.append({name: each.detach().cpu() for name, each in job.build(seed=3).named_parameters()})
    for name, each in weights[0].items():
        torch.testing.assert_close(each, weights[1][name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_checkpoint_of_the_device_loads_on_cpu_with_equal_bits(dtype: str, tmp_path: Path) -> None:
    plan = plan_of(dtype)
    with moec.launch(plan, device="cuda") as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        job.step(model, *(each.cuda() for each in batch(0)))
        optimizer.step()
        job.save(tmp_path / "1", model, optimizer).wait()
        trained = {name: each.detach().cpu() for name, each in model.named_parameters()}
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=2)
        job.load(tmp_path / "1", model, job.optimizer(model))
        for name, each in model.named_parameters():
            assert torch.equal(each, trained[name]), name


def test_a_resumed_run_ends_with_the_bits_of_one_that_nobody_stopped(tmp_path: Path) -> None:
    plan = plan_of("bf16")

    def run(folder: Path, until: int) -> dict[str, Tensor]:
        with moec.launch(plan, device="cuda") as job:
            model = job.build(seed=1)
            optimizer = job.optimizer(model)
            for step in range(job.resume(folder, model, optimizer), until):
                job.step(model, *(each.cuda() for each in batch(step)))
                optimizer.step()
                optimizer.zero_grad()
                job.checkpoint(folder, model, optimizer, every=2)
            return {name: each.detach().cpu() for name, each in model.named_parameters()}

    whole = run(tmp_path / "whole", 6)
    run(tmp_path / "parts", 3)
    for name, each in run(tmp_path / "parts", 6).items():
        assert torch.equal(each, whole[name]), name


def test_it_generates() -> None:
    with moec.launch(plan_of("bf16"), device="cuda") as job:
        model = job.build(seed=1)
        tokens = model.generate(batch(0)[0][:, :4].cuda(), max_new_tokens=4).tokens
    assert tokens.shape == (8, 4)
    assert tokens.is_cuda


def test_a_layer_trains_in_a_model_of_ones_own() -> None:
    layer = moec.layer('layer "ffn" { dim = 64; moe { experts = 8 * swiglu(64); gate = topk(2) } }', device="cuda")
    x = torch.randn(2, 16, 64, device="cuda", requires_grad=True)
    layer(x).square().sum().backward()
    assert x.grad is not None
    assert all(each.grad is not None and each.grad.isfinite().all() for each in layer.parameters())
