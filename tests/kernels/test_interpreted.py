"""The rendered kernels against plain torch, in Triton's interpreter.

The interpreter must be on before Triton is imported, so that one process of its own runs `interpreted*.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_rendered_kernels_agree_with_plain_torch_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "MOEC_BACKEND": "triton", "OMP_NUM_THREADS": "1"}
    files = map(str, sorted(Path(__file__).parent.glob("interpreted*.py")))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
