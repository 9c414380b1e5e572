"""The checks of compiled kernels once more, with the oldest Triton that moec supports: what is lost differs by version.

`make .triton-3.6` installs it in a folder of its own, beside the one that torch asks for; `make test-all` does so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
OLDEST = HERE.parents[1] / ".triton-3.6"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not OLDEST.is_dir(), reason="`make .triton-3.6` installs Triton 3.6 beside Triton"),
]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(OLDEST), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("names", "only"),
    [
        *((["compiled"], target) for target in ("sm_90", "sm_80", "sm_100", "gfx942")),
        (["compiled", "pipelines", "resources"], "not (sm_90 or sm_80 or sm_100 or gfx942)"),
    ],
)
def test_every_check_of_compiled_kernels_passes_with_the_oldest_triton(names: list[str], only: str) -> None:
    assert run("-c", "import triton; print(triton.__version__)").stdout.startswith("3.6.")
    files = [HERE / f"test_{name}.py" for name in names]
    done = run("-m", "pytest", "-p", "no:cacheprovider", "--everything", "-k", only, *files)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
