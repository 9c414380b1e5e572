"""A checkpoint's model as one safetensors file of whole tensors, and such a file as a checkpoint. Needs no torch."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from moec.codegen.plan import Plan
from moec.passes.ir import STEP
from moec.runtime.checkpoint.description import write_description
from moec.runtime.checkpoint.format.files import give_name, refuse_existing, sync_name, unwritable
from moec.runtime.checkpoint.format.index import BLOCK_BYTES, ITEM_BYTES, MODEL, Entry, digest, empty_entry, shard_name
from moec.runtime.checkpoint.format.reading import Block, Checkpoint
from moec.runtime.checkpoint.format.shards import LENGTH_BYTES, ShardFile, StoredTensor, WrittenShard, header_of
from moec.runtime.checkpoint.format.temporary import Temporary
from moec.runtime.errors import JobError
from moec.runtime.model.run import new_id

MASTER = "F32"
"""The dtype of a job's parameters and states."""
NARROW = "BF16", "F16"
"""Dtypes whose values all are values of `MASTER` too."""

Advance = Callable[[int], None]
"""Gets the number of bytes since its last call, for a progress bar."""


def no_progress(num_bytes: int) -> None:
    """Shows nothing."""


def to_safetensors(checkpoint: Checkpoint, target: Path, advance: Advance = no_progress) -> int:
    """Writes whole parameters and states to the new file `target`; returns its bytes. Omits optimizer and extras.

    Reads block by block and checks each block. Raises `JobError` MOE0801, MOE0803, MOE0804.
    """
    refuse_existing(target)
    entries = checkpoint.index.model_tensors
    ordered = sorted(entries, key=lambda name: (-entries[name].item_bytes, name))
    header = header_of((name, entries[name].dtype, entries[name].shape, entries[name].num_bytes) for name in ordered)
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with fresh.open("xb") as stream:
            stream.write(header)
            offset = len(header)
            for name in ordered:
                _copy(checkpoint, name, entries[name], fresh, stream.fileno(), offset, advance)
                offset += entries[name].num_bytes
            stream.flush()
            os.fsync(stream.fileno())
        give_name(fresh, target)
    except OSError as error:
        raise unwritable(target, error) from error
    finally:
        fresh.unlink(missing_ok=True)
    sync_name(target)
    return offset


def _copy(
    checkpoint: Checkpoint, name: str, entry: Entry, path: Path, file: int, offset: int, advance: Advance
) -> None:
    """Copies one tensor to `offset` of the file. Its pages are written back as the system needs memory."""
    if not entry.num_bytes:
        return
    # Reserves the blocks first: a full disk is an error here, and not a signal when a page is touched.
    os.posix_fallocate(file, offset, entry.num_bytes)
    item = np.dtype(f"V{entry.item_bytes}")
    whole = np.memmap(path, dtype=item, mode="r+", offset=offset, shape=entry.shape or (1,)).reshape(entry.shape)

    def copy_block(block: Block, content: memoryview) -> None:
        flat = np.frombuffer(content, dtype=item)
        for part in block.copies:
            box = flat[part.first : part.first + math.prod(part.shape)].reshape(part.shape)
            whole[part.target] = box[part.source]
        advance(len(content))

    checkpoint.read(checkpoint.blocks(MODEL + name), copy_block, check=True)


