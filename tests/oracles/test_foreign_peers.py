"""Our formulas of Megatron and DeepSpeed against their own routers, which the extra `peers` installs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from oracles.foreign import deepspeed, megatron, run_peers
from oracles.foreign.row import Options, Row
from oracles.foreign.run_peers import rows_of
from oracles.foreign.table_deepspeed import DEEPSPEED
from oracles.foreign.table_megatron import MEGATRON
from safetensors.torch import load_file
from support.tables import each_row
from torch import Tensor

pytestmark = pytest.mark.slow
TIGHT = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def megatron_itself(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return routed("megatron-core", tmp_path_factory.mktemp("megatron"))


@pytest.fixture(scope="module")
def deepspeed_itself(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return routed("deepspeed", tmp_path_factory.mktemp("deepspeed"))


@each_row("row", rows_of(MEGATRON, megatron.route))
def test_megatrons_own_router_computes_what_our_formula_says(row: Row, megatron_itself: dict[str, Tensor]) -> None:
    compare(row, megatron_itself)


@each_row("row", rows_of(DEEPSPEED, deepspeed.top1, deepspeed.top2, deepspeed.topk))
def test_deepspeeds_own_gate_computes_what_our_formula_says(row: Row, deepspeed_itself: dict[str, Tensor]) -> None:
    compare(row, deepspeed_itself)


def compare(row: Row, found: dict[str, Tensor]) -> None:
    """Weights and loss; where a capacity chooses among equal ones, how many choices each expert keeps, and the loss."""
    expected, weights = row.theirs(row.given), found[f"{row.name} weights"]
    if chooses_among_equals(row):
        assert torch.equal((weights > 0).sum(0), (expected.weights > 0).sum(0))
    else:
        torch.testing.assert_close(weights, expected.weights, **TIGHT)
    if expected.loss is not None:
        torch.testing.assert_close(found[f"{row.name} loss"], expected.loss, **TIGHT)


def chooses_among_equals(row: Row) -> bool:
    """Whether places go to the largest of zeros and ones: a CPU's `torch.topk` takes any, CUDA's the first ones."""
    assert isinstance(row.theirs, Options)
    options = row.theirs.options
    if row.theirs.function is megatron.route:
        return options.get("drop_policy") == "position"
    return row.theirs.function is deepspeed.top1 and options.get("drop_tokens", True) and "drawn" not in options


def routed(system: str, folder: Path) -> dict[str, Tensor]:
    """What `run_peers.py` writes of the system, in a process of its own."""
    try:
        metadata.version(system)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{system} is not installed: `pip install -c constraints.txt -e '.[peers]'` installs it")
    tests, file = Path(run_peers.__file__).parents[2], folder / "found.safetensors"
    variables = {**os.environ, "PYTHONPATH": str(tests), "TORCH_COMPILE_DISABLE": "1", "HOME": str(folder)}
    command = [sys.executable, "-W", "ignore", "-m", run_peers.__name__, system, str(file)]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return load_file(file)
