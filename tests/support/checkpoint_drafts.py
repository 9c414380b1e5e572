"""A checkpoint as its two dicts and its shards' bytes, which tests change before they write it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moec.runtime.checkpoint.format.index import HEAD, INDEX, canonical, digest, head_bytes, shard_name
from moec.runtime.checkpoint.format.shards import HostTensor, write_shard

WEIGHT = np.arange(24, dtype=np.float32).reshape(4, 6)
COUNT = np.arange(3, dtype=np.int64)


@dataclass
class Draft:
    """Two ranks: `model/weight` [4, 6], one column half each; `model/count` [3], on rank 1."""

    folder: Path
    head: dict[str, Any] = field(default_factory=dict)
    index: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        halves = [np.ascontiguousarray(half) for half in np.split(WEIGHT, 2, axis=1)]
        pieces = [[HostTensor("model/weight", "F32", (4, 3), halves[rank].data.cast("B"))] for rank in range(2)]
        pieces[1].append(HostTensor("model/count", "I64", (3,), COUNT.data.cast("B")))
        written = [write_shard(self.folder / shard_name(rank), pieces[rank]) for rank in range(2)]
        digests = [each.digests["model/weight"] for each in written]
        self.index = {
            "headers": [each.header for each in written],
            "tensors": {
                "model/weight": {"dtype": "F32", "shape": [4, 6], "cuts": [1, 2], "files": [0, 1], "digests": digests},
                "model/count": {
                    "dtype": "I64", "shape": [3], "cuts": [1], "files": [1],
                    "digests": [written[1].digests["model/count"]],
                },
            },
            "settings": {"seed": 0, "step": 1},
            "job_steps": 1,
            "job_tokens": 8,
            "model": {"model": {}, "layers": [], "kinds": []},
            "optimizer": None,
            "extras": {},
        }  # fmt: skip
        self.head = {
            "moec": "0.1.0", "model": "toy", "spec": digest(b""), "step": 1, "world_size": 2, "data_size": 2,
            "degrees": {"dense": {"tp": 2}}, "optimizer": None, "shard_bytes": [each.num_bytes for each in written],
        }  # fmt: skip

    def write(self) -> Path:
        """Writes both JSON files, with the digests of what they are now."""
        index = canonical(self.index)
        (self.folder / INDEX).write_bytes(index)
        (self.folder / HEAD).write_bytes(head_bytes({**self.head, "index": digest(index)}))
        return self.folder
