"""Saving and loading against torch.save and torch.distributed.checkpoint, and resharding 61 layers of 256 experts."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from checkpoint_problem import WAYS, measured
from report import Row, median, parser, report
from torch import Tensor

import moec
from moec.codegen.plan import Plan, PlanParameter
from moec.passes.ir import Shard
from moec.runtime.checkpoint.description import write_description
from moec.runtime.checkpoint.format.grid import Box, chunk_box, chunk_number
from moec.runtime.checkpoint.format.index import INDEX, MODEL, empty_entry, shard_name
from moec.runtime.checkpoint.format.parts import host_copies
from moec.runtime.checkpoint.format.reading import Checkpoint
from moec.runtime.checkpoint.format.shards import write_shard
from moec.runtime.checkpoint.loading import Loading
from moec.runtime.checkpoint.optimizer_state import PREFIX

MANY = """
model "many" {{
  vocab = 256; dim = 8; depth = {depth}; dtype = fp32
  layers {{
    attention = mha(heads = 2, rope = rope())
    moe {{ experts = 256 * swiglu(8); gate = topk(8, normalize = true) }}
  }}
}}
cluster "many" {{ device = cpu; level "process" {{ size = {ranks} }} }}
train {{ batch = 64; sequence = 8 }}
parallel {{ dp = {ranks}; ep = {ep}; zero = {zero} }}
"""
KINDS = (MODEL, f"{PREFIX}exp_avg/", f"{PREFIX}exp_avg_sq/")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--sizes", nargs="*", default=["demo", "2 GB"])
    chosen = options.parse_args()
    rows = [row for size in chosen.sizes for row in against_others(size, chosen.runs)]
    with tempfile.TemporaryDirectory() as folder:
        rows += resharding(Path(folder))
    report("checkpoints", rows, chosen.json)


def against_others(size: str, runs: int) -> list[Row]:
    """Each way in a process of its own, in turns."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    problem = Path(__file__).with_name("checkpoint_problem.py")
    for _ in range(runs):
        for way, results in found.items():
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, str(problem), way, size, folder]
                run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                results.append(json.loads(run.stdout.splitlines()[-1]))

    def middle(way: str, what: str) -> float:
        return median([result[what] for result in found[way]])

    rows = []
    for what in ("save", "load"):
        rows.append(Row(f"{size}: {what}", middle("moec", f"{what} seconds"), "s"))
        for way, name in (("torch", "torch.save"), ("dcp", "torch.distributed.checkpoint")):
            ratio = median(
                [m[f"{what} seconds"] / o[f"{what} seconds"] for m, o in zip(found["moec"], found[way], strict=True)]
            )
            rows.append(Row(f"{size}: {what}, seconds / {name}", ratio))
        rows.append(Row(f"{size}: {what}, most memory above the model", middle("moec", f"{what} bytes") / 1e6, "MB"))
        for way, name in (("torch", "torch.save"), ("dcp", "torch.distributed.checkpoint")):
            rows.append(Row(f"{size}: the same of {name}", middle(way, f"{what} bytes") / 1e6, "MB"))
    stall = median([result["stall"] / result["copy"] for result in found["moec"]])
    return [*rows, Row(f"{size}: a step waits for a save / for a copy alone", stall, "", 1.2)]


# ---- resharding ----------------------------------------------------------------------------------------


