"""The README's script, started as the README says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support.preloaded import environment, python

import moec

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_training_script_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (model,) = re.findall(r"```moe\n(.*?)```", README, re.DOTALL)
    (script,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    moec.compile(model).save("first.plan")
    Path("train.py").write_text(script)
    (command,) = re.findall(r"^torchrun (--standalone [^#\n]*)", README, re.MULTILINE)
    launcher = [python(), "-m", "torch.distributed.run", *command.split()]
    done = subprocess.run(launcher, capture_output=True, text=True, timeout=300, env=environment())
    assert done.returncode == 0, done.stderr
    losses = [float(number) for number in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 2
