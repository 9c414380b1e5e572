"""One way of saving and loading one model, in a process of its own: bench_checkpoint.py starts it.

    checkpoint_problem.py WAY SIZE FOLDER

Prints JSON: seconds to save until the files are synced, seconds to load, seconds that a step waits, and the most memory
above what the model and its optimizer take, in bytes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import moec

MODEL = """
model "saved" {{
  vocab = 256; dim = {dim}; depth = {depth}; dtype = fp32
  layers {{
    attention = mha(heads = 4, rope = rope())
    moe {{ experts = {experts} * swiglu({hidden}); gate = topk(2, normalize = true) }}
  }}
}}
device "roomy" {{ kind = cpu; memory = 64GB; bandwidth = 10GB/s }}
cluster "laptop" {{ device = roomy; level "process" {{ size = 1 }} }}
train {{ batch = 2; sequence = 32; optimizer = adamw(lr = 1e-4) }}
"""
SIZES = {
    "demo": {"dim": 128, "depth": 4, "experts": 8, "hidden": 256},
    "2 GB": {"dim": 512, "depth": 5, "experts": 64, "hidden": 1024},
}
WITH_OPTIMIZER = {"demo": True, "2 GB": False}


def main() -> None:
    way, size, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with moec.launch(moec.compile(MODEL.format(**SIZES[size])), device="cpu") as job:
        model = job.build()
        optimizer = job.optimizer(model)
        if WITH_OPTIMIZER[size]:
            tokens = torch.zeros(2, 32, dtype=torch.int64)
            job.step(model, tokens, tokens)
            optimizer.step()
            optimizer.zero_grad()
        saved = optimizer if WITH_OPTIMIZER[size] else None
        print(json.dumps(WAYS[way](job, model, saved, folder)))


def by_moec(job: Any, model: Any, optimizer: Any, folder: Path) -> dict[str, float]:
    tensors = [p.detach() for p in model.parameters()]
    tensors += [v for state in (optimizer.state.values() if optimizer else ()) for v in state.values()]
    copies: list[float] = []
    stalls: list[float] = []

    def save(number: int) -> None:
        begin = time.perf_counter()
        saving = job.save(folder / f"moec{number}", model, optimizer)
        stalls.append(time.perf_counter() - begin)
        saving.wait()

    def copy() -> None:
        begin = time.perf_counter()
        held = [torch.empty_like(tensor).copy_(tensor) for tensor in tensors]
        copies.append(time.perf_counter() - begin)
        del held

    saved = measured(lambda: save(0))
    loaded = measured(lambda: job.load(folder / "moec0", model, optimizer))
    for number in range(1, 4):
        copy()
        save(number)
    return {**of("save", saved), **of("load", loaded), "stall": min(stalls), "copy": min(copies)}


def by_torch(job: Any, model: Any, optimizer: Any, folder: Path) -> dict[str, float]:
    file = folder / "torch.pt"

    def save() -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict() if optimizer else None}
        with file.open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())

    def load() -> None:
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        if optimizer:
            optimizer.load_state_dict(state["optimizer"])

    return {**of("save", measured(save)), **of("load", measured(load))}


def by_dcp(job: Any, model: Any, optimizer: Any, folder: Path) -> dict[str, float]:
    optimizers = [optimizer] if optimizer else []

    def state() -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizers)
        return {"model": of_model, "optimizer": of_optimizer}

    def save() -> None:
        dcp.save(state(), checkpoint_id=folder / "dcp")

    def load() -> None:
        here = state()
        dcp.load(here, checkpoint_id=folder / "dcp")
        set_state_dict(model, optimizers, model_state_dict=here["model"], optim_state_dict=here["optimizer"])

    assert dist.is_initialized()
    return {**of("save", measured(save)), **of("load", measured(load))}


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and the most resident memory above that before, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = resident("VmRSS")
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin, resident("VmHWM") - before


def resident(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * float(next(line for line in lines if line.startswith(name)).split()[1])


def of(what: str, figures: tuple[float, float]) -> dict[str, float]:
    return {f"{what} seconds": figures[0], f"{what} bytes": figures[1]}


WAYS = {"moec": by_moec, "torch": by_torch, "dcp": by_dcp}

if __name__ == "__main__":
    main()
