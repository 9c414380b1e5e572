"""Part a of `gpu.py`: the device's ceilings, and whether the kernels compute what they should.

Results in bf16 (in the interpreter fp32) are compared with float64's, twice, and once more by their bits, in memory
that is NaN wherever nothing was written.
"""

from __future__ import annotations

import math
import os
import platform
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gpu_child import run_command
from gpu_clock import call_ms
from gpu_rows import Measurement
from layer_peers import moec
from layer_problem import ALLOWED, Problem, Shape, make_problem, reference, worst_error
from torch import Tensor

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "triton", "transformers", "liger-kernel", "scattermoe", "quack-kernels", "numpy", "pytest")

SHAPES = {
    "cuda": (Shape(8192, 2048, 768, 128, 8), Shape(8192, 4096, 14336, 8, 2), Shape(8192, 7168, 2048, 256, 8)),
    "cpu": (Shape(64, 32, 16, 8, 2),),
}
"""Qwen3-30B-A3B, Mixtral 8x7B, DeepSeek-V3. They are checked at the tiles that training runs."""

CHECKS = ("uniform", "zipf", "some")
SMALL = {"cuda": Shape(256, 256, 128, 8, 2), "cpu": Shape(16, 32, 16, 4, 2)}

SOME_CASES = {"cuda": "triton and cuda", "cpu": "experts and swiglu and float32"}
"""Of the conformance cases: moec's kernels on the device, or a few in the interpreter."""

FOLDERS = {"tests/kernels/conformance": 300, "tests/gpu": 150}
"""Folders of tests, and the seconds that each may take."""

NAMES = ("output", "input", "router", "up", "down")


def measurements(device: str) -> list[Measurement]:
    """Of part a, the most valuable first."""

    def one(key: str, group: str, limit: float, **arguments: Any) -> Measurement:
        function = f"gpu_part_a:{key.partition(' ')[0]}"
        return Measurement(f"a {key}", f"a {group}", function, {"part": "a", **arguments}, limit)

    def correct(shape: Shape) -> list[Measurement]:
        group = f"correct {shape}"
        return [one(f"correct {shape} {load}", group, 120, shape=str(shape), load=load) for load in CHECKS]

    first, *others = SHAPES[device]
    made = [one("machine", "ceilings", 30)]
    made += [one(f"ceiling {of}", "ceilings", 30, of=of) for of in ("matmul", "copy", "l2")]
    made += correct(first)
    kernels, jobs = (one(f"tests {name}", f"tests {name}", limit + 10, folder=name) for name, limit in FOLDERS.items())
    made.append(kernels)
    made += [measurement for shape in others for measurement in correct(shape)]
    made += [one(f"sanitize {tool}", f"sanitize {tool}", 100, tool=tool) for tool in ("memcheck", "racecheck")]
    return [*made, jobs]


def machine(device: str, part: str) -> dict[str, Any]:
    """What the rows were measured on."""
    versions = {found.name: found.version for found in metadata.distributions() if found.name in PACKAGES}
    named = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {"name": named, "python": platform.python_version(), "versions": dict(sorted(versions.items()))}


def ceiling(device: str, part: str, of: str) -> dict[str, float]:
    """TFLOP/s of a bf16 product of random numbers, or GB/s, read and written, of a large and of a cached copy."""
    small = device == "cpu"
    if of == "matmul":
        size = 256 if small else 8192
        a, b = (torch.randn(size, size, device=device, dtype=torch.float32 if small else torch.bfloat16) for _ in "ab")
        return {"tflops": 2 * size**3 / call_ms(lambda: a @ b, device) / 1e9}
    size = 2**20 if small else 2**32 if of == "copy" else 2**23
    source, target = torch.randint(255, (2, size), dtype=torch.uint8, device=device)
    times = 1 if of == "copy" else 50  # a cached copy is short, and its first round comes from memory

    def run() -> None:
        for _ in range(times):
            target.copy_(source)

    return {"gbs": 2 * size * times / call_ms(run, device) / 1e6}


def correct(device: str, part: str, shape: str, load: str) -> dict[str, Any]:
    """Errors of output and gradients against float64, and whether a second run gives the same bits.

    Raises `AssertionError` if an error is too large, a bit differs, or an expert without rows has a gradient.
    """
    problem = make_problem(Shape.parse(shape), torch.float32 if device == "cpu" else torch.bfloat16, device, load)
    with _poisoned(problem):
        first = layer_gradients(problem)
    with _poisoned(problem):
        second = layer_gradients(problem)
    equal = {name: torch.equal(one, other) for name, one, other in zip(NAMES, first, second, strict=True)}
    del second
    errors = _errors(problem, first)
    allowed = ALLOWED[problem.x.dtype]
    wrong = [f"{name} {error:.1e}" for name, error in errors.items() if not error <= allowed]
    assert not wrong, f"wrong against float64: {', '.join(wrong)}"
    assert all(equal.values()), f"bits differ from run to run: {[name for name, same in equal.items() if not same]}"
    return {**errors, "allowed": allowed, "same_bits": True}


