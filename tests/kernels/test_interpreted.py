"""The rendered kernels against plain torch, in Triton's interpreter, which must be on before Triton is imported.

A process of its own runs `FILES`: many tests in one, for it takes seconds to begin.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
UNIT = HERE.parent / "unit"
FILES = [HERE / "conformance", *sorted(HERE.glob("interpreted*.py"))]


def require_passed(*arguments: str | Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "MOEC_BACKEND": "triton", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, arguments)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_rendered_kernels_agree_with_plain_torch_in_the_interpreter() -> None:
    require_passed(*FILES)


@pytest.mark.slow
def test_rendered_kernels_agree_in_every_dtype_and_tile_in_the_interpreter() -> None:
    require_passed("--everything", "-m", "slow", *FILES)


@pytest.mark.slow
def test_a_queue_kept_by_hand_and_one_expert_for_all_agree_with_kernels_in_the_interpreter() -> None:
    of_operators = UNIT / "runtime" / "test_padded.py"
    require_passed(of_operators, UNIT / "jobs" / "test_one_expert.py", "-k", "not test_gradients")
