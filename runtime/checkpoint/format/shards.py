"""A rank's shard: a safetensors file that is written and read in blocks, each with a digest. Needs no torch.

The safetensors library reads these files too, but it neither checks digests nor reads in bounded memory. So moec reads
the format itself: 8 bytes with the length of a JSON header, the header, the tensors' bytes.
"""

from __future__ import annotations

import json
import math
import os
import stat
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from moec.runtime.checkpoint.format.faults import damaged, missing
from moec.runtime.checkpoint.format.files import no_name
from moec.runtime.checkpoint.format.index import BLOCK_BYTES, ITEM_BYTES, digest

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""


class HostTensor(NamedTuple):
    """A C-ordered tensor in host memory that a shard will have: `content` are its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: memoryview


@dataclass(frozen=True, slots=True)
class WrittenShard:
    """A written shard: its size, its header's digest, and the digests of every tensor's blocks, joined."""

    num_bytes: int
    header: str
    digests: Mapping[str, str]


def header_of(
    tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """A safetensors header of (name, dtype, shape, bytes) in this order: its length, then JSON padded to 8 bytes."""
    table: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, dtype, shape, num_bytes in tensors:
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def widest_first(tensors: Iterable[HostTensor]) -> list[HostTensor]:
    """Widest elements first, so that every tensor is aligned."""
    return sorted(tensors, key=lambda tensor: (-ITEM_BYTES[tensor.dtype], tensor.name))


def write_shard(path: Path, tensors: Iterable[HostTensor]) -> WrittenShard:
    """Writes and syncs a shard while a daemon thread hashes its blocks. Raises `OSError`.

    The interpreter does not wait for a daemon thread: a job that ends with an error need not wait for a long shard.
    """
    ordered = widest_first(tensors)
    header = header_of((p.name, p.dtype, p.shape, len(p.content)) for p in ordered)
    hashes, is_unwanted = Future[dict[str, str]](), threading.Event()
    with path.open("xb", buffering=0) as stream:
        # No executor: at exit the interpreter waits for its threads, which first do all that is queued.
        threading.Thread(target=_hash, args=(ordered, hashes, is_unwanted), daemon=True).start()
        try:
            for content in (memoryview(header), *(tensor.content for tensor in ordered)):
                _write_all(stream, content)
            os.fsync(stream.fileno())
        except BaseException:
            is_unwanted.set()
            raise
    size = len(header) + sum(len(tensor.content) for tensor in ordered)
    return WrittenShard(size, digest(header), hashes.result())


def _hash(tensors: Iterable[HostTensor], hashes: Future[dict[str, str]], is_unwanted: threading.Event) -> None:
    """Puts the digests of every tensor's blocks, joined, into `hashes`. Stops early once `is_unwanted` is set."""
    digests = {}
    try:
        for tensor in tensors:
            block_digests = []
            for block in _blocks(tensor.content):
                if is_unwanted.is_set():
                    return
                block_digests.append(digest(block))
            digests[tensor.name] = "".join(block_digests)
    except Exception as error:  # noqa: BLE001 - raised by `hashes.result`
        hashes.set_exception(error)
    else:
        hashes.set_result(digests)


def _blocks(content: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(content), BLOCK_BYTES):
        yield content[start : start + BLOCK_BYTES]


def _write_all(stream: Any, content: memoryview) -> None:
    """Writes all of `content`: one call of a raw file's `write` may write less."""
    while content:
        content = content[stream.write(content[:BLOCK_BYTES]) :]


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file: its bytes begin `offset` bytes from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class ShardFile:
    """A safetensors file that is open for reading. Its header is checked, its tensors are not.

    Raises `JobError` for a link, a file whose size is not `num_bytes`, a header whose digest is not `header`, and a
    header that does not describe exactly the bytes that follow.
    """

    def __init__(self, path: Path, num_bytes: int | None = None, header: str | None = None) -> None:
        self.path = path
        self._file, self.num_bytes = open_file(path)
        weakref.finalize(self, os.close, self._file)  # when no thread uses it any more
        if num_bytes is not None and self.num_bytes != num_bytes:
            raise damaged(path, f"it has {self.num_bytes} bytes, but {num_bytes} were written")
        self.header = self._read_header()
        if header is not None and digest(self.header) != header:
            raise damaged(path, "the digest of its header does not match")
        self.tensors = parse_header(path, self.header, self.num_bytes)

    def read(self, offset: int, buffer: memoryview) -> memoryview:
        """Fills `buffer` from `offset` on. Raises `JobError`. Threads may call it at the same time."""
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(self._file, [buffer[done:]], offset + done)
            except OSError as error:
                raise missing(self.path, error) from error
            if not got:
                raise damaged(self.path, "it ends too early")
            done += got
        return buffer

    def _read_header(self) -> bytes:
        if self.num_bytes < LENGTH_BYTES:
            raise damaged(self.path, "it has no header")
        size = int.from_bytes(self._bytes(0, LENGTH_BYTES), "little")
        if size > min(MAX_HEADER_BYTES, self.num_bytes - LENGTH_BYTES):
            raise damaged(self.path, f"its header has {size} bytes, and the file {self.num_bytes}")
        return self._bytes(0, LENGTH_BYTES + size)

    def _bytes(self, offset: int, size: int) -> bytes:
        return bytes(self.read(offset, memoryview(bytearray(size))))


def open_file(path: Path) -> tuple[int, int]:
    """Opens a file for reading: its descriptor and its size. Raises `JobError` for a link, a pipe or a device."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if path.is_symlink():
            raise damaged(path, "it is a link") from error
        raise missing(path, error) from error
    except ValueError as error:  # a NUL in its name
        raise no_name(path, "MOE0800") from error
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        os.close(file)
        raise damaged(path, "it is no file")
    return file, status.st_size


def parse_header(path: Path | str, header: bytes, num_bytes: int | None = None) -> dict[str, StoredTensor]:
    """The tensors of a header, which must fill the file of `num_bytes` without a gap; None for a file of any size.

    Raises `JobError` MOE0801; `path` is named in it.
    """
    path = Path(path)
    tensors, end = {}, len(header)
    try:
        table = json.loads(header[LENGTH_BYTES:])
        named = [(name, value) for name, value in table.items() if name != "__metadata__"]
        for name, value in sorted(named, key=lambda item: item[1]["data_offsets"]):
            first, last = value["data_offsets"]
            shape = tuple(value["shape"])
            if not all(type(number) is int and number >= 0 for number in (first, last, *shape)):
                raise ValueError(f"{name} has a number that is no size")
            size = math.prod(shape) * ITEM_BYTES[value["dtype"]]
            if len(header) + first != end or last - first != size:
                raise ValueError(f"{name} does not begin where the tensor before it ends, or has another size")
            tensors[name] = StoredTensor(value["dtype"], shape, end, size)
            end += size
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged(path, f"its header is not that of a safetensors file ({str(error)[:200]})") from error
    if num_bytes is not None and end != num_bytes:
        raise damaged(path, f"its tensors end at byte {end}, the file at {num_bytes}")
    return tensors
