"""Writes a folder of safetensors files, whose tensors are assembled from parameters by rules."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moec.codegen.plan import parameters_of
from moec.grammar.huggingface.read import CONFIG
from moec.grammar.huggingface.rules import Rule
from moec.passes.ir import Program
from moec.runtime.checkpoint.format.files import shown, sync, write_file
from moec.runtime.checkpoint.format.parts import DTYPE_NAMES
from moec.runtime.checkpoint.format.shards import header_of
from moec.runtime.checkpoint.format.temporary import Temporary
from moec.runtime.errors import JobError
from moec.runtime.huggingface.moves import LocalPart, pairs
from moec.runtime.huggingface.row_blocks import absent
from moec.runtime.huggingface.source_tensors import INDEX, SINGLE

MAX_FILE_BYTES = 5_000_000_000
"""Bytes of one file, as transformers writes them (`max_shard_size`, 5 GB until 5.0)."""


@dataclass(frozen=True, slots=True)
class File:
    """A safetensors file: its header, the tensors' offsets from the header's end, and the bytes after the header."""

    name: str
    header: bytes
    offsets: Mapping[str, int]
    num_bytes: int


class Writer:
    """Writes tensors in any order into a temporary folder beside `target`; `publish` gives it its name.

    Files are mapped into memory, so that a tensor of several parameters needs no memory of its own. The constructor and
    `publish` raise `JobError` MOE0909.
    """

    def __init__(
        self,
        target: Path,
        rules: Sequence[Rule],
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        max_file_bytes: int,
        layout: Sequence[File] | None = None,
    ) -> None:
        self.target, self._shapes = target, dict(shapes)
        self._dtypes = {rule.name: dtypes[rule.name] for rule in rules}
        sizes = {rule.name: rule.shape(shapes) for rule in rules}
        self.files = list(layout or files_of(sizes, self._dtypes, max_file_bytes))
        self._views: dict[str, Tensor] = {}
        self._temporary: Temporary | None = None
        try:
            self._temporary = Temporary(target)
            for file in self.files:
                self._views |= self._mapped(file, sizes)
        except JobError as error:
            self.discard()
            first = error.diagnostics[0]
            raise JobError("MOE0909", first.message, first.help) from error
        except OSError as error:
            self.discard()
            raise _unwritable(target, error) from error

    def _mapped(self, file: File, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Makes a file; returns its tensors, which are mapped to it."""
        assert self._temporary is not None
        path = self._temporary.path / file.name
        total = len(file.header) + file.num_bytes
        with path.open("xb") as stream:
            stream.write(file.header)
            stream.flush()
            # Reserves the blocks first: a full disk is an error here, and not a signal when a page is touched.
            os.posix_fallocate(stream.fileno(), 0, total)
        if not file.num_bytes:
            return {name: torch.empty(sizes[name], dtype=self._dtypes[name]) for name in file.offsets}
        whole = torch.from_file(str(path), shared=True, size=total, dtype=torch.uint8)
        views = {}
        for name, offset in file.offsets.items():
            dtype = self._dtypes[name]
            first = len(file.header) + offset
            last = first + math.prod(sizes[name]) * dtype.itemsize
            views[name] = whole[first:last].view(dtype).view(sizes[name])
        return views

    def write(self, name: str, whole: Tensor, rules: Sequence[Rule]) -> None:
        """Copies the whole parameter `name` into the tensors of `rules`."""
        for rule in rules:
            parts = {piece.parameter: absent(self._shapes[piece.parameter]) for piece in rule.pieces}
            parts[name] = LocalPart(whole, tuple((0, dim) for dim in whole.shape), tuple(whole.shape))
            self.write_part(rule, parts)

    def write_part(self, rule: Rule, parts: Mapping[str, LocalPart]) -> None:
        """Copies the parts of a rule's parameters into the rule's tensor."""
        for part, theirs in pairs(rule, self._views[rule.name], parts):
            theirs.copy_(part)

    def publish(self, config: Mapping[str, Any], beside: Mapping[str, bytes] | None = None) -> None:
        """Writes the index, the config and the other files `beside`; then gives the folder its name."""
        assert self._temporary is not None
        path = self._temporary.path
        try:
            self._views.clear()
            for file in self.files:
                sync(path / file.name)
            extra = dict(beside or {})
            if len(self.files) > 1 and INDEX not in extra:
                extra[INDEX] = index_of(self.files)
            if CONFIG not in extra:
                extra[CONFIG] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
            for name, content in extra.items():
                write_file(path / name, content)
            self._temporary.publish()
        except OSError as error:
            raise _unwritable(self.target, error) from error
        except JobError as error:
            first = error.diagnostics[0]
            raise JobError("MOE0909", first.message, first.help) from error

    def discard(self) -> None:
        """Removes the temporary folder, unless it has been published."""
        self._views = {}
        if self._temporary is not None and self._temporary.path.exists():
            self._temporary.discard()


def dtypes_of(rules: Sequence[Rule], dtype: torch.dtype, program: Program) -> dict[str, torch.dtype]:
    """The dtype of each tensor: fp32 for online biases, whose updates are small, and `keep_in_fp32`; else `dtype`."""
    parameters = parameters_of(program)
    kept = {name for name, parameter in parameters.items() if parameter.dtype == "fp32"}
    wide = {*program.states, *(kept if len(kept) < len(parameters) else ())}
    of_wide = {rule.name for rule in rules if any(piece.parameter in wide for piece in rule.pieces)}
    return {rule.name: torch.float32 if rule.name in of_wide else dtype for rule in rules}


def files_of(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], max_bytes: int) -> list[File]:
    """Distributes tensors, in the order of `shapes`, over files of at most `max_bytes` or of one tensor."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * dtypes[name].itemsize
        if groups[-1] and used + size > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    names = [SINGLE] if len(groups) == 1 else [
        f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)
    ]  # fmt: skip
    return [_file(name, group, shapes, dtypes) for name, group in zip(names, groups, strict=True)]


def _file(
    file_name: str, group: Sequence[str], shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
) -> File:
    """A file with the same header as the safetensors library's: the widest elements first, then by name."""
    ordered = sorted(group, key=lambda name: (-dtypes[name].itemsize, name))
    sizes = {name: math.prod(shapes[name]) * dtypes[name].itemsize for name in ordered}
    tensors = ((name, DTYPE_NAMES[dtypes[name]], shapes[name], size) for name, size in sizes.items())
    *offsets, end = accumulate(sizes.values(), initial=0)
    return File(file_name, header_of(tensors, {"format": "pt"}), dict(zip(sizes, offsets, strict=True)), end)


def index_of(files: Sequence[File]) -> bytes:
    """`model.safetensors.index.json`."""
    table = {
        "metadata": {"total_size": sum(file.num_bytes for file in files)},
        "weight_map": dict(sorted((name, file.name) for file in files for name in file.offsets)),
    }
    return (json.dumps(table, indent=2) + "\n").encode()


def _unwritable(target: Path, error: OSError) -> JobError:
    help = "free space, or save to a folder with write permission"
    return JobError("MOE0909", f"{shown(target)}: {error.strerror}", help)
