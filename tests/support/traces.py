"""Small traces of loads, as a training run would write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def trace_of(iterations: int = 12, layers: int = 2, ranks: int = 2, experts: int = 8, seed: int = 0) -> Any:
    """Counts of choices [iterations, layers, ranks, experts]: in each layer another expert is the largest, and loads
    drift."""
    draw = np.random.default_rng(seed)
    popular = np.stack([np.roll(0.6 ** np.arange(experts), 3 * layer) for layer in range(layers)])
    drift = np.exp(np.cumsum(draw.normal(0, 0.05, (iterations, layers, experts)), 0))
    shares = popular * drift
    rows = 4096 * shares / shares.sum(-1, keepdims=True)
    return draw.poisson(np.repeat(rows[:, :, None], ranks, 2))


def with_trace(text: str, name: str = "loads.npz") -> str:
    """The text of a model with a trace as its loads."""
    return text.replace("train {", f'train {{ routing = trace("{name}");', 1)


def write_traced(folder: Path, text: str, counts: Any = None) -> Path:
    """A file of a model with its trace beside it, by default that of two layers of 8 experts."""
    np.savez(folder / "loads.npz", counts=trace_of() if counts is None else counts)
    (folder / "traced.moe").write_text(with_trace(text))
    return folder / "traced.moe"
