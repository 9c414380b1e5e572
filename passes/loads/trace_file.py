"""Reads a trace of loads: `counts` [iterations, layers, ranks, experts] in an `.npz` file. Nothing is unpickled.

The size is known from the array's header before anything is read. Few iterations are in memory at once, and of many
evenly spaced ones are read. The checksum is of all bytes, which are not read of an array that is larger than
`MOST_BYTES`.
"""

from __future__ import annotations

import lzma
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
from numpy.lib import format as npy

from moec.grammar.diagnostics import DiagnosticError, diagnose
from moec.grammar.source import Span

COUNTS = "counts"
"""The name of the array."""

MOST_ITERATIONS = 512
"""The most iterations that are read, evenly spaced: a percentile needs no more."""

MOST_BYTES = 2**30
"""The most bytes of an array that is read to its end, which takes a few seconds. A larger one is refused if it is
compressed; else its checksum is not checked."""

MOST_CHOICES = 2.0**53
"""The most choices of an expert: larger numbers are not exact."""

LOCAL_HEADER = struct.Struct("<26x2H")
"""The head of a file in a zip archive: the lengths of its name and of what follows the name."""

Counts = Any
"""Choices of experts. Each use says which dims it has."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Choices of each expert [iterations, layers, experts], over all ranks. `every`: one of so many iterations is read;
    `iterations` and `ranks` are those of the file."""

    counts: Counts
    iterations: int
    ranks: int
    every: int


def read_trace(path: Path, span: Span | None) -> Trace:
    """The trace in a file. Raises `DiagnosticError` at `span`: MOE0510 for a file that is none, MOE0512 for counts."""
    try:
        if path.exists() and not path.is_file():
            _refuse(span, f"{path}: this is no file", "name an `.npz` file")
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            return _read(archive, file, path, span)
    except OSError as error:
        _refuse(span, f"{path}: {error.strerror or error}", "the path is relative to the file that names it")
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, struct.error, NotImplementedError, RuntimeError):
        # NotImplementedError: an unknown compression; RuntimeError: a password
        _refuse(
            span, f"{path}: this is no `.npz` file, or a damaged one", "`numpy.savez(path, counts=counts)` writes it"
        )


def _read(archive: zipfile.ZipFile, file: IO[bytes], path: Path, span: Span | None) -> Trace:
    name = f"{COUNTS}.npy"
    if name not in archive.namelist():
        there = ", ".join(f"`{each.removesuffix('.npy')}`" for each in archive.namelist()[:8]) or "nothing"
        _refuse(
            span, f"{path}: there is no array `{COUNTS}`, but {there}", "`numpy.savez(path, counts=counts)` names it"
        )
    info = archive.getinfo(name)
    with archive.open(info) as stream:
        shape, dtype = _header(stream, path, span)
        iterations, _, ranks, _ = shape
        of_each = math.prod(shape[1:]) * dtype.itemsize
        if info.file_size < stream.tell() + iterations * of_each:
            _refuse(span, f"{path}: the file ends before its counts", "copy it again")
        every = -(-iterations // MOST_ITERATIONS)
        if info.compress_type == zipfile.ZIP_STORED:
            first = _start_of(info, file) + stream.tell()
            if info.file_size <= MOST_BYTES:
                _require_checksum(stream)
            parts = _in_place(file, first, of_each, range(0, iterations, every))
        else:
            if info.file_size > MOST_BYTES:
                help = f"keep every {-(-info.file_size // MOST_BYTES)}-th iteration, or write it with `numpy.savez`"
                _refuse(span, f"{path}: {info.file_size:,} bytes of counts have to be decompressed", help)
            parts = _in_order(stream, of_each, iterations, every)
        counts = []
        for number, part in enumerate(parts):
            each = np.frombuffer(part, dtype).reshape(shape[1:])
            if dtype.kind == "f":  # the largest number of a narrow dtype is below `MOST_CHOICES`
                each = each.astype(np.float64)
            counts.append(_checked(each, number * every, path, span).sum(1, dtype=np.float64))
    return Trace(np.stack(counts), iterations, ranks, every)


def _header(stream: IO[bytes], path: Path, span: Span | None) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape and dtype of an array, without its content."""
    try:
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, is_fortran, dtype = read(stream)
    except (ValueError, TypeError, SyntaxError, tokenize.TokenError) as error:
        _refuse(span, f"{path}: `{COUNTS}` is no array: {error}", "`numpy.savez(path, counts=counts)` writes it")
    if dtype.kind not in "uif":
        what = "Python objects, and nothing is unpickled" if dtype.hasobject else f"of dtype {dtype}"
        _refuse(span, f"{path}: `{COUNTS}` is {what}", "save it as numbers: `counts.astype('int64')`")
    if math.prod(shape[1:]) * dtype.itemsize > MOST_BYTES:
        _refuse(span, f"{path}: an iteration has {math.prod(shape[1:]):,} counts", "add up those of several ranks")
    if len(shape) != 4 or min(shape) < 1 or is_fortran:
        found = f"is {list(shape)}{' in Fortran order' * is_fortran}"
        help = "it is [iterations, layers, ranks, experts] in C order; sums over ranks are of one rank"
        _refuse(span, f"{path}: `{COUNTS}` {found}", help)
    return shape, dtype


def _require_checksum(stream: IO[bytes]) -> None:
    """Reads the rest of a file in an archive. `zipfile` raises `BadZipFile` at its end if the checksum differs."""
    while stream.read(2**22):
        pass


def _start_of(info: zipfile.ZipInfo, file: IO[bytes]) -> int:
    """Where the bytes of a file in an archive begin that is not compressed."""
    file.seek(info.header_offset)
    name, more = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
    return int(info.header_offset + LOCAL_HEADER.size + name + more)


def _in_place(file: IO[bytes], first: int, size: int, numbers: range) -> Iterator[bytes]:
    for number in numbers:
        file.seek(first + number * size)
        yield _exactly(file, size)


def _in_order(stream: IO[bytes], size: int, iterations: int, every: int) -> Iterator[bytes]:
    """Each `every`-th iteration; those between are read in few parts."""
    for number in range(0, iterations, every):
        yield _exactly(stream, size)
        left = min(every - 1, iterations - number - 1) * size
        while left:
            left -= len(_exactly(stream, min(left, 2**22)))
    _require_checksum(stream)


def _exactly(stream: IO[bytes], size: int) -> bytes:
    found = stream.read(size)
    if len(found) < size:
        raise EOFError
    return found


def _checked(counts: Counts, iteration: int, path: Path, span: Span | None) -> Counts:
    """The counts of an iteration [layers, ranks, experts]. Raises MOE0512 unless they are loads."""
    is_bad = ~((counts >= 0) & (counts <= MOST_CHOICES))  # also of what is no number
    if is_bad.any():
        layer, rank, expert = (int(place[0]) for place in np.nonzero(is_bad))
        what = f"{counts[layer, rank, expert]} choices of expert {expert} on rank {rank}"
    else:
        empty = np.flatnonzero(counts.sum((1, 2), dtype=np.float64) == 0)
        if not len(empty):
            return counts
        layer, what = int(empty[0]), "no choice of any expert"
    message = f"{path}: iteration {iteration} of layer {layer} has {what}"
    help = "counts are numbers of choices, some in every layer: leave such iterations out"
    raise DiagnosticError([diagnose("MOE0512", span, message, help=help)])


def _refuse(span: Span | None, message: str, help: str) -> NoReturn:
    raise DiagnosticError([diagnose("MOE0510", span, message, help=help)]) from None
