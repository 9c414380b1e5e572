"""Choices of slots, where experts have guests, on the host and by kernels; they belong to part d of `gpu.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gpu_clock import wall_ms
from gpu_rows import Measurement

from moec.runtime.backends.torch import torch_backend
from moec.runtime.backends.triton import triton_backend

CASES = {
    "cuda": {
        "256 experts, 64 ranks, guests of 63": {"experts": 256, "ranks": 64, "guests": 1, "others": 63},
        "256 experts, 64 ranks, guests of 8": {"experts": 256, "ranks": 64, "guests": 1, "others": 8},
        "256 experts, 64 ranks, 4 guests each of 252": {"experts": 256, "ranks": 64, "guests": 4, "others": 252},
        "64 experts, 8 ranks, guests of 7": {"experts": 64, "ranks": 8, "guests": 1, "others": 7},
    },
    "cpu": {"tiny": {"experts": 8, "ranks": 4, "guests": 1, "others": 3}},
}
TOKENS, K = 8192, 8


def measurements(device: str) -> list[Measurement]:
    return [
        Measurement(f"d slots {name}", "d slots", "gpu_slots:choose", {"part": "d", "slots": name}, 60)
        for name in CASES[device]
    ]


def choose(device: str, part: str, slots: str) -> dict[str, Any]:
    """Milliseconds until the splits are on the host. Raises `AssertionError` if kernels differ from the host."""
    given = arguments(device, **CASES[device][slots])
    for ours, theirs in zip(*(each.assign_slots(*given) for each in (triton_backend, torch_backend)), strict=True):
        assert torch.equal(ours, theirs)
    return {
        "kernels_ms": wall_ms(lambda: triton_backend.assign_slots(*given), device),
        "host_ms": wall_ms(lambda: torch_backend.assign_slots(*given), device),
    }


def arguments(device: str, experts: int, ranks: int, guests: int, others: int) -> tuple[Any, ...]:
    """Those of `assign_slots` on the first rank: loads that fall as 1 / n, and guests of the `others` busiest
    experts in turn."""
    draw = np.random.default_rng(0)
    order = draw.permutation(experts)
    load = np.empty(experts)
    load[order] = 1 / np.arange(1, experts + 1)
    table = np.full((ranks, experts // ranks + guests), -1)
    table[:, :-guests] = np.arange(experts).reshape(ranks, -1)
    turn = 0
    for row in table:
        for slot in range(len(row) - guests, len(row)):
            while order[turn % others] in row:
                turn += 1
            row[slot], turn = order[turn % others], turn + 1
    chosen = torch.multinomial(torch.from_numpy(load).expand(TOKENS, -1), min(K, experts))[None]
    counts = draw.multinomial(chosen.numel(), load / load.sum(), ranks)
    counts[0] = np.bincount(chosen.flatten(), minlength=experts)
    of_slots = torch.from_numpy(np.stack([table, np.zeros_like(table)]))
    return chosen.to(device), torch.from_numpy(counts).to(device), of_slots, 0
