"""Text as bytes, for a model whose vocabulary is the 256 bytes: no tokenizer, no download.

By default Python's standard library, some megabytes of real text on every machine; or your own file or folder.
Whole files are held out if possible, always the same ones, and every rank reads the same bytes.
"""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

HELD_OUT = 1 / 20
"""Fraction of the bytes that is held out from training."""

MAX_BYTES = 64 * 1024 * 1024
"""The most bytes read of a file or folder."""

NOT_SOURCES = {"site-packages", "test", "tests", "__pycache__"}
"""Folders of the standard library's tree that are left out: tests contain much generated text."""


class TextError(Exception):
    """There is no text to train on; the message gives the reason in one line."""


class Text(NamedTuple):
    """Two uint8 tensors, and their source."""

    train: Tensor
    held_out: Tensor
    description: str


def load_text(path: str | None, sequence: int) -> Text:
    """The text at `path`, by default the standard library, in two parts, each longer than `sequence`.

    Raises `TextError` where it cannot be read or is too short.
    """
    name = path or "the Python standard library"
    try:
        files = read_files(Path(path) if path else None)
    except OSError as error:
        raise TextError(f"cannot read {error.filename}: {error.strerror}") from error
    train, held_out = split(files)
    if min(len(train), len(held_out)) <= sequence:
        found, needed = sum(map(len, files.values())), round((sequence + 1) / HELD_OUT)
        raise TextError(f"{name} has {found:,} bytes of text, and at least {needed:,} are needed")
    count = "1 file" if len(files) == 1 else f"{len(files):,} files"
    description = f"{name}: {count}, {len(train):,} bytes to train on and {len(held_out):,} held out"
    return Text(as_tensor(train), as_tensor(held_out), description)


def read_files(path: Path | None) -> dict[str, bytes]:
    """Contents by a hash of the file's path, in that order, which mixes the folders alike on every machine.

    Empty files, and those with a NUL, which are no text, are left out.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        paths = [file for file in walk(root, NOT_SOURCES) if file.suffix == ".py"]
    elif path.is_dir():
        root = path
        paths = list(walk(root))
    else:
        root, paths = path.parent, [path]
    files: dict[str, bytes] = {}
    room = MAX_BYTES
    for name, file in sorted((hashed(file.relative_to(root)), file) for file in paths):
        with file.open("rb") as stream:
            content = stream.read(room)
        if content and b"\0" not in content:
            files[name] = content
            room -= len(content)
    return files


def walk(root: Path, skipped: set[str] | frozenset[str] = frozenset()) -> Iterator[Path]:
    """Every regular file under `root`, without hidden files and `skipped` folders."""

    def complain(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(root, onerror=complain):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped]
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        yield from (path for path in paths if path.is_file())


def hashed(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path.as_posix())).hexdigest()


def split(files: dict[str, bytes]) -> tuple[bytes, bytes]:
    """Splits into training and held-out text: whole files, or if none is small enough, the end of the largest."""
    room = int(sum(map(len, files.values())) * HELD_OUT)
    train: list[bytes] = []
    held_out: list[bytes] = []
    left = room
    for content in files.values():
        if len(content) <= left:
            held_out.append(content)
            left -= len(content)
        else:
            train.append(content)
    if left > room / 2:
        largest = max(range(len(train)), key=lambda index: len(train[index]))
        content = train[largest]
        train[largest] = content[: len(content) - left]
        held_out.append(content[len(content) - left :])
    return b"\n".join(train), b"\n".join(held_out)


def as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def random_windows(text: Tensor, batch: int, sequence: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of tokens and labels, int64 `[batch, sequence]` both; a label is the byte that follows."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - sequence, (batch,), generator=generator)
        yield windows(text, starts, sequence)


def even_windows(text: Tensor, most: int, batch: int, sequence: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Full batches of windows, evenly spaced over `text`, which do not overlap if the text is long enough."""
    fitting = min(most, (len(text) - 1) // sequence)
    count = max(batch, fitting // batch * batch)
    starts = torch.linspace(0, len(text) - sequence - 1, count, dtype=torch.float64).long()
    return (windows(text, part, sequence) for part in starts.split(batch))


def windows(text: Tensor, starts: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
    bytes_BS = text[starts[:, None] + torch.arange(sequence + 1)].long()
    return bytes_BS[:, :-1], bytes_BS[:, 1:]


def unigram_entropy(labels: Tensor) -> float:
    """Bits per byte of the best prediction without context: the entropy of this text's byte frequencies."""
    share = torch.bincount(labels.flatten(), minlength=256).double() / labels.numel()
    return -float(torch.special.xlogy(share, share).sum()) / math.log(2)
