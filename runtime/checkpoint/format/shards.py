"""A rank's shard: one safetensors file, written and read in blocks that have a digest each. Needs no torch.

The safetensors library reads these files too. It neither checks digests nor reads in bounded memory, so that moec
reads the format itself: 8 bytes with the length of a JSON header, the header, the tensors' bytes.
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


class Piece(NamedTuple):
    """A tensor of a shard: `content` are its bytes, C-ordered."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: memoryview


@dataclass(frozen=True, slots=True)
class Written:
    """A written shard: its size, its header's digest, and the digests of every piece's blocks, end to end."""

    num_bytes: int
    header: str
    digests: Mapping[str, str]


def header_of(pieces: Iterable[tuple[str, str, Sequence[int], int]]) -> bytes:
    """The header for (name, dtype, shape, bytes) in this order, with its length, padded to 8 bytes."""
    table, offset = {}, 0
    for name, dtype, shape, num_bytes in pieces:
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def in_order(pieces: Iterable[Piece]) -> list[Piece]:
    """Widest elements first, so that every tensor is aligned."""
    return sorted(pieces, key=lambda piece: (-ITEM_BYTES[piece.dtype], piece.name))


def write_shard(path: Path, pieces: Iterable[Piece]) -> Written:
    """Writes and syncs a shard while a thread hashes its blocks. Raises `OSError`.

    The interpreter's exit waits for no thread of it: a job that ends with an error need not wait for a long shard.
    """
    ordered = in_order(pieces)
    header = header_of((p.name, p.dtype, p.shape, len(p.content)) for p in ordered)
    hashes, is_unwanted = Future[dict[str, str]](), threading.Event()
    with path.open("xb", buffering=0) as stream:
        # No executor: at exit the interpreter waits for its threads, which first do all that is queued.
        threading.Thread(target=_hash, args=(ordered, hashes, is_unwanted), daemon=True).start()
        try:
            for content in (memoryview(header), *(piece.content for piece in ordered)):
                _write_all(stream, content)
            os.fsync(stream.fileno())
        except BaseException:
            is_unwanted.set()
            raise
    size = len(header) + sum(len(piece.content) for piece in ordered)
    return Written(size, digest(header), hashes.result())


def _hash(pieces: Iterable[Piece], hashes: Future[dict[str, str]], is_unwanted: threading.Event) -> None:
    """Gives `hashes` the digests of every piece's blocks, end to end; gives up when they `is_unwanted`."""
    digests = {}
    try:
        for piece in pieces:
            found = []
            for block in _blocks(piece.content):
                if is_unwanted.is_set():
                    return
                found.append(digest(block))
            digests[piece.name] = "".join(found)
    except Exception as error:  # noqa: BLE001 - raised by `hashes.result`
        hashes.set_exception(error)
    else:
        hashes.set_result(digests)


def _blocks(content: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(content), BLOCK_BYTES):
        yield content[start : start + BLOCK_BYTES]


def _write_all(stream: Any, content: memoryview) -> None:
    """A raw file may write less than it is given."""
    while content:
        content = content[stream.write(content[:BLOCK_BYTES]) :]


class Place(NamedTuple):
    """Where a tensor lies in a safetensors file: `offset` from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class ShardFile:
    """A safetensors file that is open for reading. Its header is checked, its tensors are not.

    Raises `JobError` for a link, a file of another size than `num_bytes`, a header with another digest than `header`,
    and a header that is no description of exactly the bytes that follow.
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
        self.places = places_of(path, self.header, self.num_bytes)

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
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        os.close(file)
        raise damaged(path, "it is no file")
    return file, found.st_size


def places_of(path: Path | str, header: bytes, num_bytes: int | None = None) -> dict[str, Place]:
    """The tensors of a header, which must fill the file of `num_bytes` without a gap; None for a file of any size.

    Raises `JobError` MOE0801; `path` is named in it.
    """
    path = Path(path)
    places, end = {}, len(header)
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
            places[name] = Place(value["dtype"], shape, end, size)
            end += size
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged(path, f"its header is not that of a safetensors file ({str(error)[:200]})") from error
    if num_bytes is not None and end != num_bytes:
        raise damaged(path, f"its tensors end at byte {end}, the file at {num_bytes}")
    return places
