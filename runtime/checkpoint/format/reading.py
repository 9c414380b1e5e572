"""Reads parts of a checkpoint's tensors, block by block, each block checked by its digest. Needs no torch."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from moec.runtime.checkpoint.format.faults import damaged, missing
from moec.runtime.checkpoint.format.grid import (
    Box,
    boxes_of_run,
    chunk_at,
    chunk_box,
    chunks_overlapping,
    full_box,
    overlap,
    relative_to,
)
from moec.runtime.checkpoint.format.index import (
    BLOCK_BYTES,
    HEAD,
    INDEX,
    MAX_HEAD_BYTES,
    MAX_INDEX_BYTES,
    Head,
    Index,
    digest,
    parse_head,
    parse_index,
    shard_name,
)  # fmt: skip
from moec.runtime.checkpoint.format.shards import ShardFile, StoredTensor, open_file
from moec.runtime.errors import JobError

OPEN_SHARDS = 64
"""Shards that stay open at a time."""
THREADS = max(1, min(8, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)))


class Copy(NamedTuple):
    """A copy from a block. The block's elements from number `first` on form a box of `shape`.

    The slices `source` of that box go to the slices `target` of the reader's part.
    """

    first: int
    shape: tuple[int, ...]
    source: tuple[slice, ...]
    target: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a chunk of tensor `name`, in the shard of `rank`; it begins at byte `first_byte` of the chunk.

    `copies` bring the elements that the reader wants into its part.
    """

    rank: int
    name: str
    first_byte: int
    num_bytes: int
    digest: str
    copies: tuple[Copy, ...]


class Checkpoint:
    """A checkpoint that is open for reading. Opening it checks `checkpoint.json` and `index.json`.

    Raises `JobError`: MOE0800 if there is none, MOE0801 if it is damaged, MOE0802 if it has another format.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.head: Head = read_head(self.path)
        content = read_file(self.path / INDEX, MAX_INDEX_BYTES)
        self.index: Index = parse_index(self.path / INDEX, content, self.head)
        self._shards = OrderedDict[int, ShardFile]()
        self._lock = threading.Lock()

    def shard(self, rank: int) -> ShardFile:
        """The shard of `rank`, its header checked. The last few stay open. Threads may call it at the same time."""
        with self._lock:
            if rank not in self._shards:
                size, header = self.head.shard_bytes[rank], self.index.headers[rank]
                self._shards[rank] = ShardFile(self.path / shard_name(rank), size, header)
            self._shards.move_to_end(rank)
            if len(self._shards) > OPEN_SHARDS:
                self._shards.popitem(last=False)
            return self._shards[rank]

    def blocks(self, name: str, box: Box | None = None) -> Iterator[Block]:
        """The blocks that have elements of `box`, a part of tensor `name`; None is the whole tensor."""
        entry = self.index.tensors[name]
        box = full_box(entry.shape) if box is None else box
        for number, chunk, common in chunks_overlapping(entry.shape, entry.cuts, box):
            wanted, origin = relative_to(common, chunk), relative_to(box, chunk)
            for block, first in enumerate(range(0, entry.chunk_bytes, BLOCK_BYTES)):
                last = min(first + BLOCK_BYTES, entry.chunk_bytes)
                run = first // entry.item_bytes, last // entry.item_bytes
                copies = tuple(_copies(entry.chunk_shape, run, wanted, origin))
                if copies:
                    stated = entry.digests[number][64 * block : 64 * (block + 1)]
                    yield Block(entry.files[number], name, first, last - first, stated, copies)

    def read(
        self,
        blocks: Iterable[Block],
        use: Callable[[Block, memoryview], None] | None = None,
        *,
        check: bool,
        complain: Callable[[Block, JobError], None] | None = None,
    ) -> None:
        """Reads blocks with several threads, best sorted by `rank`. `use` gets each block and its bytes.

        `check` compares digests. Needs one block of memory per thread. Raises `JobError` for a damaged block, or calls
        `complain` and goes on.
        """
        local = threading.local()

        def read_block(block: Block) -> None:
            if not hasattr(local, "buffer"):
                local.buffer = memoryview(bytearray(BLOCK_BYTES))
            try:
                content = self._read(block, local.buffer[: block.num_bytes], check)
            except JobError as error:
                if complain is None:
                    raise
                complain(block, error)
            else:
                if use is not None:
                    use(block, content)

        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(read_block, blocks):
                pass

    def _read(self, block: Block, buffer: memoryview, check: bool) -> memoryview:
        shard = self.shard(block.rank)
        content = shard.read(self._place(shard, block.name).offset + block.first_byte, buffer)
        if check and digest(content) != block.digest:
            raise damaged(shard.path, f"{block.name}: a digest does not match its content")
        return content

    def _place(self, shard: ShardFile, name: str) -> StoredTensor:
        """The chunk of a tensor in a shard's header; dtype and shape must be those of the index."""
        tensor, entry = shard.tensors.get(name), self.index.tensors[name]
        if tensor is None:
            raise damaged(shard.path, f"{name} is missing")
        if (tensor.dtype, tensor.shape) != (entry.dtype, entry.chunk_shape):
            raise damaged(
                shard.path,
                f"{name} is {tensor.dtype} {list(tensor.shape)}, but in {INDEX} "
                f"{entry.dtype} {list(entry.chunk_shape)}",
            )
        return tensor


