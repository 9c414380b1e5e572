"""The tensors of a Hugging Face folder or of a state dict: their names, shapes and dtypes, and their values on demand.

A file of a folder is mapped into memory: of a tensor that is copied in part only that part is read. Nothing is
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
class Stored:
    """A tensor: `place` says where for messages, `view` gives its values, which share memory with the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    place: str
    view: Callable[[], Tensor]


def stored_in(source: str | Path | Mapping[str, Any]) -> dict[str, Stored]:
    """The tensors of a folder with safetensors files, of one such file, or of a state dict; of a model of images and
    text those of its decoder.

    Raises `JobError` MOE0905 for files that are missing, damaged, outside of the folder or pickles, and for values of a
    state dict that are no whole tensors.
    """
    return of_decoder(_whole(source))


def _whole(source: str | Path | Mapping[str, Any]) -> dict[str, Stored]:
    if isinstance(source, Mapping):
        return {name: _of_value(name, value) for name, value in source.items()}
    folder = Path(source)
    if folder.suffix == ".json":
        raise JobError("MOE0905", f"{folder} is a config, not a file of weights", "give the folder that it is in")
    if folder.is_file():
        if folder.suffix in (".bin", ".pt", ".pth", ".ckpt"):
            raise _pickled(folder.parent, folder.name)
        if folder.suffix == ".gguf":
            raise JobError("MOE0905", f"{folder}: {GGUF}", NO_GGUF)
        return _of_file(folder, folder.name)
    if (folder / SINGLE).is_file():  # with an index beside it too, as transformers chooses
        return _of_file(folder / SINGLE, SINGLE)
    if (folder / INDEX).is_file():
        return _by_index(folder)
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
"""Experts in one tensor, and the router beside them in Qwen3-VL (Aria's is called otherwise)."""


def of_decoder(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """Of a model of images and text the tensors of its decoder, by the names that these have alone, and with experts
    as [experts, out, in], which Qwen3-VL stores transposed; of others the tensors as they are."""
    if not any(DECODER.fullmatch(name) for name in tensors):
        return tensors
    found = {}
    for name, tensor in tensors.items():
        if inside := DECODER.fullmatch(name):
            found[f"model.{inside['inside']}"] = tensor
        elif inside := HEAD.fullmatch(name):
            found[inside["inside"]] = tensor
    for up in [name for name in found if name.endswith(UP)]:
        mixture = up.removesuffix(UP)
        if f"{mixture}{QWEN}" in found and _is_transposed(found[up], found.get(f"{mixture}{DOWN}")):
            found |= {name: _transposed(found[name]) for name in (up, f"{mixture}{DOWN}")}
    return found


def _is_transposed(up: Stored, down: Stored | None) -> bool:
    """Whether these are [experts, in, 2 out] and [experts, out, in]."""
    if down is None or not len(up.shape) == len(down.shape) == 3:
        return False
    return up.shape[1:] == (down.shape[2], 2 * down.shape[1])


def _transposed(tensor: Stored) -> Stored:
    experts, rows, columns = tensor.shape
    return replace(tensor, shape=(experts, columns, rows), view=lambda: tensor.view().transpose(1, 2))


SAMPLED = 16
"""Elements of each tensor that `digest_of` looks at."""


def digest_of(stored: Mapping[str, Stored]) -> int:
    """A number that is equal for the same tensors: of their names, shapes, dtypes and some of their elements."""
    found = hashlib.sha256()
    for name, tensor in sorted(stored.items()):
        found.update(f"{name} {tensor.shape} {tensor.dtype}".encode())
        flat = tensor.view().reshape(-1)
        some = flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED].cpu().contiguous()
        found.update(some.view(torch.uint8).numpy().tobytes())
    return int.from_bytes(found.digest()[:7], "little")


def _pickled(folder: Path, name: str) -> JobError:
    return JobError(
        "MOE0905",
        f"{folder / name} is a pickle, which runs code when it is opened, and moec never opens one",
        f"convert it, if you trust it, with {CONVERT.format(folder)}",
    )


def _by_index(folder: Path) -> dict[str, Stored]:
    """The tensors of the index, each from the file that it names."""
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
    files: dict[str, dict[str, Stored]] = {}
    for file in dict.fromkeys(named.values()):
        if PurePath(file).name != file or file in ("", ".", "..") or not file.isprintable():
            raise JobError(
                "MOE0905", f"{path} names {file!r}, which is not a file of the folder", "do not trust this folder"
            )
        files[file] = _of_file(folder / file, file)
    for name, file in named.items():
        if name not in files[file]:
            raise JobError("MOE0905", f"{folder / file} has no tensor {name}, which {INDEX} says is there")
    beside = {name for tensors in files.values() for name in tensors} - named.keys()
    if beside:
        first = min(beside)
        raise JobError("MOE0905", f"{INDEX} does not have {first}, which is in one of its files")
    return {name: files[file][name] for name, file in named.items()}


def _of_file(path: Path, shown: str) -> dict[str, Stored]:
    """The tensors of one safetensors file; links are followed, as in a download's cache."""
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
        name: Stored(place.shape, DTYPES[place.dtype], shown, _viewer(mapped, place))
        for name, place in file.tensors.items()
    }


class _Mapped:
    """A file's bytes, mapped when they are first asked for; writing to them changes no file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None

    def __call__(self) -> mmap.mmap:
        if self._map is None:
            with self._path.open("rb") as stream:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._map


def _viewer(mapped: _Mapped, place: StoredTensor) -> Callable[[], Tensor]:
    def view() -> Tensor:
        dtype = DTYPES[place.dtype]
        if not place.num_bytes:
            return torch.empty(place.shape, dtype=dtype)
        count = place.num_bytes // dtype.itemsize
        if place.offset % dtype.itemsize:
            copied = bytearray(mapped()[place.offset : place.offset + place.num_bytes])
            return torch.frombuffer(copied, dtype=dtype).view(place.shape)
        return torch.frombuffer(mapped(), dtype=dtype, count=count, offset=place.offset).view(place.shape)

    return view


def _of_value(name: object, value: object) -> Stored:
    if not isinstance(name, str) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        kind = type(value).__name__
        raise JobError(
            "MOE0905",
            f"the state dict's {name!r} is of class {kind}, not a whole tensor",
            "give `model.state_dict()` of a transformers model on one process, or a folder",
        )
    detached = value.detach()
    return Stored(tuple(detached.shape), detached.dtype, "the state dict", lambda: detached)
