"""docs/checkpoints.md: its Python runs as it stands, and resumes."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models import moe_plan
from torch import Tensor

import moec

PAGE = Path(__file__).parents[3] / "docs" / "checkpoints.md"


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(32, (8, 9), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def test_its_python_runs_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert len(snippets) == 2
    names: dict[str, Any] = {"moec": moec, "torch": torch, "plan": moe_plan(ranks=1, ep=1), "batch": batch}
    for snippet in snippets:
        exec(snippet, names)  # noqa: S102
    assert sorted(os.listdir("checkpoints")) == ["4", "6"]
    assert names["first"] == 0
    exec(snippets[0].replace("range(first, 6)", "range(first, 8)"), names)  # noqa: S102
    assert names["first"] == 6
    assert sorted(os.listdir("checkpoints")) == ["6", "8"]
