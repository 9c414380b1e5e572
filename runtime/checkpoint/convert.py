"""A checkpoint's model as one safetensors file of whole tensors, and such a file as a checkpoint. Needs no torch."""

from __future__ import annotations

import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from moec.codegen.plan import Plan
from moec.runtime.checkpoint.description import write_description
from moec.runtime.checkpoint.folders import Temporary, exists, sync_folder, unwritable
from moec.runtime.checkpoint.index import BLOCK_BYTES, ITEM_BYTES, MODEL, Entry, digest, shard_name
from moec.runtime.checkpoint.reading import Block, Checkpoint
from moec.runtime.checkpoint.shards import ShardFile, Written, header_of
from moec.runtime.errors import JobError

MASTER = "F32"
"""The dtype of a job's parameters and states."""


def to_safetensors(checkpoint: Checkpoint, target: Path) -> int:
    """Writes parameters and states, whole, to the new file `target`; returns its bytes. Optimizer and extras stay out.

    Reads block by block, each block checked. Raises `JobError` MOE0801, MOE0803, MOE0804.
    """
    if os.path.lexists(target):
        raise exists(target)
    entries = {n.removeprefix(MODEL): e for n, e in checkpoint.index.tensors.items() if n.startswith(MODEL)}
    ordered = sorted(entries, key=lambda name: (-entries[name].item_bytes, name))
    header = header_of((name, entries[name].dtype, entries[name].shape, entries[name].num_bytes) for name in ordered)
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with fresh.open("xb") as stream:
            stream.write(header)
            offset = len(header)
            for name in ordered:
                _copy(checkpoint, name, entries[name], fresh, stream.fileno(), offset)
                offset += entries[name].num_bytes
            stream.flush()
            os.fsync(stream.fileno())
        fresh.rename(target)
        sync_folder(target.parent)
    except OSError as error:
        raise unwritable(target, error) from error
    finally:
        fresh.unlink(missing_ok=True)
    return offset


def _copy(checkpoint: Checkpoint, name: str, entry: Entry, path: Path, file: int, offset: int) -> None:
    """Copies one tensor to `offset` of the file. Its pages are written back as the system needs memory."""
    if not entry.num_bytes:
        return
    # Reserves the blocks first: a full disk is an error here, and not a signal when a page is touched.
    os.posix_fallocate(file, offset, entry.num_bytes)
    item = np.dtype(f"V{entry.item_bytes}")
    whole = np.memmap(path, dtype=item, mode="r+", offset=offset, shape=entry.shape or (1,)).reshape(entry.shape)

    def place(block: Block, content: memoryview) -> None:
        flat = np.frombuffer(content, dtype=item)
        for part in block.copies:
            box = flat[part.first : part.first + math.prod(part.shape)].reshape(part.shape)
            whole[part.target] = box[part.source]

    checkpoint.read(checkpoint.blocks(MODEL + name), place, check=True)


def from_safetensors(source: Path, target: Path, plan: Plan, version: str) -> int:
    """Writes a checkpoint of step 0 at `target` with the tensors of a safetensors file; returns the shard's bytes.

    It has the model's tensors alone and loads under any plan of the model. The file must have every parameter and state
    of `plan` in fp32, by its name. Raises `JobError` MOE0800, MOE0801, MOE0803, MOE0804, and MOE0805 for other tensors.
    """
    file = ShardFile(source)
    _require_tensors(source, file, plan)
    temporary = Temporary(target)
    try:
        written, tensors = _write_whole(file, temporary.path / shard_name(0))
        head = {"moec": version, "step": 0, "data_size": 1, "degrees": {}, "optimizer": None}
        index = {
            "tensors": tensors, "settings": {"seed": 0, "step": 0}, "job_steps": 0, "optimizer": None, "extras": {},
        }  # fmt: skip
        write_description(temporary.path, target, plan, [(written.num_bytes, written.header)], head, index)
        temporary.publish()
    except OSError as error:
        raise unwritable(target, error) from error
    finally:
        if temporary.path.exists():
            temporary.discard()
    return written.num_bytes


def _write_whole(file: ShardFile, path: Path) -> tuple[Written, dict[str, Any]]:
    """Writes the one shard of a checkpoint, block by block; returns what it is, and the entries of its index."""
    ordered = sorted(file.places, key=lambda name: (-ITEM_BYTES[file.places[name].dtype], name))
    places = {MODEL + name: file.places[name] for name in ordered}
    header = header_of((name, place.dtype, place.shape, place.num_bytes) for name, place in places.items())
    digests = dict[str, str]()
    with path.open("xb") as stream:
        stream.write(header)
        for name, place in places.items():
            found = []
            for first, last in pairwise([*range(0, place.num_bytes, BLOCK_BYTES), place.num_bytes]):
                block = file.read(place.offset + first, memoryview(bytearray(last - first)))
                found.append(digest(block))
                stream.write(block)
            digests[name] = "".join(found)
        stream.flush()
        os.fsync(stream.fileno())
    tensors = {
        name: {
            "dtype": place.dtype, "shape": place.shape, "cuts": [1] * len(place.shape), "files": [0],
            "digests": [digests[name]],
        }
        for name, place in places.items()
    }  # fmt: skip
    num_bytes = len(header) + sum(place.num_bytes for place in places.values())
    return Written(num_bytes, digest(header), digests), tensors


def _require_tensors(source: Path, shard: ShardFile, plan: Plan) -> None:
    """Raises `JobError` MOE0805 unless the file has exactly the plan's tensors."""
    wanted = {name: (MASTER, data.shape) for name, data in plan.parameters.items()}
    wanted |= {name: (MASTER, tuple(int(d) for d in state.shape)) for name, state in plan.states.items()}
    for name in sorted(wanted.keys() | shard.places.keys()):
        here = shard.places.get(name)
        there = "missing" if here is None else f"{here.dtype} {list(here.shape)}"
        plans = f"{wanted[name][0]} {list(wanted[name][1])}" if name in wanted else "missing"
        if there != plans:
            raise JobError(
                "MOE0805",
                f"{source} is not {plan.name}: {name} is {there} in the file, {plans} in the plan",
                "give a file that `moec checkpoint convert` wrote, or one with the plan's names, in fp32",
            )
