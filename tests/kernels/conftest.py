"""Runs Triton's interpreter in separate processes, one after the other, while the rest of the suite runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# The last are the operators' own: a queue kept by hand, what has no tokens.
OPERATORS = HERE.parent / "unit" / "runtime" / "test_padded.py"
ONE_EXPERT = HERE.parent / "unit" / "jobs" / "test_one_expert.py"
FILES: dict[str, list[str | Path]] = {
    "operators": [HERE / "conformance", HERE / "interpreted_faults.py", HERE / "interpreted_tiles.py"],
    "plans": [HERE / "interpreted.py", HERE / "interpreted_libraries.py", HERE / "interpreted_tuning.py", ONE_EXPERT],
    "capacities": [
        HERE / "interpreted_padded.py",
        HERE / "interpreted_blocks.py",
        HERE / "interpreted_far.py",
        OPERATORS,
        "-k",
        "not test_gradients",
    ],
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that wait for the interpreter run last: until then it has one core and the other tests another."""
    items.sort(key=_waits)


def _waits(item: pytest.Item) -> bool:
    return item.path.name == "test_interpreted.py"


@dataclass
class Interpreter:
    """Runs of pytest with the interpreter on, which must be set before Triton is imported."""

    folder: Path
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=1))
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *arguments: str | Path) -> Future[tuple[int, str]]:
        """Waits for this run; returns its exit code and output."""
        return self.pool.submit(self._run, *arguments)

    def _run(self, *arguments: str | Path) -> tuple[int, str]:
        environment = {**os.environ, "TRITON_INTERPRET": "1", "MOEC_BACKEND": "triton", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, arguments)]
        output = self.folder / str(len(self.running))
        with output.open("wb") as file:
            process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        self.running.append(process)
        return process.wait(), output.read_text()

    def stop(self) -> None:
        """Ends running processes."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in self.running:
            process.kill()


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    started = Interpreter(tmp_path_factory.mktemp("interpreted"))
    yield started
    started.stop()


@pytest.fixture(scope="session", autouse=True)
def interpreted(request: pytest.FixtureRequest) -> Callable[[str], Future[tuple[int, str]]]:
    """The runs of `FILES`, started with the first test of this folder if one asks for any."""
    if not any(_waits(item) and "[" in item.name for item in request.session.items):
        return lambda name: pytest.fail(f"nobody asked for {name}")
    interpreter: Interpreter = request.getfixturevalue("interpreter")
    return {name: interpreter.start("-m", "not slow", *files) for name, files in FILES.items()}.__getitem__
