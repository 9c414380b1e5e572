"""The thread that hashes a shard's blocks while they are written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from moec.runtime.checkpoint.format import shards
from moec.runtime.checkpoint.format.shards import HostTensor, write_shard

EXITS = """
import _thread, sys, threading
from pathlib import Path
from moec.runtime.checkpoint.format import shards

begun = threading.Event()

def endless(block):
    begun.set()
    threading.Event().wait()

shards.digest = endless
piece = shards.HostTensor("a", "U8", (4,), memoryview(bytes(4)))
_thread.start_new_thread(shards.write_shard, (Path(sys.argv[1]), [piece]))
assert begun.wait(60)
"""


def test_the_interpreters_exit_does_not_wait_for_it(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", EXITS, str(tmp_path / "shard")], check=True, timeout=60)


def test_it_stops_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the block after the error; the blocks of a large shard take long."""
    hashed, failed, plain = list[int](), threading.Event(), shards.digest

    def digest(block: bytes | memoryview) -> str:
        hashed.append(len(block))
        assert failed.wait(60)
        return plain(block)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shards, "BLOCK_BYTES", 4)
    monkeypatch.setattr(shards, "digest", digest)
    monkeypatch.setattr(os, "fsync", full)
    before = set(threading.enumerate())
    with pytest.raises(OSError, match="No space left"):
        write_shard(tmp_path / "shard", [HostTensor("a", "U8", (400,), memoryview(bytes(400)))])
    failed.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert len(hashed) <= 1
