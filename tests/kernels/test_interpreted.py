"""The rendered kernels against plain torch, in Triton's interpreter.

The interpreter must be on before Triton is imported, so that processes of their own run these files, side by side.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# The last are the operators' own: a queue kept by hand, what has no tokens.
OPERATORS = HERE.parent / "unit" / "runtime" / "test_padded.py"
FILES: dict[str, list[str | Path]] = {
    "operators": [HERE / "conformance"],
    "plans": [HERE / "interpreted.py", HERE / "interpreted_tuning.py"],
    "capacities": [HERE / "interpreted_padded.py", OPERATORS, "-k", "not test_gradients"],
}


@dataclass(frozen=True)
class Run:
    """A process, and where it writes."""

    process: subprocess.Popen[bytes]
    output: Path

    @classmethod
    def of(cls, output: Path, *arguments: str | Path) -> Run:
        environment = {**os.environ, "TRITON_INTERPRET": "1", "MOEC_BACKEND": "triton", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, arguments)]
        with output.open("wb") as file:
            return cls(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT), output)

    def require_passed(self) -> None:
        code, said = self.process.wait(), self.output.read_text()
        assert code == 0, said[-8000:]
        assert " passed" in said
        assert "skipped" not in said


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    folder = tmp_path_factory.mktemp("interpreted")
    started = {name: Run.of(folder / name, "-m", "not slow", *files) for name, files in FILES.items()}
    yield started
    for run in started.values():
        run.process.kill()
        run.process.wait()


@pytest.mark.parametrize("files", FILES)
def test_rendered_kernels_agree_with_plain_torch_in_the_interpreter(files: str, runs: dict[str, Run]) -> None:
    runs[files].require_passed()


@pytest.mark.slow
def test_every_case_agrees_in_every_dtype_in_the_interpreter(tmp_path: Path) -> None:
    Run.of(tmp_path / "slow", "-m", "slow", HERE / "conformance").require_passed()
