"""examples/drop_in.py under torchrun, as a reader starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "drop_in.py"


@pytest.mark.parametrize(("arguments", "host"), [([], "DDP"), (["--fsdp"], "fully_shard")])
def test_its_gradients_are_the_unsharded_models_and_it_learns(tmp_path: Path, arguments: list[str], host: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(EXAMPLE)]
    done = subprocess.run(
        [*command, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"2 ranks, {host}: 196608 of 393216 expert elements on each" in done.stdout
    assert "gradients equal the unsharded model's" in done.stdout
    assert "Warning" not in done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert losses[-1] < 0.5 * losses[0]
