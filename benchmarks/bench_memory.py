"""A training step in bf16 with fp32 masters in one process: time, memory between steps, and a step's peak."""

from __future__ import annotations

import gc
import time

import torch
from allocations import peak_bytes
from report import Row, median, parser, report

import moec
from moec.runtime.backends.torch import torch_memory

MODEL = """
model "masters" {{
  vocab = 256; dim = {dim}; depth = 3; dtype = {dtype}
  layers {{
    attention = gqa(heads = 4, kv_heads = 2, rope = rope())
    moe {{ experts = 8 * swiglu({hidden}); gate = topk(2, normalize = true); balance = [switch_loss(0.01)] }}
  }}
  layers 0 {{ ffn = swiglu({ffn}) }}
}}
cluster "laptop" {{ device = cpu; level "process" {{ size = 1 }} }}
train {{ batch = {batch}; sequence = {sequence}; optimizer = adamw(lr = 1e-4) }}
"""
SIZES = {
    "demo": {"dim": 64, "hidden": 128, "batch": 16, "sequence": 128, "steps": 40},
    "large": {"dim": 512, "hidden": 1024, "batch": 4, "sequence": 256, "steps": 12},
}
MB = 1e6


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--dtype", default="bf16")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in SIZES for row in measure(name, chosen.dtype)]
    report(f"a step in {chosen.dtype}, one thread", rows, chosen.json)


def measure(name: str, dtype: str) -> list[Row]:
    size = SIZES[name]
    text = MODEL.format(**size, ffn=2 * size["hidden"], dtype=dtype)
    batch, sequence = size["batch"], size["sequence"]
    with moec.launch(moec.compile(text), device="cpu") as job:
        model = job.build()
        optimizer = job.optimizer(model)
        tokens, labels = torch.randint(256, (2, batch, sequence), generator=torch.Generator().manual_seed(0))

        def step() -> float:
            started = time.process_time()
            job.step(model, tokens, labels)
            optimizer.step()
            optimizer.zero_grad()
            return time.process_time() - started

        for _ in range(3):
            step()
        seconds = [step() for _ in range(size["steps"])]
        kept, added = kept_bytes(), peak_bytes(step)
        elements = sum(parameter.numel() for parameter in model.parameters())
    return [
        Row(f"{name}: a step", 1e3 * median(seconds), "ms"),
        Row(f"{name}: kept between steps, a parameter", kept / elements, "bytes"),
        Row(f"{name}: at most, with what a step adds", (kept + added) / MB, "MB"),
    ]


def kept_bytes() -> int:
    """Bytes of all tensors that Python sees, without blocks that wait to be used again."""
    torch_memory.POOL.release()
    gc.collect()
    storages = [thing.untyped_storage() for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


if __name__ == "__main__":
    main()
