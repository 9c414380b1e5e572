"""The tensors of a Hugging Face folder or of a state dict: their names, shapes and dtypes, and their values on demand.

A file of a folder is mapped into memory, so that only the parts of tensors that are copied are read. Nothing is
executed, and no pickle is opened.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moec.grammar.huggingface.read import GGUF, NO_GGUF
from moec.runtime.checkpoint.format.parts import DTYPES
from moec.runtime.checkpoint.format.shards import ShardFile, StoredTensor
from moec.runtime.errors import JobError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_INDEX_BYTES = 1 << 28
CONVERT = (
    'python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('{0}', dtype='auto').save_pretrained('{0}-safetensors')\""
)


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor. `place` names its file in messages; `view` gives its values, which share memory with the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    place: str
    view: Callable[[], Tensor]


def source_tensors(source: str | Path | Mapping[str, Any]) -> dict[str, SourceTensor]:
    """The tensors of a folder with safetensors files, of one such file, or of a state dict.

    Of a model of images and text they are the decoder's. Raises `JobError` MOE0905 for files that are missing, damaged,
    outside of the folder or pickles, and for values of a state dict that are no whole tensors.
    """
    return decoder_tensors(_whole(source))


def _whole(source: str | Path | Mapping[str, Any]) -> dict[str, SourceTensor]:
    if isinstance(source, Mapping):
        return {name: _state_dict_tensor(name, value) for name, value in source.items()}
    folder = Path(source)
    if folder.suffix == ".json":
        raise JobError("MOE0905", f"{folder} is a config, not a file of weights", "give the folder that it is in")
    if folder.is_file():
        if folder.suffix in (".bin", ".pt", ".pth", ".ckpt"):
            raise _pickled(folder.parent, folder.name)
        if folder.suffix == ".gguf":
            raise JobError("MOE0905", f"{folder}: {GGUF}", NO_GGUF)
        return _file_tensors(folder, folder.name)
    if (folder / SINGLE).is_file():  # even with an index beside it: transformers chooses it too
        return _file_tensors(folder / SINGLE, SINGLE)
    if (folder / INDEX).is_file():
        return _indexed_tensors(folder)
    if not folder.is_dir():
        raise JobError("MOE0905", f"{folder}: there is no such folder", "give a model's folder, with safetensors files")
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if pickles:
        raise _pickled(folder, pickles[0])
    if any(folder.glob("*.gguf")):
        raise JobError("MOE0905", f"{folder}: {GGUF}", NO_GGUF)
    raise JobError(
        "MOE0905",
        f"{folder} has neither {SINGLE} nor {INDEX}",
        f"`hf download MODEL --local-dir {folder}` gets a model's files",
    )


DECODER = re.compile(r"(?:model\.language_model|language_model\.model)\.(?P<inside>.*)")
HEAD = re.compile(r"(?:language_model\.)?(?P<inside>lm_head\..*)")
UP, DOWN, QWEN = "experts.gate_up_proj", "experts.down_proj", "gate.weight"
"""Experts in one tensor each, and the router in Qwen3-VL (Aria's has another name)."""


def decoder_tensors(tensors: dict[str, SourceTensor]) -> dict[str, SourceTensor]:
    """The tensors of the decoder of a model of images and text, by a pure decoder's names; of others all as they are.

    Experts are [experts, out, in]; Qwen3-VL stores them transposed.
    """
    if not any(DECODER.fullmatch(name) for name in tensors):
        return tensors
    decoder = {}
    for name, tensor in tensors.items():
        if inside := DECODER.fullmatch(name):
            decoder[f"model.{inside['inside']}"] = tensor
        elif inside := HEAD.fullmatch(name):
            decoder[inside["inside"]] = tensor
    for up in [name for name in decoder if name.endswith(UP)]:
        mixture = up.removesuffix(UP)
        if f"{mixture}{QWEN}" in decoder and _is_transposed(decoder[up], decoder.get(f"{mixture}{DOWN}")):
            decoder |= {name: _transposed(decoder[name]) for name in (up, f"{mixture}{DOWN}")}
    return decoder


def _is_transposed(up: SourceTensor, down: SourceTensor | None) -> bool:
    """Whether `up` is [experts, in, 2 out] and `down` [experts, out, in]."""
    if down is None or not len(up.shape) == len(down.shape) == 3:
        return False
    return up.shape[1:] == (down.shape[2], 2 * down.shape[1])


def _transposed(tensor: SourceTensor) -> SourceTensor:
    experts, rows, columns = tensor.shape
    return replace(tensor, shape=(experts, columns, rows), view=lambda: tensor.view().transpose(1, 2))


SAMPLED = 16
"""Elements of each tensor that `digest_of` hashes."""


def digest_of(stored: Mapping[str, SourceTensor]) -> int:
    """A hash of the names, shapes, dtypes and some elements of tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(stored.items()):
        digest.update(f"{name} {tensor.shape} {tensor.dtype}".encode())
        flat = tensor.view().reshape(-1)
        some = flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED].cpu().contiguous()
        digest.update(some.view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()[:7], "little")


def _pickled(folder: Path, name: str) -> JobError:
    return JobError(
        "MOE0905",
        f"{folder / name} is a pickle, which runs code when it is opened, and moec never opens one",
        f"convert it, if you trust it, with {CONVERT.format(folder)}",
    )


def _indexed_tensors(folder: Path) -> dict[str, SourceTensor]:
    """The tensors of an index, from the files that it names."""
    path = folder / INDEX
    try:
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise JobError("MOE0905", f"{path} has more than {MAX_INDEX_BYTES >> 20} MiB: too large to be an index")
        table = json.loads(path.read_bytes())["weight_map"]
        named = {str(name): str(file) for name, file in table.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise JobError(
            "MOE0905", f"{path} is not an index of safetensors files", "download the folder again"
        ) from error
    files: dict[str, dict[str, SourceTensor]] = {}
    for file in dict.fromkeys(named.values()):
        if PurePath(file).name != file or file in ("", ".", "..") or not file.isprintable():
            raise JobError(
                "MOE0905", f"{path} names {file!r}, which is not a file of the folder", "do not trust this folder"
            )
        files[file] = _file_tensors(folder / file, file)
    for name, file in named.items():
        if name not in files[file]:
            raise JobError("MOE0905", f"{folder / file} has no tensor {name}, which {INDEX} says is there")
    beside = {name for tensors in files.values() for name in tensors} - named.keys()
    if beside:
        first = min(beside)
        raise JobError("MOE0905", f"{INDEX} does not have {first}, which is in one of its files")
    return {name: files[file][name] for name, file in named.items()}


def _file_tensors(path: Path, shown: str) -> dict[str, SourceTensor]:
    """The tensors of one safetensors file. Links are followed: a download's cache consists of them."""
    try:
        file = ShardFile(path.resolve(strict=True))
    except (OSError, RuntimeError, UnicodeError) as error:  # RuntimeError: links in a circle
        reason = getattr(error, "strerror", None) or str(error)
        raise JobError("MOE0905", f"{path}: {reason}", "download the folder again") from error
    except JobError as error:
        message = error.diagnostics[0].message.removeprefix(f"{path.resolve()}: ")
        raise JobError("MOE0905", f"{path} is damaged: {message}", "download this file again") from error
    mapped = _Mapped(path)
    return {
        name: SourceTensor(stored.shape, DTYPES[stored.dtype], shown, _viewer(mapped, stored))
        for name, stored in file.tensors.items()
    }


class _Mapped:
    """A file's bytes, mapped on first use. Writing to them does not change the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None

    def __call__(self) -> mmap.mmap:
        if self._map is None:
            with self._path.open("rb") as stream:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._map


def _viewer(mapped: _Mapped, stored: StoredTensor) -> Callable[[], Tensor]:
    def view() -> Tensor:
        dtype = DTYPES[stored.dtype]
        if not stored.num_bytes:
            return torch.empty(stored.shape, dtype=dtype)
        count = stored.num_bytes // dtype.itemsize
        if stored.offset % dtype.itemsize:
            copied = bytearray(mapped()[stored.offset : stored.offset + stored.num_bytes])
            return torch.frombuffer(copied, dtype=dtype).view(stored.shape)
        return torch.frombuffer(mapped(), dtype=dtype, count=count, offset=stored.offset).view(stored.shape)

    return view


def _state_dict_tensor(name: object, value: object) -> SourceTensor:
    if not isinstance(name, str) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        kind = type(value).__name__
        raise JobError(
            "MOE0905",
            f"the state dict's {name!r} is of class {kind}, not a whole tensor",
            "give `model.state_dict()` of a transformers model on one process, or a folder",
        )
    detached = value.detach()
    return SourceTensor(tuple(detached.shape), detached.dtype, "the state dict", lambda: detached)
