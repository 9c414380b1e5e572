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
    assert len(snippets) == 3
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