def _copies(shape: tuple[int, ...], run: tuple[int, int], wanted: Box, origin: Box) -> Iterator[Copy]:
    """The copies to a reader's part from the elements `run` (first, last) of a chunk of `shape`.

    `wanted` is the box of the chunk that the reader wants, `origin` the box of its part. Both count from the chunk's
    first element.
    """
    for first, box in boxes_of_run(shape, *run):
        common = overlap(box, wanted)
        if common is not None:
            source, target = (
                tuple(slice(*ends) for ends in relative_to(common, start_box)) for start_box in (box, origin)
            )
            yield Copy(first - run[0], tuple(stop - start for start, stop in box), source, target)


def read_head(path: Path) -> Head:
    """`checkpoint.json` of a checkpoint. Raises `JobError`."""
    return parse_head(path / HEAD, read_file(path / HEAD, MAX_HEAD_BYTES))


def read_file(path: Path, limit: int) -> bytes:
    """A file of at most `limit` bytes that is no link. Raises `JobError`."""
    file, size = open_file(path)
    with os.fdopen(file, "rb") as stream:
        if size > limit:
            raise damaged(path, f"it has {size} bytes; the limit is {limit}")
        try:
            return stream.read(limit)
        except OSError as error:
            raise missing(path, error) from error


def damages(checkpoint: Checkpoint, progress: Callable[[int], None] = lambda _: None) -> Iterator[str]:
    """Reads a whole checkpoint; gives a line for every damaged shard and tensor. `progress` gets numbers of bytes."""
    first_damage: dict[str, str] = {}

    def complain(block: Block, error: JobError) -> None:
        first_damage.setdefault(block.name, error.diagnostics[0].message)

    chunks_of_rank: dict[int, list[tuple[str, Box]]] = {rank: [] for rank in range(checkpoint.head.world_size)}
    for name, entry in checkpoint.index.tensors.items():
        for number, rank in enumerate(entry.files):
            chunks_of_rank[rank].append((name, chunk_box(entry.shape, entry.cuts, chunk_at(entry.cuts, number))))
    for rank, chunks in chunks_of_rank.items():
        try:
            shard = checkpoint.shard(rank)
        except JobError as error:
            named = ", ".join(name for name, _ in chunks[:3]) + (", …" if len(chunks) > 3 else "")
            yield f"{error.diagnostics[0].message}; it has parts of {len(chunks)} tensors ({named})"
            continue
        foreign = sorted(shard.tensors.keys() - {name for name, _ in chunks})
        if foreign:
            yield f"{shard.path}: {foreign[0]} is not in {INDEX}"
        checkpoint.read(
            (block for chunk in chunks for block in checkpoint.blocks(*chunk)),
            lambda block, _: progress(block.num_bytes),
            check=True,
            complain=complain,
        )
        yield from (first_damage[name] for name in sorted(first_damage))  # threads complain in any order
        first_damage.clear()
