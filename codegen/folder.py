"""The plan folder, written atomically and deterministically. `reading.py` reads it.

tiny.plan/
  plan.json      the manifest, the digest of every other file, and its own digest
  stages/0.json  the graphs of a stage
  stages/0.py    the same as readable Python, for people
  kernels/*.py   Triton kernels for its layers, for people and profilers; none for processors
  tiles.json     the tiles that `moec tune` measured, once it has
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from moec.codegen.plan import Plan
from moec.codegen.plan_kernels import kernel_files
from moec.codegen.python import python_text
from moec.codegen.stored_tiles import FILE
from moec.grammar.diagnostics import DiagnosticError, diagnose

MANIFEST = "plan.json"


class PlanError(DiagnosticError):
    """A plan that cannot be trusted, or cannot be written."""

    def __init__(self, code: str, path: Path, message: str, help: str) -> None:
        super().__init__([diagnose(code, None, f"{path}: {message}", help=help)])


def plan_files(plan: Plan) -> dict[str, bytes]:
    """The files of a plan by their path in its folder. Equal plans give equal bytes."""
    files: dict[str, bytes] = {}
    for stage in plan.stages:
        files[f"stages/{stage.index}.json"] = canonical(stage.to_json())
        files[f"stages/{stage.index}.py"] = python_text(stage).encode()
    if plan.tiles is not None:
        files[FILE] = canonical(plan.tiles.model_dump(mode="json"))
    files |= {name: text.encode() for name, text in kernel_files(plan).items()}
    digests = {name: digest(content) for name, content in files.items()}
    manifest = plan.manifest.model_dump(mode="json") | {"files": digests}
    files[MANIFEST] = canonical(manifest | {"digest": digest(canonical(manifest))})
    return files


def write_plan(plan: Plan, target: Path) -> Path:
    """Writes `plan` to the folder `target`, which then holds either the old plan or the whole new one.

    A folder cannot be renamed onto another, so the old one is moved aside first: a crash between the two renames leaves
    it beside the target, as `.NAME.old.*`.

    Raises `PlanError` where `target` is something other than a plan, or cannot be written.
    """
    if target.exists() and not (target / MANIFEST).is_file() and not (target.is_dir() and not any(target.iterdir())):
        raise PlanError("MOE0603", target, "exists", "choose another -o")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise _unwritable(target, error) from error
    try:
        for name, content in plan_files(plan).items():
            file = fresh / name
            file.parent.mkdir(exist_ok=True)
            with file.open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
        fresh.chmod(0o755)
        _swap(fresh, target)
    except OSError as error:
        raise _unwritable(target, error) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def _unwritable(target: Path, error: OSError) -> PlanError:
    return PlanError("MOE0604", target, str(error.strerror), "choose another -o")


def _swap(fresh: Path, target: Path) -> None:
    if not target.exists():
        fresh.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    target.rename(old / "plan")
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def canonical(content: Any) -> bytes:
    """The one way that moec writes this JSON."""
    return (json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def digest(content: bytes) -> str:
    """SHA-256, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()
