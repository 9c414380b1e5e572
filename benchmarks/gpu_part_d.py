"""Part d of `gpu.py`: training steps of whole models on one device, beside the memory that moec predicts for them; and
choices of slots."""

from __future__ import annotations

import statistics
import time
from typing import Any

import gpu_slots
import torch
from gpu_rows import Measurement

import moec
from moec.passes.cost.memory import memory_of
from moec.passes.cost.totals import tally

TEXT = """
model "{name}" {{
  vocab = {vocab}; dim = {dim}; depth = {depth}; dtype = {dtype}
  layers {{
    attention = gqa(
      heads = {heads}, kv_heads = {kv_heads}, head_dim = {head_dim}, rope = rope(theta = 1e6), qk_norm = {qk_norm}
    )
    moe {{ experts = {experts} * swiglu({hidden}); gate = topk({k}, normalize = true); balance = [switch_loss(0.001)] }}
  }}
}}
cluster "one" {{ device = {device}; level "gpu" {{ size = 1 }} }}
train {{ batch = {batch}; sequence = {sequence}; optimizer = adamw(lr = 1e-5) }}
parallel {{ {parallel} }}
"""

QWEN = {
    "vocab": 151_936, "dim": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "experts": 128, "hidden": 768, "k": 8,
    "dtype": "bf16", "device": "h100", "qk_norm": "head",
}  # fmt: skip
MIXTRAL = {
    "vocab": 32_000, "dim": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "experts": 8, "hidden": 14_336, "k": 2,
    "dtype": "bf16", "device": "h100", "qk_norm": "none",
}  # fmt: skip
TINY = {
    "vocab": 64, "dim": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "experts": 4, "hidden": 16, "k": 2,
    "dtype": "fp32", "device": "cpu", "qk_norm": "head", "depth": 2, "batch": 2, "sequence": 16,
}  # fmt: skip

MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {
        "qwen3_30b_a3b, 4 layers": {**QWEN, "depth": 4, "batch": 2, "sequence": 4096},
        "mixtral_8x7b, 1 layer": {**MIXTRAL, "depth": 1, "batch": 2, "sequence": 4096},
        "qwen3_30b_a3b, 4 layers, recomputed": {
            **QWEN, "depth": 4, "batch": 2, "sequence": 4096, "parallel": "recompute = layer",
        },
    },
    "cpu": {"tiny": TINY},
}  # fmt: skip
"""A few layers of published models, which fit an H100 with AdamW's state."""

WARM_UP = 3
ROUNDS = {"cuda": 12, "cpu": 2}
MEGABYTE = 1e6


def measurements(device: str) -> list[Measurement]:
    return [
        Measurement(f"d step {name}", f"d {name}", "gpu_part_d:step", {"part": "d", "name": name}, 150)
        for name in MODELS[device]
    ] + gpu_slots.measurements(device)


def step(device: str, part: str, name: str) -> dict[str, Any]:
    """Milliseconds of forward with backward and of clip with optimizer, tokens and model FLOP/s, peak memory.

    Raises `AssertionError` if the loss does not fall on a batch that is given again and again.
    """
    sizes = {"parallel": "", **MODELS[device][name]}
    spec = TEXT.format(name="model", **sizes)
    plan = moec.compile(spec)
    counts, memory = tally(plan.program, plan.spec), memory_of(plan.program, plan.spec)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(sizes["vocab"], (sizes["batch"], sizes["sequence"] + 1), generator=generator).to(device)
    with moec.launch(plan, device=device) as job:
        before = _now(device)
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        built = _now(device) - before
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        losses, times = [], []
        for _ in range(WARM_UP + ROUNDS[device]):
            marks = [_now(device)]
            loss = job.step(model, tokens[:, :-1], tokens[:, 1:])
            marks.append(_now(device))
            job.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            marks.append(_now(device))
            losses.append(float(loss))
            times.append((marks[1] - marks[0], marks[2] - marks[1]))
        assert losses[-1] < losses[0], losses
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    passes, update = (statistics.median(part) for part in zip(*times[WARM_UP:], strict=True))
    return {
        "build_s": built,
        "passes_ms": 1e3 * passes,
        "update_ms": 1e3 * update,
        "tokens_per_s": counts.tokens / (passes + update),
        "tflops": counts.flops_per_token * counts.tokens / (passes + update) / 1e12,
        "peak_mb": peak / MEGABYTE,
        "predicted_mb": memory.peak.bytes.total / MEGABYTE,
        "parameters": counts.parameters,
        "losses": [losses[0], losses[-1]],
    }


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