def from_safetensors(source: Path, target: Path, plan: Plan, version: str, advance: Advance = no_progress) -> int:
    """Writes a checkpoint of step 0 at `target` with the tensors of a safetensors file; returns the shard's bytes.

    The checkpoint has the model's tensors alone and loads under any plan of the model; a model that loads it keeps its
    seed. The file must have every parameter and state of `plan` by its name, in fp32, bf16 or fp16; the latter two are
    widened to fp32, which is exact. Raises `JobError` MOE0800, MOE0801, MOE0803, MOE0804, and MOE0805 for other
    tensors.
    """
    file = _opened(source)
    _require_tensors(source, file, plan)
    tensors = [
        NewTensor(name, file.tensors[name].shape, _widened_blocks(file, file.tensors[name]))
        for name in sorted(file.tensors)
    ]
    return write_new(target, plan, version, tensors, advance=advance)


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A whole fp32 tensor of a new checkpoint: `content` gives its bytes in order, in pieces of any length."""

    name: str
    shape: tuple[int, ...]
    content: Iterable[memoryview]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[MASTER]


def shapes_of(plan: Plan) -> dict[str, tuple[int, ...]]:
    """The whole shape of every parameter and state."""
    shapes = {name: data.shape for name, data in plan.parameters.items()}
    return shapes | {name: tuple(int(dim) for dim in state.shape) for name, state in plan.states.items()}


def write_new(
    target: Path,
    plan: Plan,
    version: str,
    tensors: Sequence[NewTensor],
    beside: Callable[[Path], None] = lambda folder: None,
    advance: Advance = no_progress,
) -> int:
    """Writes a checkpoint of step 0 at `target` with the model's tensors alone; returns the shard's bytes.

    `beside` adds files to the folder before it gets its name. Raises `JobError` MOE0803, MOE0804, and the errors of the
    tensors' content and of `beside`; then no file remains.
    """
    temporary = Temporary(target)
    try:
        written, entries = _write_shard(temporary.path / shard_name(0), tensors, advance)
        head = {
            "moec": version, "run": new_id(), "saved": time.time_ns(), "step": 0, "data_size": 1, "degrees": {},
            "optimizer": None,
        }  # fmt: skip
        index = {
            "tensors": entries, "settings": {STEP.name: 0}, "job_steps": 0, "job_tokens": 0, "optimizer": None,
            "extras": {},
        }  # fmt: skip
        write_description(temporary.path, target, plan, [(written.num_bytes, written.header)], head, index)
        beside(temporary.path)
        temporary.publish()
    except OSError as error:
        raise unwritable(target, error) from error
    finally:
        if temporary.path.exists():
            temporary.discard()
    return written.num_bytes


def _write_shard(path: Path, tensors: Sequence[NewTensor], advance: Advance) -> tuple[WrittenShard, dict[str, Any]]:
    """Writes the only shard of a checkpoint, block by block; returns its description and the entries of its index."""
    header = header_of((MODEL + tensor.name, MASTER, tensor.shape, tensor.num_bytes) for tensor in tensors)
    digests, entries = dict[str, str](), dict[str, Any]()
    with path.open("xb") as stream:
        stream.write(header)
        for tensor in tensors:
            block_digests, name = [], MODEL + tensor.name
            for block in in_blocks(tensor.content):
                block_digests.append(digest(block))
                stream.write(block)
                advance(len(block))
            digests[name] = "".join(block_digests)
            entries[name] = empty_entry(MASTER, tensor.shape, (1,) * len(tensor.shape))
            entries[name].update(files=[0], digests=[digests[name]])
        stream.flush()
        os.fsync(stream.fileno())
    num_bytes = len(header) + sum(tensor.num_bytes for tensor in tensors)
    return WrittenShard(num_bytes, digest(header), digests), entries


def in_blocks(content: Iterable[memoryview]) -> Iterator[memoryview]:
    """The same bytes in blocks of `BLOCK_BYTES`, the last one shorter."""
    rest = bytearray()
    for piece in content:
        start = 0
        while start < len(piece):
            if not rest and len(piece) - start >= BLOCK_BYTES:
                yield piece[start : start + BLOCK_BYTES]
                start += BLOCK_BYTES
                continue
            taken = min(BLOCK_BYTES - len(rest), len(piece) - start)
            rest += piece[start : start + taken]
            start += taken
            if len(rest) == BLOCK_BYTES:
                yield memoryview(rest)
                rest = bytearray()
    if rest:
        yield memoryview(rest)


def _widened_blocks(file: ShardFile, tensor: StoredTensor) -> Iterator[memoryview]:
    """The values of a tensor in fp32, block by block."""
    size = math.prod(tensor.shape) * ITEM_BYTES[MASTER]
    ratio = ITEM_BYTES[MASTER] // ITEM_BYTES[tensor.dtype]
    for first, last in pairwise([*range(0, size, BLOCK_BYTES), size]):
        narrow = file.read(tensor.offset + first // ratio, memoryview(bytearray((last - first) // ratio)))
        yield _widened(narrow, tensor.dtype)


def _widened(block: memoryview, dtype: str) -> memoryview:
    """The bytes of the same values in fp32. bf16 is the upper half of fp32; numpy widens fp16."""
    if dtype == MASTER:
        return block
    if dtype == "BF16":
        return (np.frombuffer(block, "<u2").astype("<u4") << 16).data.cast("B")
    return np.frombuffer(block, "<f2").astype("<f4").data.cast("B")


def _opened(source: Path) -> ShardFile:
    """Opens a safetensors file. Raises `JobError` MOE0800 for one of another format, MOE0801 for a damaged one."""
    try:
        return ShardFile(source)
    except JobError as error:
        first = error.diagnostics[0]
        if first.code != "MOE0801" or source.is_symlink() or not source.is_file():
            raise
        with source.open("rb") as stream:
            begins = stream.read(LENGTH_BYTES + 1)[LENGTH_BYTES:]
        if begins == b"{":  # so begins every header
            raise JobError(first.code, first.message, "write or copy this file again") from error
        raise JobError(
            "MOE0800",
            f"{source} is not a safetensors file",
            "`safetensors.torch.save_file` writes one, from a dict of tensors such as "
            "`torch.load(PATH, weights_only=True)`",
        ) from error


def _require_tensors(source: Path, shard: ShardFile, plan: Plan) -> None:
    """Raises `JobError` MOE0805 unless the file has exactly the plan's tensors."""
    wanted = shapes_of(plan)
    for name in sorted(wanted.keys() | shard.tensors.keys()):
        here = shard.tensors.get(name)
        there = "missing" if here is None else f"{here.dtype} {list(here.shape)}"
        if here is not None and name in wanted and here.dtype in NARROW and here.shape == wanted[name]:
            continue
        plans = f"{MASTER} {list(wanted[name])}" if name in wanted else "missing"
        if there != plans:
            raise JobError(
                "MOE0805",
                f"{source} is not {plan.name}: {name} is {there} in the file, {plans} in the plan",
                "give a file that `moec checkpoint convert` wrote, or one with the plan's names, in fp32, bf16 or fp16",
            )
