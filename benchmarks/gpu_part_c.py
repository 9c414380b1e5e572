"""Part c of `gpu.py`: whole layers, forward and backward, of moec and of what others offer."""

from __future__ import annotations

from typing import Any

import torch
from gpu_clock import passes_ms
from gpu_rows import Measurement
from layer import MEGABYTE, Clock, Contender, check, peak_bytes
from layer_peers import IMPLEMENTATIONS, VARIANTS
from layer_problem import CUDA_SHAPES, Shape, make_problem, reference

GRAPH = "moec in a graph"
OURS = ("moec", "moec by kernels", "moec by grouped_mm", GRAPH)
PEERS = ("Liger", "F.grouped_mm", "F.grouped_mm compiled", "ScatterMoE", "transformers grouped_mm")
IMPLS = (OURS[0], *PEERS, *OURS[1:], "dense")
LAYERS = {**IMPLEMENTATIONS["cuda"], **VARIANTS}

FIRST = {(2048, 768, 128, 8), (4096, 14336, 8, 2), (7168, 2048, 256, 8)}
"""Qwen3-30B-A3B, Mixtral 8x7B, DeepSeek-V3."""

SMALL = 1024
"""Tokens up to which a graph is compared: such a layer is bound by its launches."""

LIMITS = {"Liger": 120.0, "F.grouped_mm compiled": 90.0, "moec": 120.0, "moec by kernels": 120.0}
"""Seconds of those that search tiles or compile for each layer."""

ON_CPU = (Shape(32, 32, 16, 4, 2), Shape(64, 32, 16, 4, 2))


def measurements(device: str) -> list[Measurement]:
    """Of part c: 8,192 tokens of the three first layers, then 1,024 and 32,768 of them, then the other layers."""
    tiers: list[list[Shape]] = [list(ON_CPU)] if device == "cpu" else [[], [], [], []]
    for shape in () if device == "cpu" else CUDA_SHAPES:
        first = (shape.dim, shape.hidden, shape.experts, shape.k) in FIRST
        tier = (0 if shape.tokens == 8192 else 1) if first else (2 if shape.tokens == 8192 else 3)
        tiers[tier].append(shape)
    made = [_compiled(number, shapes) for number, shapes in enumerate(tiers) if number in (0, 2)]
    timed = [
        Measurement(
            f"c {impl} {shape}",
            f"c {number} {impl}",
            "gpu_part_c:layer",
            {"part": "c", "impl": impl, "shape": str(shape)},
            LIMITS.get(impl, 60.0),
        )
        for number, shapes in enumerate(tiers)
        for impl in IMPLS
        for shape in shapes
        if impl != GRAPH or shape.tokens <= SMALL
    ]
    return sorted(made + timed, key=lambda one: int(one.group.split()[1]))


def _compiled(tier: int, shapes: list[Shape]) -> Measurement:
    """Liger's tiles of a tier's layers, which are compiled before anything of them is timed; the next has the same."""
    widths = {(shape.dim, shape.hidden): str(shape) for shape in shapes}
    arguments = {"part": "c", "shapes": list(widths.values())}
    return Measurement(
        f"c compiled {tier}", f"c {tier} compiled", "gpu_compile:liger_tiles", arguments, 60.0 * len(widths)
    )


def layer(device: str, part: str, impl: str, shape: str) -> dict[str, Any]:
    """Milliseconds of both passes with the stream held and without, TFLOP/s of the held ones, and peak memory.

    The output and the input's gradient are checked against float64 before. Raises `NotRun` and `WrongError`.
    """
    if device == "cuda":
        torch.cuda.empty_cache()
    problem = make_problem(Shape.parse(shape), torch.float32 if device == "cpu" else torch.bfloat16, device)
    exact = reference(problem)[:2]
    x = problem.x.clone().requires_grad_()
    contender = Contender(LAYERS[impl](problem))
    if impl != "dense":
        check(contender, problem, x, exact)
    for _ in range(2):
        contender.step(x, problem.grad, Clock(device, 2))
    rounds = 3 if device == "cpu" else 20 if problem.shape.tokens <= 8192 else 8
    forward, backward = passes_ms(contender, x, problem.grad, rounds, held=True)
    plain = passes_ms(contender, x, problem.grad, rounds, held=False)
    flops = problem.shape.flops
    return {
        "forward_ms": forward,
        "backward_ms": backward,
        "forward_tflops": flops / forward / 1e9,
        "backward_tflops": 2 * flops / backward / 1e9,
        "launched_forward_ms": plain[0],
        "launched_backward_ms": plain[1],
        "peak_mb": peak_bytes(contender, x, problem.grad, Clock(device, 2)) / MEGABYTE,
    }
