"""The two JSON files of a checkpoint, and their rules. Needs no torch.

checkpoints/100/
  checkpoint.json            what it is: format, model, step, ranks, the size of every shard, the digest of index.json
  index.json                 every tensor: dtype, shape, grid; of each chunk its shard and the digests of its blocks
  rank-00003.safetensors     the chunks that rank 3 wrote

A tensor is cut into an even grid, so that no chunk can overlap another or be missing. No file states a file's name.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError

from moec.codegen.data import Data, first_fault, strict_json
from moec.grammar.folder_kinds import CHECKPOINT
from moec.runtime.checkpoint.format.faults import damaged
from moec.runtime.errors import JobError

HEAD, INDEX = CHECKPOINT, "index.json"
MODEL, EXTRAS, RNG = "model/", "extras/", "rng/"
"""How names of tensors begin. Those of the optimizer are in `optimizer_state.py`."""
FORMAT, READ_FORMATS = 2, (1, 2)
"""Raised whenever a checkpoint would be misread, or refused as damaged, by an older moec."""
BLOCK_BYTES = 8 << 20
"""Bytes of a chunk that have one digest: a reader of a part reads and checks only the blocks that it needs."""
MAX_HEAD_BYTES, MAX_INDEX_BYTES = 4 << 20, 128 << 20
"""Larger files are refused unread. 61 layers with 256 experts on 64 ranks have an index of 4 MB."""
MAX_TENSORS, MAX_CHUNKS, MAX_RANKS = 100_000, 2_000_000, 100_000

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1,
    "BOOL": 1, "U16": 2, "U32": 4, "U64": 8,
}  # fmt: skip
"""Bytes of an element, by safetensors' names of dtypes."""

