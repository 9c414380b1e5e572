"""Adapters by parametrization (LoRA, Hu et al. 2021): saved as extras while they are off, and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.plans import moe_plan
from torch import Tensor, nn
from torch.nn.utils import parametrize

import moec
from moec.runtime.errors import JobError
from moec.runtime.job.job import Job
from moec.runtime.model.module import PlanModule

TOKENS = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(0))


class Adapter(nn.Module):
    """weight + a @ b, of rank 2."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.shape, rows = weight.shape, weight.numel() // weight.shape[-1]
        self.a = nn.Parameter(torch.randn(rows, 2, generator=torch.Generator().manual_seed(1)))
        self.b = nn.Parameter(torch.zeros(2, weight.shape[-1]))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.a @ self.b).view(self.shape)


class Run:
    """A frozen model with an adapter for each layer's queries, and an optimizer over these."""

    def __init__(self, job: Job, folder: Path, seed: int) -> None:
        self.job, self.folder, self.model = job, folder, job.build(seed=seed)
        self.model.requires_grad_(False)
        self.adapters = nn.ModuleList(Adapter(part.weight) for part in queries(self.model))
        self.optimizer = torch.optim.AdamW(self.adapters.parameters(), lr=1e-2)
        extras = {"adapters": self.adapters, "second": self.optimizer}
        self.first = job.resume(folder, self.model, **extras)
        self.register()

    def register(self) -> None:
        for part, adapter in zip(queries(self.model), self.adapters, strict=True):
            parametrize.register_parametrization(part, "weight", adapter)

    def save(self) -> None:
        for part in queries(self.model):
            parametrize.remove_parametrizations(part, "weight", leave_parametrized=False)
        step = self.model.settings["step"]
        self.job.save(self.folder / str(step), self.model, adapters=self.adapters, second=self.optimizer)
        self.register()

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            losses.append(self.job.step(self.model, TOKENS, TOKENS).item())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses


def queries(model: PlanModule) -> list[nn.Module]:
    return [layer.attention.q for layer in model.layers]  # type: ignore[union-attr, misc]


def test_adapters_are_saved_while_they_are_off_and_resume_with_the_same_losses(tmp_path: Path) -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        run = Run(job, tmp_path, seed=1)
        run.train(3)
        run.save()
        wanted = run.train(3)
        assert wanted[2] < wanted[0]
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        run = Run(job, tmp_path, seed=2)
        assert run.first == 3
        assert run.train(3) == wanted


def test_a_save_with_adapters_on_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        run = Run(job, tmp_path, seed=1)
        for act in (lambda: job.save(tmp_path / "1", run.model), lambda: job.resume(tmp_path, run.model)):
            with pytest.raises(JobError, match=r"MOE0710.*parametrizations") as raised:
                act()
            assert "while no parametrization is registered" in (raised.value.diagnostics[0].help or "")


def test_merged_adapters_save_as_a_model(tmp_path: Path) -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        run = Run(job, tmp_path / "run", seed=1)
        run.train(2)
        wanted = job.step(run.model, TOKENS, TOKENS)
        for part in queries(run.model):
            parametrize.remove_parametrizations(part, "weight", leave_parametrized=True)
        job.save(tmp_path / "merged", run.model).wait()
        other = job.build(seed=2)
        job.load(tmp_path / "merged", other)
        assert torch.equal(job.step(other, TOKENS, TOKENS), wanted)
