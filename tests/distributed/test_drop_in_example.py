"""examples/drop_in.py on gloo ranks, and under torchrun, as a reader starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.ranks.gloo_pool import GlooPool
from test_examples import EXAMPLES, run

HOSTS = [([], "DDP"), (["--fsdp"], "fully_shard")]


def require_learning(lines: list[str], host: str) -> None:
    said = "\n".join(lines)
    assert f"2 ranks, {host}: 196608 of 393216 expert elements on each" in said
    assert "gradients equal the unsharded model's" in said
    losses = [float(line.split()[-1]) for line in lines if line.startswith("step")]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(("arguments", "host"), HOSTS)
def test_its_gradients_are_the_unsharded_models_and_it_learns(gloo: GlooPool, arguments: list[str], host: str) -> None:
    first, second = gloo.run(2, run, "drop_in", *arguments, initialize=False)
    require_learning(first, host)
    assert not second


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "host"), HOSTS)
def test_it_does_so_under_torchrun(tmp_path: Path, arguments: list[str], host: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += [str(EXAMPLES / "drop_in.py"), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Warning" not in done.stderr
    require_learning(done.stdout.splitlines(), host)
