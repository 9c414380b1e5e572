"""Compiles on all cores, for Triton's cache on disk, what part c of `gpu.py` would else compile kernel by kernel.

Liger tries some 200 tiles for each layer, and compiles each one: minutes on one core. Here each process takes some of
them, with few tokens and experts, which are no constants of its kernels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import torch
from gpu_child import die_with
from layer_peers import keep_tiles_of_liger, liger
from layer_problem import Shape, make_problem

TOKENS, EXPERTS = 512, 16
"""Multiples of 16, as those of the layers are: Triton compiles other numbers anew."""


def cores() -> int:
    """The processes to use: two cores are left to this one and the system."""
    return max(1, (os.cpu_count() or 2) - 2)


def on_all_cores(function: Callable[..., str], arguments: Iterable[tuple[Any, ...]]) -> list[str]:
    """The function's results, from processes that have no device's context yet, and that die with this one."""
    made = list(arguments)
    fresh = get_context("spawn")
    with ProcessPoolExecutor(cores(), fresh, initializer=die_with, initargs=(os.getpid(),)) as pool:
        return list(pool.map(function, *zip(*made, strict=True))) if made else []


def liger_tiles(device: str, part: str, shapes: list[str]) -> dict[str, Any]:
    """Compiles all tiles of Liger's for these layers. `did_not`: why a process did not."""
    number = cores()
    said = on_all_cores(_some_of_liger, [(shape, device, first, number) for shape in shapes for first in range(number)])
    return {"processes": len(said), "did_not": sorted({why for why in said if why})}


def _some_of_liger(text: str, device: str, first: int, step: int) -> str:
    shape = Shape.parse(text)
    small = replace(shape, tokens=min(shape.tokens, TOKENS), experts=min(shape.experts, EXPERTS))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    try:
        problem = make_problem(small, dtype, device)
        layer = liger(problem)
        keep_tiles_of_liger(first, step)
        x = problem.x.clone().requires_grad_()
        layer.run(x).backward(problem.grad)
    except Exception as error:  # noqa: BLE001 - the layer's own row says it again
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""
