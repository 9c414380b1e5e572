"""The rendered kernels against plain torch, in Triton's interpreter.

The interpreter must be on before Triton is imported, so that a process of its own runs each of these files.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# The last are the operators' own: a queue kept by hand, opcheck, what has no tokens.
OPERATORS = HERE.parent / "unit" / "runtime" / "test_padded.py"
FILES = {
    "all but padded rows": [HERE / "interpreted.py", HERE / "conformance"],
    "tuning": [HERE / "interpreted_tuning.py"],
    "padded rows": [HERE / "interpreted_padded.py", OPERATORS, "-k", "not test_gradients"],
}


def interpret(*arguments: str | Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "MOEC_BACKEND": "triton", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        *map(str, arguments),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_rendered_kernels_agree_with_plain_torch_in_the_interpreter(files: list[str | Path]) -> None:
    interpret("-m", "not slow", *files)


@pytest.mark.slow
def test_every_case_agrees_in_every_dtype_in_the_interpreter() -> None:
    interpret("-m", "slow", HERE / "conformance")