def resharding(folder: Path, depth: int = 61) -> list[Row]:
    """One rank of `ep` 16 × `zero` 3 loads what 64 ranks with `ep` 64 saved: model and two states, and the index."""
    saved = moec.compile(MANY.format(depth=depth, ranks=64, ep=64, zero=0))
    loaded = moec.compile(MANY.format(depth=depth, ranks=64, ep=16, zero=3))
    assert any(data.zero_cut and data.mesh != "dense" for data in loaded.parameters.values())
    begin = time.perf_counter()
    write_all(saved, folder / "100")
    written = time.perf_counter() - begin
    opened, parsed = time.perf_counter(), 0.0
    parts: dict[str, Tensor] = {}

    def load() -> None:
        nonlocal parsed
        loading = Loading(Checkpoint(folder / "100"))
        parsed = time.perf_counter() - opened
        for name, data in loaded.parameters.items():
            for kind in KINDS:
                box, _ = place_of(loaded, data, rank=5)
                loading.boxes[kind + name] = box
                parts[kind + name] = torch.empty([stop - start for start, stop in box])
        loading.checkpoint.read(loading.blocks(), check=True)
        loading.read(parts, check=False)  # as `Job.load`: the digests were compared above

    opened = time.perf_counter()
    seconds, num_bytes = measured(load)
    for name, data in loaded.parameters.items():
        box, _ = place_of(loaded, data, rank=5)
        for kind in KINDS:
            assert torch.equal(parts[kind + name], content_of(name, data, box)), name
    entries = len(Checkpoint(folder / "100").index.tensors)
    index_bytes = (folder / "100" / INDEX).stat().st_size
    return [
        Row(f"{depth} layers × 256 experts: tensors in the index", entries),
        Row("its index", index_bytes / 1e6, "MB"),
        Row("writing all 64 shards, one after another", written, "s"),
        Row("one rank of ep 16 × zero 3: reading the index", parsed, "s"),
        Row("one rank of ep 16 × zero 3: loading, the index included", seconds, "s", 30.0),
        Row("its memory", num_bytes / 1e9, "GB", 2.0),
    ]


def place_of(plan: Plan, data: PlanParameter, rank: int) -> tuple[Box, tuple[int, ...]]:
    """A rank's part of a parameter, and the cuts."""
    mesh = plan.meshes[data.mesh]
    cuts, chunk = [1] * len(data.shape), [0] * len(data.shape)
    for axis, placement in data.optimizer_state.placements:
        if isinstance(placement, Shard):
            cuts[placement.dim] *= mesh.size(axis)
            chunk[placement.dim] = chunk[placement.dim] * mesh.size(axis) + mesh.coordinate(rank, axis)
    return chunk_box(data.shape, cuts, chunk), tuple(cuts)


def content_of(name: str, data: PlanParameter, box: Box) -> Tensor:
    """A part of a parameter whose elements are all different."""
    part = torch.full([stop - start for start, stop in box], float(len(name)))
    for dim, (start, stop) in enumerate(box):
        stride = math.prod(data.shape[dim + 1 :])
        part += stride * torch.arange(start, stop, dtype=torch.float32).view(-1, *[1] * (len(box) - dim - 1))
    return part


def write_all(plan: Plan, path: Path) -> None:
    """The checkpoint that the plan's ranks would write, replicas on the first rank that has them."""
    path.mkdir()
    tensors: dict[str, dict[str, Any]] = {}
    shards = []
    for rank in range(plan.world_size):
        pieces, places = [], {}
        for name, data in plan.parameters.items():
            box, cuts = place_of(plan, data, rank)
            step = [dim // cut for dim, cut in zip(data.shape, cuts, strict=True)]
            number = chunk_number(cuts, [start // size for (start, _), size in zip(box, step, strict=True)])
            for kind in KINDS:
                entry = tensors.setdefault(kind + name, empty_entry("F32", data.shape, cuts))
                if entry["files"][number] is None:
                    entry["files"][number] = rank
                    places[kind + name] = entry, number
                    pieces += host_copies({kind + name: content_of(name, data, box)})
        written = write_shard(path / shard_name(rank), pieces)
        shards.append((written.num_bytes, written.header))
        for full, (entry, number) in places.items():
            entry["digests"][number] = written.digests[full]
    head = {"moec": plan.moec, "step": 100, "data_size": plan.data_size, "degrees": {}, "optimizer": None}
    index = {
        "tensors": tensors, "settings": {"seed": 0, "step": 100}, "job_steps": 100, "job_tokens": 0, "optimizer": None,
        "extras": {},
    }  # fmt: skip
    write_description(path, path, plan, shards, head, index)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
