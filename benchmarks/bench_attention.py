"""Time of emitted attention over PyTorch's own call: each kind alone, forward and backward, on one core.

PyTorch's call gets its mask ready made, values of the emitted width, and no sinks, which
`F.scaled_dot_product_attention` does not have. Projections and positions are not part of either. Times are of the
processor, so that other processes do not count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from report import Row, parser, report
from torch import Tensor

from moec.codegen.emit import emit_function
from moec.passes.ir import Block, Output, Program, Value
from moec.passes.ir import ops as o
from moec.runtime import ops  # noqa: F401  (registers torch.ops.moec.*)

BATCH, SEQUENCE, HEADS, WIDTH = 1, 1024, 8, 64
LIMIT = 1.1


@dataclass(frozen=True)
class Kind:
    """Attributes of the op, heads of keys, the width of values, and what is beside q, k and v."""

    attributes: Mapping[str, Any] = field(default_factory=dict)
    kv_heads: int = HEADS
    value_dim: int = WIDTH
    sinks: bool = False
    packed: bool = False


KINDS = {
    "causal": Kind(),
    "grouped": Kind(kv_heads=2),
    "causal = false": Kind({"causal": False}),
    "multiplier": Kind({"scale": 0.1}),
    "window": Kind({"window": 128}),
    "window, both ways": Kind({"window": 128, "causal": False}),
    "packed": Kind(packed=True),
    "packed, window": Kind({"window": 128}, packed=True),
    "sinks": Kind(sinks=True),
    "sinks, grouped": Kind(sinks=True, kv_heads=2),
    "sinks, window": Kind({"window": 128}, sinks=True),
    "values of half the width (mla)": Kind(value_dim=WIDTH // 2),
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--dtype", default="float32")
    options.add_argument("--sequence", type=int, default=SEQUENCE)
    options.add_argument("--rounds", type=int, default=7)
    given = options.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, given.dtype)
    rows = []
    for name, kind in KINDS.items():
        emitted, own = problem(kind, given.sequence, dtype)
        rows.append(Row(name, ratio(emitted, own, given.rounds), "×", LIMIT))
    report(f"attention over SDPA's own call, {given.dtype}, {given.sequence} tokens", rows, given.json)


def problem(kind: Kind, sequence: int, dtype: torch.dtype) -> tuple[Callable[[], None], Callable[[], None]]:
    """Forward and backward of the emitted graph, and of PyTorch's call."""
    generator = torch.Generator().manual_seed(0)
    widths = ((HEADS, WIDTH), (kind.kv_heads, WIDTH), (kind.kv_heads, kind.value_dim))
    shapes = [(BATCH, sequence, heads, width) for heads, width in widths]
    shapes += [(HEADS,)] if kind.sinks else []
    leaves = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    segments = torch.arange(sequence).expand(BATCH, sequence) // (sequence // 3)
    cotangent = torch.randn(BATCH, sequence, HEADS, kind.value_dim, generator=generator).to(dtype)
    module = graph_of(kind, leaves, segments)
    numbers = [segments] if kind.packed else []

    def emitted() -> None:
        q, k, v, *sinks = leaves
        torch.autograd.grad(module(q, k, v, *numbers, *sinks), leaves, cotangent)

    mask, transposed = mask_of(kind, segments), cotangent.transpose(1, 2)
    causal = kind.attributes.get("causal", True) and mask is None
    scale = kind.attributes.get("scale", 1 / math.sqrt(WIDTH))

    def own() -> None:
        q, k, v = (x.transpose(1, 2) for x in leaves[:3])
        grouped = kind.kv_heads != HEADS
        result = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)
        torch.autograd.grad(result, leaves[:3], transposed)

    return emitted, own


def graph_of(kind: Kind, leaves: list[Tensor], segments: Tensor) -> Callable[..., Tensor]:
    """The graph of one op `attention`."""
    names = ["q", "k", "v", *(["segments"] if kind.packed else []), *(["sinks"] if kind.sinks else [])]
    tensors = dict(zip(["q", "k", "v", *(["sinks"] if kind.sinks else [])], leaves, strict=True))
    tensors["segments"] = segments
    dtypes = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int64: "int64"}
    values = [Value(name=name, shape=tuple(tensors[name].shape), dtype=dtypes[tensors[name].dtype]) for name in names]
    op = o.Attention(operands=tuple(names), optional=tuple(names[3:]), results=(), **kind.attributes)
    (found,) = op.infer(values, {})
    result = Value(name="attended", shape=found.shape, dtype=found.dtype)
    block = Block(
        name="alone",
        inputs=tuple(values),
        parameters=(),
        ops=(op.with_results([result]),),
        outputs=(Output("attended", "residual"),),
    )
    return emit_function(Program(name="alone", blocks=(block,)), "alone").module


def mask_of(kind: Kind, segments: Tensor) -> Tensor | None:
    """The boolean mask that PyTorch's call needs, if it needs one."""
    window, causal = kind.attributes.get("window", 0), kind.attributes.get("causal", True)
    if not window and not kind.packed:
        return None
    i, j = torch.arange(segments.shape[1])[:, None], torch.arange(segments.shape[1])[None]
    mask = torch.ones(1, 1, *segments.shape[1:], segments.shape[1], dtype=torch.bool)
    mask = mask & (j <= i) if causal else mask
    mask = mask & ((i - j).abs() < window) if window else mask
    return mask & (segments[:, None, :, None] == segments[:, None, None]) if kind.packed else mask


def ratio(emitted: Callable[[], None], own: Callable[[], None], rounds: int) -> float:
    """The shortest processor time of one over that of the other, measured in turns."""
    best = {emitted: math.inf, own: math.inf}
    emitted(), own()
    for _ in range(rounds):
        for run in best:
            start = time.process_time()
            run()
            best[run] = min(best[run], time.process_time() - start)
    return best[emitted] / best[own]


if __name__ == "__main__":
    main()