Text = Annotated[str, Field(max_length=200)]
Words = Annotated[str, Field(max_length=100_000)]
Name = Annotated[str, Field(max_length=1000, min_length=1)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Digests = Annotated[str, Field(pattern=r"^([0-9a-f]{64})*$")]
Count = Annotated[int, Field(ge=0, le=1 << 62)]
Tree = Any
"""Plain data as JSON (`trees.py`)."""
DataT = TypeVar("DataT", bound="Data")


class Head(Data):
    """The content of `checkpoint.json`. `shard_bytes`: the size of each rank's shard; `degrees`: those of each mesh.

    `run` and `ancestors` are those of `Run`; `saved` is the time in ns since 1970, later than that of any other
    checkpoint in the folder. Format 1 lacks these three.
    """

    format: int
    moec: Text
    model: Text
    spec: Digest
    run: Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")] = ""
    ancestors: tuple[tuple[Text, Count], ...] = ()
    saved: Count = 0
    step: Count
    world_size: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    data_size: Annotated[int, Field(ge=1)]
    degrees: dict[Text, dict[Text, int]]
    optimizer: Text | None
    shard_bytes: tuple[Count, ...]
    index: Digest
    digest: Digest


class Entry(Data):
    """A tensor. `files[i]` is the rank whose shard has chunk i, `digests[i]` its blocks' digests, joined.

    `cuts[dim]` is the number of equal parts of a dim. Numbers of chunks count the last dim fastest.
    """

    dtype: Text
    shape: tuple[Count, ...]
    cuts: tuple[Annotated[int, Field(ge=1)], ...]
    files: tuple[Count, ...]
    digests: tuple[Digests, ...]

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.item_bytes

    @cached_property
    def chunk_shape(self) -> tuple[int, ...]:
        """The shape of every chunk."""
        return tuple(dim // cut for dim, cut in zip(self.shape, self.cuts, strict=True))

    @property
    def chunk_bytes(self) -> int:
        """Bytes of every chunk."""
        return math.prod(self.chunk_shape) * self.item_bytes


class Group(Data):
    """A parameter group of the optimizer: the names of its parameters, and its options as plain data."""

    parameters: tuple[Name, ...]
    options: Tree


class OptimizerEntry(Data):
    """The optimizer. `kind`: its class; `made`: its defaults. `numbers`: states that are no tensors, by parameter."""

    kind: Text
    made: Tree = None
    groups: tuple[Group, ...]
    numbers: dict[Name, dict[Text, Tree]]


class ModelFields(Data):
    """What a model computes (`model_fields.py`): the fields of `model` and of each distinct layer as canonical text.

    `kinds[i]` is the number of layer i in `layers`.
    """

    model: dict[Text, Words]
    layers: list[dict[Text, Words]]
    kinds: list[Count]


class Extra(Data):
    """`copies` has one tree, or one for each data rank. `loads`: whether it came from an object's `state_dict`."""

    loads: bool
    copies: tuple[Tree, ...]


class Index(Data):
    """The content of `index.json`. `headers`: the digest of each shard's header. `job_tokens`: the sum over all ranks.

    `data_ranks[rank]` is the rank's data rank; empty in format 1 and in a converted file.
    """

    model: ModelFields
    headers: tuple[Digest, ...]
    tensors: dict[Name, Entry]
    data_ranks: tuple[Count, ...] = ()
    settings: dict[Text, int]
    job_steps: Count
    job_tokens: Count
    optimizer: OptimizerEntry | None
    extras: dict[Text, Extra]

    @property
    def model_tensors(self) -> dict[str, Entry]:
        """Parameters and states by their names in the plan."""
        return {name.removeprefix(MODEL): entry for name, entry in self.tensors.items() if name.startswith(MODEL)}


def empty_entry(dtype: str, shape: Sequence[int], cuts: Sequence[int]) -> dict[str, Any]:
    """An `Entry` as plain data. Its chunks have neither shards nor digests yet."""
    chunks = math.prod(cuts)
    return {"dtype": dtype, "shape": shape, "cuts": cuts, "files": [None] * chunks, "digests": [""] * chunks}


def shard_name(rank: int) -> str:
    """The file name of a rank's shard."""
    return f"rank-{rank:05d}.safetensors"


def canonical(content: Any) -> bytes:
    """Canonical JSON: equal content gives equal bytes."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return (text + "\n").encode()


def digest(content: bytes | memoryview) -> str:
    """SHA-256, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def head_bytes(fields: Mapping[str, Any]) -> bytes:
    """The content of `checkpoint.json`: `fields` are those of a `Head` without `format` and `digest`."""
    content = {"format": FORMAT, **fields}
    return canonical(content | {"digest": digest(canonical(content))})


def parse_head(path: Path, content: bytes) -> Head:
    """Raises `JobError` for anything that `head_bytes` does not write, and for another format."""
    data = _json_object(path, content)
    stated = data.get("format")
    if stated not in READ_FORMATS:
        raise JobError(
            "MOE0802",
            f"{path}: format {str(stated)[:20]}, this moec reads up to {FORMAT}",
            "use the moec that wrote it; `moec checkpoint convert` of that moec makes a file of plain safetensors",
        )
    rest = {key: value for key, value in data.items() if key != "digest"}
    try:
        expected = head_bytes(rest)
    except ValueError as error:  # infinity, or half a surrogate pair
        raise damaged(path, f"it is not JSON ({error})") from error
    if expected != content:
        raise damaged(path, "its digest does not match its content")
    head = _validated(Head, path, content)
    if len(head.shard_bytes) != head.world_size:
        raise damaged(path, f"it has {len(head.shard_bytes)} shards, but {head.world_size} ranks")
    return head


def refuse_unreadable(target: Path, head: bytes, index: bytes) -> None:
    """Raises `JobError` MOE0804 for files beyond the limits of a reader, which would refuse the checkpoint."""
    try:
        if len(head) > MAX_HEAD_BYTES or len(index) > MAX_INDEX_BYTES:
            raise damaged(target, f"its index has {len(index)} bytes; the limit is {MAX_INDEX_BYTES}")
        parse_index(target / INDEX, index, parse_head(target / HEAD, head))
    except JobError as error:
        words = error.diagnostics[0].message
        raise JobError("MOE0804", words, "store long lists as tensors; save fewer extras, or on fewer ranks") from error


def parse_index(path: Path, content: bytes, head: Head) -> Index:
    """Raises `JobError` unless it is the index of `head`, within the limits, with a valid grid for every tensor."""
    if digest(content) != head.index:
        raise damaged(path, f"its digest does not match {HEAD}")
    tensors = content.count(b'"dtype":')  # every `Entry` has one; counted before a million of them are made
    if tensors > MAX_TENSORS:
        raise damaged(path, f"it has {tensors} tensors; the limit is {MAX_TENSORS}")
    index = _validated(Index, path, content)
    if len(index.headers) != head.world_size:
        raise damaged(path, f"it has {len(index.headers)} headers, but {head.world_size} ranks")
    if any(kind >= len(index.model.layers) for kind in index.model.kinds):
        raise damaged(path, "model: a layer has a kind that is not there")
    chunks = sum(len(entry.files) for entry in index.tensors.values())
    if chunks > MAX_CHUNKS:
        raise damaged(path, f"it has {chunks} chunks; the limit is {MAX_CHUNKS}")
    bytes_by_rank = [0] * head.world_size
    for name, entry in index.tensors.items():
        complaint = _complaint_about(entry, head.world_size)
        if complaint:
            raise damaged(path, f"{name}: {complaint}")
        for rank in entry.files:
            bytes_by_rank[rank] += entry.chunk_bytes
            if bytes_by_rank[rank] > head.shard_bytes[rank]:
                raise damaged(path, f"{name}: {shard_name(rank)} has fewer bytes than the index says")
    return index


def _complaint_about(entry: Entry, world_size: int) -> str:
    """What is wrong with a tensor's grid; empty if nothing is."""
    if entry.dtype not in ITEM_BYTES:
        return f"there is no dtype {entry.dtype}"
    if len(entry.cuts) != len(entry.shape):
        return f"shape {list(entry.shape)} and cuts {list(entry.cuts)} differ in length"
    if any(dim % cut for dim, cut in zip(entry.shape, entry.cuts, strict=True)):
        return f"cuts {list(entry.cuts)} do not divide shape {list(entry.shape)}"
    chunks = math.prod(entry.cuts)
    if not chunks == len(entry.files) == len(entry.digests):
        return f"it has {chunks} chunks, but ranks of {len(entry.files)} and digests of {len(entry.digests)}"
    if any(rank >= world_size for rank in entry.files):
        return f"a chunk is of rank {max(entry.files)}, but there are {world_size} ranks"
    wanted = 64 * -(-entry.chunk_bytes // BLOCK_BYTES)
    if any(len(digests) != wanted for digests in entry.digests):
        return "the number of its digests does not match its size"
    return ""


def _json_object(path: Path, content: bytes) -> dict[str, Any]:
    try:
        data = strict_json(content)
    except ValueError as error:
        raise damaged(path, f"it is not JSON ({str(error)[:100]})") from error
    if not isinstance(data, dict):
        raise damaged(path, "it is not a JSON object")
    return data


def _validated(model: type[DataT], path: Path, content: bytes) -> DataT:
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise damaged(path, first_fault(error)) from error
