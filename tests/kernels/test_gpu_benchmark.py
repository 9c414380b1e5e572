"""`benchmarks/gpu.py` from end to end, in Triton's interpreter with tiny layers: the code that a lent GPU runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from gpu_rows import RowFile

ROOT = Path(__file__).parents[2]
CONFORMANCE = "tests/kernels/conformance"
pytestmark = pytest.mark.slow  # it starts processes; tests/unit/benchmarks has what they do, in this one
PROGRAM = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu"]


def started(*arguments: str | Path) -> subprocess.Popen[str]:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*PROGRAM, *map(str, arguments)], **streams)  # type: ignore[call-overload,no-any-return]


def finished(*arguments: str | Path) -> str:
    process = started(*arguments)
    said, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, said
    return said


def listed(*arguments: str) -> list[str]:
    return finished(*arguments, "--list").splitlines()


def rows(file: Path) -> dict[str, dict[str, object]]:
    return {row["key"]: row for row in RowFile(file).rows()}


def require_resumed(part: Sequence[str], file: Path) -> dict[str, dict[str, object]]:
    """Kills a part after its first row, starts it again, and returns its rows."""
    wanted = listed(*part)
    process = started(*part, "--out", file)
    until = time.monotonic() + 300
    while not rows(file):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = rows(file)
    assert 0 < len(before) < len(wanted)
    said = finished(*part, "--out", file)
    after = rows(file)
    failed = sum("failed" in row for row in after.values())
    assert f"{len(wanted) - failed} of {len(wanted)} measured, {failed} failed, in {file}" in said
    assert list(after) == wanted
    assert {key: after[key] for key in before} == before
    assert file.read_bytes().count(b"\n") == len(wanted)
    return after


PARTS = {"a": "a c", "b": "down_backward", "c": "mm"}
"""A part, and what the keys of some of its measurements have."""


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_killed_goes_on_where_it_was(part: str, tmp_path: Path) -> None:
    found = require_resumed(["--part", part, "--only", PARTS[part]], tmp_path / "rows.jsonl")
    failed = {key: row["failed"] for key, row in found.items() if "failed" in row}
    # Under torch.compile F.grouped_mm takes bfloat16 alone, and the interpreter runs moec's own kernels alone.
    assert all("compiled" in key or "moec by grouped_mm" in key for key in failed), failed


def test_all_parts_measure_everything_and_their_rows_become_tables_and_shipped_ways(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for part in PARTS:
        require_resumed(["--part", part], file.with_name(f"{part}.jsonl"))
    files = [file.with_name(f"{part}.jsonl") for part in PARTS]
    said = finished("--report", *files)
    for head in ("ceiling", "layer against float64", "kernel", "/ best peer"):
        assert f"| {head} |" in said
    assert "wrote" in finished("--write-tuned", files[1], "--folder", tmp_path)
    assert (tmp_path / "interpreter.json").exists()


def test_whole_models_are_measured_and_become_a_table(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    finished("--part", "d", "--out", file)
    (row,) = rows(file).values()
    assert "failed" not in row
    assert "| tiny | 0.00 B |" in finished("--report", file)


def test_moec_is_found_where_it_is_not_installed(tmp_path: Path) -> None:
    program = (
        "import importlib.metadata, sys; from pathlib import Path;"
        "sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in str(each)];"
        "import gpu; assert not gpu.is_installed(); gpu.environment('cuda', Path(sys.argv[1]));"
        "import moec, moec.runtime.tune.tuning, moec.driver; from importlib import resources;"
        "assert moec.__file__.startswith(sys.argv[1]), moec.__file__;"
        "print(moec.compile('examples/mixtral_8x7b.moe').name, len(list(resources.files('moec.pages').iterdir())) > 10)"
    )
    for more in ([], [str(ROOT)]):  # with the checkout itself on the path, its folder `moec` is found, but is not all
        folder = tmp_path / str(len(more))
        folder.mkdir()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "benchmarks"), *more])}
        done = subprocess.run(
            [sys.executable, "-c", program, str(folder)], env=environment, cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[-1] == "True"


def test_it_runs_from_files_alone_where_moec_is_not_installed(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "others.pth").write_text(str(Path(pytest.__file__).parents[1]) + "\n")  # its own .pth files are not read
    python = str(tmp_path / "venv" / "bin" / "python")
    given = ["--part", "a", "--only", "n", "--out", str(tmp_path / "rows.jsonl")]
    done = subprocess.run([python, *PROGRAM[1:], *given], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(tmp_path / "rows.jsonl")
    assert {"a sanitize memcheck", f"a tests {CONFORMANCE}"} <= found.keys()
    assert not [row for row in found.values() if "failed" in row]
