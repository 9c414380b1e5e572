"""Writes the plan folder, atomically and deterministically. `reading.py` reads it.

tiny.plan/
  plan.json      format, version, the rank lists of the groups, the digest of every other file, and its own digest
  spec.moe       the canonical text of the compiled Spec
  program.ir     the placed Program, as text
  tiles.json     the tiles that `moec tune` measured, if any
  report.json    what a search found, if one chose words of the plan
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from moec.codegen.plan import FORMAT, Plan
from moec.grammar.diagnostics import DiagnosticError, diagnose
from moec.grammar.folder_kinds import PLAN, PLAN_TEXT
from moec.passes.ir.texts.text import print_program

MANIFEST, SPEC, PROGRAM, TILES, REPORT = PLAN, PLAN_TEXT, "program.ir", "tiles.json", "report.json"


class PlanError(DiagnosticError):
    """A plan folder differs from what moec writes, or cannot be written."""

    def __init__(self, code: str, path: Path, message: str, help: str) -> None:
        super().__init__([diagnose(code, None, f"{path}: {message}", help=help)])


def plan_files(plan: Plan) -> dict[str, bytes]:
    """The files of a plan by their path in its folder. Equal plans with equal reports give equal bytes."""
    files = {SPEC: plan.spec_text.encode(), PROGRAM: print_program(plan.program).encode()}
    if plan.tiles is not None:
        files[TILES] = canonical(plan.tiles.model_dump(mode="json"))
    if plan.report is not None:
        files[REPORT] = canonical(plan.report.as_data())
    manifest = {
        "format": FORMAT,
        "moec": plan.moec,
        "groups": plan.groups,
        "files": {name: digest(content) for name, content in files.items()},
    }
    return {MANIFEST: canonical(manifest | {"digest": digest(canonical(manifest))}), **files}


def write_plan(plan: Plan, target: Path) -> Path:
    """Writes `plan` to the folder `target`. After a crash the folder is the old plan, the whole new one, or missing.

    A folder cannot be renamed onto another, so the old one is moved aside first: a crash between the two renames leaves
    it beside the target, as `.NAME.old.*`.

    Raises `PlanError` where `target` is something other than a plan, or cannot be written.
    """
    if target.exists() and not (target / MANIFEST).is_file() and not (target.is_dir() and not any(target.iterdir())):
        raise PlanError("MOE0603", target, "exists", "choose another folder with -o")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise _unwritable(target, error) from error
    try:
        for name, content in plan_files(plan).items():
            file = fresh / name
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
    return PlanError("MOE0604", target, str(error.strerror), "choose another folder with -o")


def _swap(fresh: Path, target: Path) -> None:
    if not target.exists():
        fresh.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    target.rename(old / "plan")
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def canonical(content: Any) -> bytes:
    """Canonical JSON: equal content gives equal bytes."""
    return (json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def digest(content: bytes) -> str:
    """SHA-256, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()
