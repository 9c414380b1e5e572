"""Reads a plan folder: byte for byte what `folder.py` writes, or refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from moec.codegen.checks import refuse, require_consistent
from moec.codegen.folder import MANIFEST, PlanError, canonical, digest, plan_files
from moec.codegen.graph import Data, StageGraphs
from moec.codegen.plan import FORMAT, Manifest, Plan
from moec.codegen.stored_tiles import FILE as TILES
from moec.codegen.stored_tiles import StoredTiles

MAX_FILE_BYTES = 64 * 1024 * 1024
"""A larger file is refused unread. The largest that moec writes, a stage of 1,000 distinct layers, has about 30 MB."""

DataT = TypeVar("DataT", bound=Data)


def read_plan(path: str | Path) -> Plan:
    """Reads a plan folder. Nothing of it is executed, imported or unpickled.

    Raises `PlanError` for anything that is not, byte for byte, what `write_plan` wrote: a truncated or edited file, a
    digest that does not match, a name or operator that graphs may not have, a newer format.
    """
    root = Path(path)
    content = _read(root / MANIFEST)
    manifest, digests = _manifest(root / MANIFEST, content)
    stages = []
    for index in range(manifest.num_stages):
        stages.append(_listed(StageGraphs, root, f"stages/{index}.json", digests))
    # A file that plan.json does not list is none of the plan's: left unread, it would be taken for what is in force.
    has_tiles = TILES in digests or (root / TILES).exists()
    plan = Plan(manifest, tuple(stages), _listed(StoredTiles, root, TILES, digests) if has_tiles else None)
    require_consistent(root, plan)
    for name, expected in plan_files(plan).items():
        if not (root / name).exists() or _read(root / name) != expected:
            raise refuse(root / name, "it is not what moec writes for this plan")
    return plan


def _manifest(path: Path, content: bytes) -> tuple[Manifest, Mapping[str, str]]:
    data = _strict_json(path, content)
    if not isinstance(data, dict):
        raise refuse(path, "it is not a JSON object")
    if data.get("format") != FORMAT:
        raise PlanError(
            "MOE0602",
            path,
            f"format {str(data.get('format'))[:20]}, this moec reads {FORMAT}",
            "compile the .moe file again with this moec, or use the moec that wrote it",
        )
    stated = data.pop("digest", None)
    if stated != digest(canonical(data)):
        raise refuse(path, "its digest does not match its content")
    digests = data.pop("files", None)
    if not isinstance(digests, dict):
        raise refuse(path, "it lists no files")
    return _validated(Manifest, path, json.dumps(data).encode()), digests


def _listed(model: type[DataT], root: Path, name: str, digests: Mapping[str, str]) -> DataT:
    """The content of a file that plan.json vouches for."""
    file = root / name
    if not file.exists():
        raise refuse(file, "it is missing")
    raw = _read(file)
    if digest(raw) != digests.get(name):
        raise refuse(file, "its digest does not match plan.json")
    return _validated(model, file, raw)


def _read(path: Path) -> bytes:
    try:
        if path.is_symlink():
            raise refuse(path, "it is a link")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise refuse(path, f"it is larger than {MAX_FILE_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise PlanError("MOE0600", path, str(error.strerror), "`moec compile FILE -o DIR` writes one") from error


def _strict_json(path: Path, content: bytes) -> Any:
    def no_constant(name: str) -> Any:
        raise ValueError(f"{name} is no number")

    try:
        return json.loads(content.decode(), parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise refuse(path, f"it is not JSON ({str(error)[:100]})") from error


def _validated(model: type[DataT], path: Path, content: bytes) -> DataT:
    _strict_json(path, content)
    try:
        return model.model_validate_json(content)
    except (ValidationError, RecursionError) as error:
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise refuse(path, f"{where}: {first['msg']}") from error
        raise refuse(path, "it is nested too deeply") from error
