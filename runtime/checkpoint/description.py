"""Writes the two JSON files of a checkpoint, for jobs and for conversions. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moec.codegen.plan import Plan
from moec.runtime.checkpoint.format.files import write_file
from moec.runtime.checkpoint.format.index import HEAD, INDEX, canonical, digest, head_bytes, refuse_unreadable
from moec.runtime.checkpoint.model_fields import fields_of


def write_description(
    folder: Path,
    target: Path,
    plan: Plan,
    shards: Sequence[tuple[int, str]],
    head: Mapping[str, Any],
    index: Mapping[str, Any],
) -> None:
    """Writes `index.json` and `checkpoint.json` to `folder`, which will be `target`.

    `shards`: of each rank the bytes of its shard, and the digest of the shard's header. `head` and `index` are the
    other fields of `Head` and `Index`. Raises `OSError`, and `JobError` MOE0804 for files that no reader would take.
    """
    content = canonical({"model": fields_of(plan.spec), "headers": [header for _, header in shards], **index})
    fields = {"model": plan.name, "spec": digest(plan.spec_text.encode()), "world_size": len(shards), **head}
    sizes = [num_bytes for num_bytes, _ in shards]
    first = head_bytes({**fields, "shard_bytes": sizes, "index": digest(content)})
    refuse_unreadable(target, first, content)
    write_file(folder / INDEX, content)
    write_file(folder / HEAD, first)


def degrees_of(plan: Plan) -> dict[str, dict[str, int]]:
    """The degrees of each mesh."""
    return {name: dict(mesh.axes) for name, mesh in plan.meshes.items()}