def layer_gradients(problem: Problem) -> tuple[Tensor, ...]:
    """Output of our layer, and the gradients of `NAMES`' other four."""
    layer, x = moec(problem), problem.x.clone().requires_grad_()
    out = layer.run(x)
    out.backward(problem.grad)
    gradients = (x.grad, *(parameter.grad for parameter in layer.parameters))
    assert all(grad is not None for grad in gradients)
    return out.detach(), *(grad for grad in gradients if grad is not None)


def _errors(problem: Problem, ours: tuple[Tensor, ...]) -> dict[str, float]:
    """Per token, of output and input; of weights per expert's matrix, relative to that matrix's length."""
    worst = {"up": 0.0, "down": 0.0}

    def compare(expert: int, **exact: Tensor) -> None:
        for name, matrix in exact.items():
            found = ours[NAMES.index(name)][expert]
            if not matrix.any():
                assert not found.any(), f"expert {expert} has no rows, but a gradient of {name}"
                continue
            error = float((found.double() - matrix).norm() / matrix.norm())
            worst[name] = max(worst[name], error if error == error else math.inf)

    out, grad_x, grad_gate = reference(problem, compare)
    of_router = float((ours[2].double() - grad_gate).norm() / grad_gate.norm())
    return {"output": worst_error(ours[0], out), "input": worst_error(ours[1], grad_x), "router": of_router, **worst}


@contextmanager
def _poisoned(problem: Problem) -> Iterator[None]:
    """Memory that is allocated inside holds NaN, or the largest integers, until it is written."""
    if problem.x.device.type == "cuda":
        # The allocator hands out what was freed: large blocks are split, small ones have a pool of their own.
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        blocks = [torch.full((int(free * 0.2) // 4,), torch.nan, device="cuda") for _ in range(4)]
        blocks += [torch.full((2**16,), torch.nan, device="cuda") for _ in range(512)]
        del blocks
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills fresh memory with NaN
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def small_layer(device: str) -> None:
    """One small layer, forward and backward, for the sanitizer to look at."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    results = layer_gradients(make_problem(SMALL[device], dtype, device, "some"))
    assert all(bool(result.isfinite().all()) for result in results)


def sanitize(device: str, part: str, tool: str) -> dict[str, Any]:
    """What compute-sanitizer's `tool` says of a small layer; on CPU the layer is run without it."""
    program = f"import gpu_part_a; gpu_part_a.small_layer({device!r})"
    command = [sys.executable, "-c", program]
    if device == "cuda":
        assert shutil.which("compute-sanitizer"), "compute-sanitizer is not here"
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *command]
    # Without torch's cache each tensor is an allocation of its own, whose bounds the tool knows.
    code, said = run_command(command, 95, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    assert code == 0, "stopped after 95 s" if code < 0 else _end(said)
    return {"said": _end(said)}


def tests(device: str, part: str, folder: str) -> dict[str, Any]:
    """How many of a folder's tests passed: those that are for this device run on it, on all cores if xdist is here.

    Jobs are compared with the same on CPU, so they choose their kernels themselves.
    """
    of_kernels = folder == next(iter(FOLDERS))
    chosen = ["-k", SOME_CASES[device]] if of_kernels else []
    if device == "cuda" and find_spec("xdist") is not None:
        chosen += ["-n", str(min(14, os.cpu_count() or 1))]
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-v", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    forced = {"MOEC_BACKEND": "triton"} if of_kernels or device == "cpu" else {}
    code, said = run_command([*command, str(ROOT / folder), *chosen], FOLDERS[folder], **forced)
    words = re.findall(
        r"\b(PASSED|FAILED|ERROR|SKIPPED)\b.*\[ *\d+%\]|\[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED)\b", said
    )
    counts = Counter((one or other).lower() for one, other in words)
    failed = sorted(set(re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)))
    assert code in (0, 5), f"{dict(counts)}, {_end(said)}: {' '.join(failed[:8])}"
    return dict(counts)


def _end(said: str) -> str:
    lines = [line for line in said.strip().splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else ""
