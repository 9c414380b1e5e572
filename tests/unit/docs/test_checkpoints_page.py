"""docs/checkpoints.md: its Python runs as it stands, and resumes."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.plans import moe_plan
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import moec

PAGE = Path(__file__).parents[3] / "docs" / "checkpoints.md"


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(32, (8, 9), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def snippets_of_the_page() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)


def test_its_python_runs_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    snippets = snippets_of_the_page()
    assert len(snippets) == 4
    names: dict[str, Any] = {"moec": moec, "torch": torch, "plan": moe_plan(ranks=1, ep=1), "batch": batch}
    exec(snippets[0], names)  # noqa: S102
    assert names["first"] == 0
    assert sorted(os.listdir("checkpoints")) == ["4", "6"]
    exec(snippets[1], names)  # noqa: S102
    exec(snippets[0].replace("range(first, 6)", "range(first, 8)"), names)  # noqa: S102
    assert names["first"] == 6
    assert sorted(os.listdir("checkpoints")) == ["6", "8"]


def test_its_recipe_for_fine_tuning_begins_a_new_count_and_resumes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (recipe,) = (text for text in snippets_of_the_page() if "tuned" in text)
    names: dict[str, Any] = {"moec": moec, "torch": torch, "plan": moe_plan(ranks=1, ep=1), "batch": batch}
    with moec.launch(names["plan"], device="cpu") as job:
        model = job.build(seed=7)
        model.set(step=6)
        job.save("by_hand/best", model, job.optimizer(model), score=0.25)
    exec(recipe, names)  # noqa: S102
    assert names["first"] == 0
    assert names["model"].settings == {"seed": 1, "step": 4}
    assert sorted(os.listdir("tuned")) == ["2", "4"]
    tuned = names["model"].head.weight.detach().clone()
    exec(recipe, names)  # noqa: S102
    assert names["first"] == 4
    assert torch.equal(names["model"].head.weight, tuned)


def test_its_data_comes_once_in_an_epoch_although_the_run_is_killed_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (recipe,) = (text for text in snippets_of_the_page() if "batches_from" in text)
    whole = torch.randint(32, (64, 9), generator=torch.Generator().manual_seed(0))
    data = Noted(whole[:, :-1], whole[:, 1:])
    names: dict[str, Any] = {"moec": moec, "torch": torch, "plan": moe_plan(ranks=1, ep=1), "DataLoader": DataLoader}
    killed = recipe.replace("step += 1", "step += 1\n            if step == 3: break").replace("while", "if")
    exec(killed, names | {"data": data, "STEPS": 8})  # noqa: S102
    del data.read[2 * 8 :]  # the checkpoint is of step 2
    exec(recipe, names | {"data": data, "STEPS": 8})  # noqa: S102
    assert sorted(data.read) == list(range(64))
    assert data.read != sorted(data.read)


class Noted(TensorDataset):
    """Notes which sequences were read."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.read = list[int]()

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        self.read.append(index)
        return super().__getitem__(index)
