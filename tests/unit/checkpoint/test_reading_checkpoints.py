"""Reading parts of checkpoints, and refusing damaged and hostile ones, without torch."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.checkpoint_drafts import COUNT, WEIGHT, Draft
from support.tables import each_row

from moec.runtime.checkpoint.format import index as index_module
from moec.runtime.checkpoint.format import reading
from moec.runtime.checkpoint.format.grid import Box
from moec.runtime.checkpoint.format.index import HEAD, INDEX, canonical, digest, shard_name
from moec.runtime.checkpoint.format.reading import Block, Checkpoint, damages
from moec.runtime.checkpoint.format.shards import ShardFile, header_of
from moec.runtime.errors import JobError


@pytest.fixture
def draft(tmp_path: Path) -> Draft:
    return Draft(tmp_path / "100")


def new_draft(tmp_path: Path) -> Draft:
    """One in a folder of its own, as many rows of a table need."""
    return Draft(Path(mkdtemp(dir=tmp_path), "100"))


def read_part(checkpoint: Checkpoint, name: str, box: Box) -> np.ndarray[Any, Any]:
    dtype = {"F32": np.float32, "I64": np.int64}[checkpoint.index.tensors[name].dtype]
    part = np.full([stop - start for start, stop in box], 99, dtype=dtype)

    def use(block: Block, content: memoryview) -> None:
        flat = np.frombuffer(content, dtype=dtype)
        for copy in block.copies:
            cut = flat[copy.first : copy.first + math.prod(copy.shape)].reshape(copy.shape)
            part[copy.target] = cut[copy.source]

    checkpoint.read(checkpoint.blocks(name, box), use, check=True)
    return part


@each_row("block_bytes", [8, 16, 1 << 20])
@each_row("rows", [(0, 4), (1, 3), (3, 4)])
@each_row("columns", [(0, 6), (2, 4), (0, 3), (5, 6)])
def test_a_part_is_that_of_the_whole_tensor(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    block_bytes: int,
    rows: tuple[int, int],
    columns: tuple[int, int],
) -> None:
    for module in (index_module, reading, sys.modules["moec.runtime.checkpoint.format.shards"]):
        monkeypatch.setattr(module, "BLOCK_BYTES", block_bytes)
    checkpoint = Checkpoint(new_draft(tmp_path).write())
    part = read_part(checkpoint, "model/weight", (rows, columns))
    assert (part == WEIGHT[slice(*rows), slice(*columns)]).all()


def test_only_blocks_of_the_part_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (index_module, reading, sys.modules["moec.runtime.checkpoint.format.shards"]):
        monkeypatch.setattr(module, "BLOCK_BYTES", 12)  # a row of a half
    checkpoint = Checkpoint(Draft(tmp_path / "100").write())
    blocks = list(checkpoint.blocks("model/weight", ((1, 2), (0, 6))))
    assert [(block.rank, block.first_byte, block.num_bytes) for block in blocks] == [(0, 12, 12), (1, 12, 12)]


def test_shards_are_safetensors_files(draft: Draft) -> None:
    loaded = load_file(draft.folder / shard_name(1))
    assert (loaded["model/weight"] == WEIGHT[:, 3:]).all()
    assert (loaded["model/count"] == COUNT).all()


def test_every_flipped_byte_is_found_and_named(draft: Draft) -> None:
    path = draft.write()
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for place in range(0, len(content), 5 if file.suffix == ".json" else 1):
            file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            if file.suffix == ".json":
                with pytest.raises(JobError, match=rf"MOE080[12].*{file.name}"):
                    Checkpoint(path)
                continue
            (said,) = damages(Checkpoint(path))
            assert file.name in said
            assert "model/" in said
            assert place < int.from_bytes(content[:8], "little") + 8 or "a digest does not match" in said
        file.write_bytes(content)
    assert not list(damages(Checkpoint(path)))


@each_row("keep", [0, 4, 8, 60, -1])
def test_a_truncated_shard_is_refused(tmp_path: Path, keep: int) -> None:
    draft = new_draft(tmp_path)
    shard = draft.write() / shard_name(1)
    shard.write_bytes(shard.read_bytes()[:keep])
    (said,) = damages(Checkpoint(draft.folder))
    assert f"{shard_name(1)}: it has" in said
    draft.head["shard_bytes"][1] = shard.stat().st_size  # the head says so too
    draft.write()
    with pytest.raises(JobError, match="MOE0801"):
        read_part(Checkpoint(draft.folder), "model/count", ((0, 3),))


def test_a_missing_shard_and_a_link_are_refused(draft: Draft, tmp_path: Path) -> None:
    shard = draft.write() / shard_name(0)
    shard.rename(tmp_path / "elsewhere")
    with pytest.raises(JobError, match=r"MOE0800.*rank-00000.safetensors: No such file"):
        read_part(Checkpoint(draft.folder), "model/weight", ((0, 4), (0, 6)))
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(JobError, match=r"MOE0801.*it is a link"):
        read_part(Checkpoint(draft.folder), "model/weight", ((0, 4), (0, 6)))
    for name in (INDEX, HEAD):
        (draft.folder / name).rename(tmp_path / name)
        (draft.folder / name).symlink_to(tmp_path / name)
        with pytest.raises(JobError, match=rf"MOE0801.*{name}: it is a link"):
            Checkpoint(draft.folder)


def test_pipes_and_folders_are_refused_and_never_waited_for(draft: Draft) -> None:
    for make in (os.mkfifo, os.mkdir):
        head = draft.write() / HEAD
        head.unlink()
        make(head)
        with pytest.raises(JobError, match=r"MOE0801.*it is no file"):
            Checkpoint(draft.folder)
        head.unlink() if make is os.mkfifo else head.rmdir()


def change(**fields: Any) -> Callable[[Draft], Any]:
    return lambda draft: draft.index["tensors"]["model/weight"].update(fields)


HOSTILE: dict[str, tuple[Callable[[Draft], Any], str]] = {
    "a chunk is missing": (change(files=[0]), "2 chunks, but ranks of 1"),
    "a chunk too many": (change(files=[0, 1, 1]), "2 chunks, but ranks of 3"),
    "cuts that do not divide": (change(cuts=[3, 2]), r"cuts \[3, 2\] do not divide"),
    "cuts of other dims": (change(cuts=[2]), "differ in length"),
    "no cut at all": (change(cuts=[1, 0]), "greater than or equal to 1"),
    "a rank that there is not": (change(files=[0, 2]), "a chunk is of rank 2, but there are 2 ranks"),
    "a negative rank": (change(files=[0, -1]), "greater than or equal to 0"),
    "a rank as a path": (change(files=["../../etc/passwd", 1]), "valid integer"),
    "a file's name": (change(file="../../etc/passwd"), "not permitted"),
    "digests of another length": (change(digests=["0" * 128, "0" * 64]), "number of its digests"),
    "digests that are none": (change(digests=["x" * 64, "0" * 64]), "match pattern"),
    "another dtype": (change(dtype="F99"), "there is no dtype F99"),
    "a huge shape": (change(shape=[1 << 61, 1 << 61]), "number of its digests"),
    "more bytes than the shard has": (
        change(shape=[4000, 6], digests=["0" * 64] * 2),
        "rank-00000.safetensors has fewer bytes than the index says",
    ),
    "a number with a point": (change(shape=[4.0, 6]), "valid integer"),
    "fewer headers": (lambda draft: draft.index["headers"].pop(), "it has 1 headers, but 2 ranks"),
    "no fields of the model": (lambda draft: draft.index.pop("model"), "model: Field required"),
    "a layer without fields": (
        lambda draft: draft.index["model"].update(kinds=[0]),
        "model: a layer has a kind that is not there",
    ),
    "no tokens": (lambda draft: draft.index.pop("job_tokens"), "job_tokens: Field required"),
    "an unknown field": (lambda draft: draft.index.update(run="rm"), "not permitted"),
    "shards of fewer ranks": (lambda draft: draft.head["shard_bytes"].pop(), "it has 1 shards, but 2 ranks"),
    "no ranks": (lambda draft: draft.head.update(world_size=0), "greater than or equal to 1"),
    "a step below 0": (lambda draft: draft.head.update(step=-1), "greater than or equal to 0"),
}


@each_row("fault", list(HOSTILE))
def test_an_index_that_moec_does_not_write_is_refused(tmp_path: Path, fault: str) -> None:
    """With digests that match: no accident, but intent."""
    draft = new_draft(tmp_path)
    act, message = HOSTILE[fault]
    act(draft)
    with pytest.raises(JobError, match=f"(?s)MOE0801.*{message}"):
        Checkpoint(draft.write())


@each_row(
    ("old", "new", "message"),
    [
        (b'"step":1,', b'"step":NaN,', "NaN is no number"),
        (b'"step":1,', b'"step":1.0,', "digest"),
        (b'"step":1,', b'"step":1,"step":2,', "digest"),
        (b"{", b"[" * 100_000, "not JSON"),
        (b'"format":2', b'"format":3', "MOE0802.*format 3, this moec reads up to 2"),
        (b'"format":2', b'"format":"2"', "MOE0802"),
        (b"toy", b"\xff\xff\xff", "not JSON"),
    ],
)
def test_a_head_that_moec_does_not_write_is_refused(tmp_path: Path, old: bytes, new: bytes, message: str) -> None:
    draft = new_draft(tmp_path)
    head = draft.write() / HEAD
    head.write_bytes(head.read_bytes().replace(old, new, 1))
    with pytest.raises(JobError, match=f"(?s){message}"):
        Checkpoint(draft.folder)


def test_a_million_tensors_are_refused_in_little_memory(draft: Draft) -> None:
    entry = b'{"dtype":"F32","shape":[0],"cuts":[1],"files":[0],"digests":[""]}'
    tensors = b",".join(b'"model/%d":%b' % (i, entry) for i in range(1_000_000))
    content = canonical(draft.index).replace(b'"tensors":{', b'"tensors":{' + tensors + b",", 1)
    draft.write()
    (draft.folder / INDEX).write_bytes(content)
    head = index_module.head_bytes({**draft.head, "index": digest(content)})
    (draft.folder / HEAD).write_bytes(head)
    tracemalloc.start()
    try:
        with pytest.raises(JobError, match=r"MOE0801.*1000002 tensors; the limit is 100000"):
            Checkpoint(draft.folder)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(content)
    finally:
        tracemalloc.stop()


def test_an_index_above_the_limit_is_not_read(draft: Draft) -> None:
    with (draft.write() / INDEX).open("ab") as stream:
        stream.truncate(1 << 40)  # sparse
    with pytest.raises(JobError, match=r"MOE0801.*1099511627776 bytes; the limit is"):
        Checkpoint(draft.folder)


def damaged_header(table: bytes, tail: bytes = b"") -> bytes:
    return len(table).to_bytes(8, "little") + table + tail


@each_row(
    "content",
    [
        b"\xff" * 8,
        damaged_header(b"[]"),
        damaged_header(b"{" * 100_000),
        damaged_header(b'{"a":1}'),
        damaged_header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"123"),
        damaged_header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"12345"),
        damaged_header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}}', b"12345"),
        damaged_header(b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}'),
        damaged_header(b'{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}', b"1234"),
        damaged_header(b'{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}', b"1234"),
        damaged_header(
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
            b"1234",
        ),
    ],
)
def test_a_header_that_does_not_describe_the_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(content)
    with pytest.raises(JobError, match="MOE0801"):
        ShardFile(file)


@each_row("fault", ["missing", "another shape", "another dtype"])
def test_a_shard_with_other_tensors_than_the_index_is_refused(tmp_path: Path, fault: str) -> None:
    draft = new_draft(tmp_path)
    tensors = {"missing": ("b", "F32", (4, 3)), "another shape": ("model/weight", "F32", (3, 4))}
    name, dtype, shape = tensors.get(fault, ("model/weight", "I32", (4, 3)))
    shard = draft.folder / shard_name(0)
    payload = shard.read_bytes()[-48:]
    header = header_of([(name, dtype, shape, 48)])
    shard.write_bytes(header + payload)
    draft.index["headers"][0] = digest(header)
    draft.head["shard_bytes"][0] = len(header) + 48
    draft.write()
    with pytest.raises(JobError, match=r"MOE0801.*model/weight is"):
        read_part(Checkpoint(draft.folder), "model/weight", ((0, 4), (0, 6)))
    assert list(damages(Checkpoint(draft.folder)))


def test_reading_imports_no_torch(draft: Draft) -> None:
    code = (
        "import sys, moec, moec.runtime.checkpoint.convert\n"
        f"path = moec.latest({str(draft.write().parent)!r})\n"
        "moec.runtime.checkpoint.format.reading.Checkpoint(path)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
