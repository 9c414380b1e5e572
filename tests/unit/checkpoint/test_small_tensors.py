"""Small tensors of a checkpoint: each is read once, and what is used is what was checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.checkpoint_drafts import COUNT, WEIGHT, Draft

from moec.runtime.checkpoint.format.reading import Block, Checkpoint
from moec.runtime.checkpoint.loading import Loading
from moec.runtime.errors import JobError


def test_a_small_tensor_is_read_once_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, reads = Checkpoint._read, list[tuple[int, str, bool]]()

    def note(self: Checkpoint, block: Block, buffer: memoryview, check: bool) -> memoryview:
        reads.append((block.rank, block.name, check))
        return read(self, block, buffer, check)

    monkeypatch.setattr(Checkpoint, "_read", note)
    loading = Loading(Checkpoint(Draft(tmp_path / "100").write()))
    assert torch.equal(loading.read_small("model/count"), torch.from_numpy(COUNT))
    part = loading.read_small("model/weight", ((1, 3), (2, 5)))
    assert torch.equal(part, torch.from_numpy(WEIGHT)[1:3, 2:5])
    assert sorted(reads) == [(0, "model/weight", True), (1, "model/count", True), (1, "model/weight", True)]
    assert not loading.boxes


def test_a_damaged_small_tensor_is_refused(tmp_path: Path) -> None:
    path = Draft(tmp_path / "100").write()
    shard = path / "rank-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-49] ^= 1  # of `count`
    shard.write_bytes(content)
    with pytest.raises(JobError, match=r"MOE0801.*model/count: a digest does not match"):
        Loading(Checkpoint(path)).read_small("model/count")
