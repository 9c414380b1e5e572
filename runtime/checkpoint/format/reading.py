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
from moec.runtime.checkpoint.format.grid import Box, boxes_of_run, cell_box, cell_of, cells_over, moved, overlap, whole
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
from moec.runtime.checkpoint.format.shards import Place, ShardFile, open_file
from moec.runtime.errors import JobError

OPEN_SHARDS = 64
"""Shards that stay open at a time."""
THREADS = max(1, min(8, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)))


class Copy(NamedTuple):
    """Elements of a block to copy: they begin at element `first` of the block, as a box of shape `shape`.

    `source` cuts that box; `target` says where it goes, counted from the first element of the wanted part.
    """

    first: int
    shape: tuple[int, ...]
    source: tuple[slice, ...]
    target: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A block of the cell of tensor `name` that is in the shard of `rank`. `copies`: what a reader wants of it.

    It begins at byte `first` of the cell.
    """

    rank: int
    name: str
    first: int
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
        """The blocks with elements of `box`, a part of tensor `name`, or of all of it."""
        entry = self.index.tensors[name]
        box = whole(entry.shape) if box is None else box
        for number, cell, both in cells_over(entry.shape, entry.cuts, box):
            wanted, origin = moved(both, cell), moved(box, cell)
            for block, first in enumerate(range(0, entry.cell_bytes, BLOCK_BYTES)):
                last = min(first + BLOCK_BYTES, entry.cell_bytes)
                run = first // entry.item_bytes, last // entry.item_bytes
                copies = tuple(_copies(entry.cell_shape, run, wanted, origin))
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

        def read(block: Block) -> None:
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
            for _ in pool.map(read, blocks):
                pass

    def _read(self, block: Block, buffer: memoryview, check: bool) -> memoryview:
        shard = self.shard(block.rank)
        content = shard.read(self._place(shard, block.name).offset + block.first, buffer)
        if check and digest(content) != block.digest:
            raise damaged(shard.path, f"{block.name}: a digest does not match its content")
        return content

    def _place(self, shard: ShardFile, name: str) -> Place:
        """Where a shard has its cell of a tensor; dtype and shape must be those of the index."""
        place, entry = shard.places.get(name), self.index.tensors[name]
        if place is None:
            raise damaged(shard.path, f"{name} is missing")
        if (place.dtype, place.shape) != (entry.dtype, entry.cell_shape):
            raise damaged(
                shard.path,
                f"{name} is {place.dtype} {list(place.shape)}, but in {INDEX} {entry.dtype} {list(entry.cell_shape)}",
            )
        return place


def _copies(shape: tuple[int, ...], run: tuple[int, int], wanted: Box, origin: Box) -> Iterator[Copy]:
    """The copies from elements `run` of a cell of `shape` to a reader's part.

    `wanted`: the box of the cell that the reader wants. `origin`: the box of the reader's whole part. Both count from
    the cell's first element.
    """
    for first, box in boxes_of_run(shape, *run):
        both = overlap(box, wanted)
        if both is not None:
            source, target = (tuple(slice(*ends) for ends in moved(both, zero)) for zero in (box, origin))
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
    """A line for every damaged shard and tensor; reads all of a checkpoint. `progress` gets numbers of bytes."""
    cells_of_rank: dict[int, list[tuple[str, Box]]] = {rank: [] for rank in range(checkpoint.head.world_size)}
    for name, entry in checkpoint.index.tensors.items():
        for number, rank in enumerate(entry.files):
            cells_of_rank[rank].append((name, cell_box(entry.shape, entry.cuts, cell_of(entry.cuts, number))))
    for rank, cells in cells_of_rank.items():
        try:
            shard = checkpoint.shard(rank)
        except JobError as error:
            named = ", ".join(name for name, _ in cells[:3]) + (", …" if len(cells) > 3 else "")
            yield f"{error.diagnostics[0].message}; it has parts of {len(cells)} tensors ({named})"
            continue
        foreign = sorted(shard.places.keys() - {name for name, _ in cells})
        if foreign:
            yield f"{shard.path}: {foreign[0]} is not in {INDEX}"
        found = _Found({})
        checkpoint.read(
            (block for cell in cells for block in checkpoint.blocks(*cell)),
            lambda block, _: progress(block.num_bytes),
            check=True,
            complain=found.add,
        )
        yield from (found.by_name[name] for name in sorted(found.by_name))  # threads find them in any order


@dataclass(frozen=True, slots=True)
class _Found:
    """The first damage of each tensor."""

    by_name: dict[str, str]

    def add(self, block: Block, error: JobError) -> None:
        self.by_name.setdefault(block.name, error.diagnostics[0].message)
