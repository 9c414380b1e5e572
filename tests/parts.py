"""`make test-all`: every test, slow ones and many random examples too, in parts that can be run alone.

`python tests/parts.py [PART ...]`. A part that passed on these files is not run again; results.json beside this file
has the latest result of each. Ends with 1 where a part failed.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests" / "results.json"

PARTS = {
    "ranks": ["tests/distributed"],
    "jobs": ["tests/unit/jobs"],
    "compiler": ["tests/unit/passes", "tests/unit/codegen", "tests/cases", "tests/words", "tests/oracles"],
    "kernels": ["tests/kernels", "tests/unit/runtime", "tests/gpu"],
    "properties": ["tests/property"],
    "huggingface": ["tests/huggingface"],
}
"""Folders of each part; `REST` has all others."""

REST = "rest"
PROCESSES = {"ranks": 1}
"""Processes of pytest in a part, 2 where it is not listed: ranks are processes themselves."""


def main() -> None:
    wanted = sys.argv[1:] or [*PARTS, REST]
    unknown = set(wanted) - {*PARTS, REST}
    if unknown:
        sys.exit(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join([*PARTS, REST])}")
    results = [passed_before(part, digest()) or run(part) for part in wanted]
    sys.exit(any(result["failed"] for result in results))


def digest() -> str:
    """A hash of every tracked or new file as it lies here, but for RESULTS, and of what runs the tests."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    found = hashlib.sha256(f"{sys.version} {versions()} {os.environ.get('MOEC_BACKEND')} {devices()}".encode())
    for name in sorted(filter(None, listed.decode().split("\0"))):
        path = ROOT / name
        if path.is_file() and path != RESULTS:
            found.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


def passed_before(part: str, files: str) -> dict[str, Any] | None:
    """The result of a part that passed on the same files."""
    result: dict[str, Any] = stored().get(part, {})
    if result.get("files") != files or result["failed"] or not result["passed"]:
        return None
    print(f"== {part}: passed on these files on {result['date']}, {result['passed']} tests in {result['seconds']} s")
    return result


def versions() -> list[str]:
    """Of all installed packages."""
    return sorted(f"{each.name} {each.version}" for each in metadata.distributions())


def devices() -> list[str]:
    """The drivers of GPUs: without one, their tests are skipped."""
    return [path for path in ("/dev/nvidia0", "/dev/kfd") if os.path.exists(path)]


def run(part: str) -> dict[str, Any]:
    """Runs a part and stores its result. It counts for no files where they change meanwhile."""
    files = digest()
    day = datetime.date.today()
    seed, begun = day.strftime("%Y%m%d"), time.monotonic()
    print(f"== {part}: random examples are drawn with the seed {seed}", flush=True)
    elsewhere = [f"--ignore={folder}" for folders in PARTS.values() for folder in folders]
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder, "counts.json")
        command = [sys.executable, "-m", "pytest", "--everything", f"--hypothesis-seed={seed}", f"--counts={counts}"]
        command += ["-n", str(PROCESSES.get(part, 2)), *PARTS.get(part, ["tests", *elsewhere])]
        variables = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
        status = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, env=variables, check=False).returncode
        counted = json.loads(counts.read_text()) if counts.exists() else {}
    result = {"passed": 0, "failed": 0, "skipped": 0} | counted
    result["failed"] = result["failed"] or int(status != 0)
    result |= {"seconds": round(time.monotonic() - begun), "seed": int(seed), "date": str(day)}
    result["files"] = files if digest() == files else "changed meanwhile"
    store(part, result)
    return result


def stored() -> dict[str, Any]:
    """The latest results, by part."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return found


def store(part: str, result: dict[str, Any]) -> None:
    """Writes RESULTS again with this result of `part`."""
    whole = json.dumps(dict(sorted({**stored(), part: result}.items())), indent=2)
    temporary = RESULTS.with_name(f".{RESULTS.name}.{os.getpid()}")
    temporary.write_text(whole + "\n", encoding="utf-8")
    temporary.replace(RESULTS)


if __name__ == "__main__":
    main()
