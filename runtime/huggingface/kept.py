"""The files of a model's folder that are no weights, and the layout of its weights' files.

An imported checkpoint keeps both in a folder `huggingface`, so that an export gives back the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from moec.runtime.checkpoint.format.files import sync, write_file
from moec.runtime.checkpoint.format.shards import LENGTH_BYTES, ShardFile
from moec.runtime.errors import JobError
from moec.runtime.huggingface.source_tensors import INDEX, SINGLE

FOLDER, LAYOUT = "huggingface", "moec-layout.json"
WEIGHTS = ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".npz", ".zip"
MAX_CARRIED_BYTES = 64 << 20
"""A larger file beside the weights is not kept."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The headers of the weights' files by name, and the index, if there is one."""

    headers: Mapping[str, bytes]
    index: bytes | None


def other_files(folder: Path) -> dict[str, bytes]:
    """The files of the folder that are no weights: configs, the tokenizer's files, texts. Links are followed.

    Hidden files and those of more than `MAX_CARRIED_BYTES` are left out.
    """
    files = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in WEIGHTS or path.name.startswith(".") or path.name in (INDEX, LAYOUT) or not path.is_file():
            continue
        if path.stat().st_size <= MAX_CARRIED_BYTES:
            files[path.name] = path.read_bytes()
    return files


def layout_of(folder: Path) -> Layout:
    """The layout of the folder's weights. Raises `JobError` MOE0801 for a damaged file, and `OSError`."""
    if (folder / SINGLE).is_file():
        return Layout({SINGLE: ShardFile((folder / SINGLE).resolve()).header}, None)
    index = (folder / INDEX).read_bytes()
    names = dict.fromkeys(json.loads(index)["weight_map"].values())
    return Layout({name: ShardFile((folder / name).resolve()).header for name in names}, index)


def write_kept(folder: Path, into: Path) -> None:
    """Writes the files and the layout that `read_kept` reads to a new folder inside of `into`."""
    target = into / FOLDER
    target.mkdir()
    for name, content in other_files(folder).items():
        write_file(target / name, content)
    layout = layout_of(folder)
    table = {
        "files": {name: header[LENGTH_BYTES:].decode() for name, header in layout.headers.items()},
        "index": None if layout.index is None else layout.index.decode(),
    }
    write_file(target / LAYOUT, json.dumps(table).encode())
    sync(target)


def read_kept(checkpoint: Path) -> tuple[dict[str, bytes], Layout] | None:
    """The files and the layout that an imported checkpoint keeps, or None. Raises `JobError` MOE0801."""
    folder = checkpoint / FOLDER
    if not folder.is_dir():
        return None
    try:
        table = json.loads((folder / LAYOUT).read_bytes())
        texts, index = dict(table["files"]), table["index"]
        headers = {
            name: len(text.encode()).to_bytes(LENGTH_BYTES, "little") + text.encode() for name, text in texts.items()
        }
        if not all(
            PurePath(name).name == name and name.endswith(".safetensors") and name.isprintable() for name in headers
        ):
            raise ValueError("a file has a name that no safetensors file may have")
        return other_files(folder), Layout(headers, None if index is None else str(index).encode())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        message = f"{folder} is not what `moec weights import` writes: {error}"
        raise JobError("MOE0801", message, "export with `--like`, a folder of the same architecture") from error
