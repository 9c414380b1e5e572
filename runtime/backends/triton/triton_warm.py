"""Compiles, when a model is built, the kernels that its steps launch: no training step waits for a compiler.

Triton compiles a kernel at its first launch for the dtypes, alignments and options that it finds there. Numbers are not
specialised (`do_not_specialize`), and pointers are aligned (`triton_launch.py`), so a plan's list is complete.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from triton.runtime.jit import MockTensor

from moec.codegen.kernels.kernel_shape import KernelShape
from moec.codegen.kernels.plan_kernels import PlanKernel, kernels_of
from moec.codegen.plan import Plan
from moec.passes.ir import ops as o
from moec.runtime.backends.triton.triton_blocks import described_as
from moec.runtime.backends.triton.triton_launch import TORCH_DTYPES, kernels_of_shape
from moec.runtime.backends.triton.triton_modules import kernels_in
from moec.runtime.backends.triton.triton_tiles import target_at

SILENT = 1.0
"""Seconds until progress is shown: kernels that Triton's cache on disk has take less."""

Report = Callable[[int, int, str], None]
"""Called before each kernel with its number from 1, the number of all, and its name."""


def compile_ahead(plan: Plan, device: torch.device, report: Report) -> int:
    """Compiles the kernels that a rank of the plan launches on `device`, in Triton's caches; returns their number."""
    variants = [
        (kernel, name, switches)
        for kernel in kernels_of(plan, target_at(device))
        for name, _ in kernels_in(kernel.shape, kernel.launched)
        for switches in _switches(plan, kernel, name)
    ]
    for number, (kernel, name, switches) in enumerate(variants, 1):
        report(number, len(variants), name)
        compile_one(kernel.shape, name, device, switches)
    return len(variants)


def compile_one(shape: KernelShape, name: str, device: torch.device, switches: dict[str, bool]) -> None:
    """Compiles one kernel with the dtypes and options of its launches."""
    kernels = kernels_of_shape(shape, device)
    dtypes = shape.pointers()
    blocks = shape.blocks(name)
    arguments: list[Any] = [
        described_as(MockTensor(TORCH_DTYPES[getattr(shape, "dtype", "i32")]), blocks[argument])
        if argument in blocks
        else MockTensor(TORCH_DTYPES[dtypes.get(argument, getattr(shape, "dtype", "i32"))])
        if argument.endswith("_ptr")
        else 1
        for argument in getattr(kernels.module, name).arg_names
        if argument not in switches
    ]
    kernels.compile(name, *arguments, **switches, **shape.options(name, target_at(device).family))


def _switches(plan: Plan, kernel: PlanKernel, name: str) -> Iterable[dict[str, bool]]:
    """The values of a kernel's switches: `route_backward` gets the gradients of results that something uses."""
    if name != "route_backward":
        return ({},)
    block, probabilities = plan.program.block(kernel.block), kernel.op.results[0].name
    used = any(probabilities in op.operands for op in block.ops if not isinstance(op, o.Route))
    used = used or probabilities in {output.name for output in block.outputs}
    # A training loop without the balance term needs no gradient of the probabilities.
    return tuple({"OF_PROBABILITIES": switch, "OF_WEIGHTS": True} for switch in ((False, True) if used else (False,)))


class Progress:
    """Prints the compiled kernel on stderr, after `SILENT` seconds; on a terminal in one line."""

    def __init__(self, *, shows: bool = True) -> None:
        self._started, self._shown, self._shows = time.monotonic(), False, shows
        self._live = sys.stderr.isatty()

    def __call__(self, number: int, count: int, name: str) -> None:
        if not self._shows or time.monotonic() - self._started < SILENT:
            return
        if self._live or not self._shown:
            text = f"moec: compiling kernel {number} of {count}" + (f": {name:<20}" if self._live else " …")
            print(text, end="\r" if self._live else "\n", file=sys.stderr, flush=True)
        self._shown = True

    def done(self, count: int) -> None:
        """Prints the number of compiled kernels, if progress was shown."""
        if self._shown:
            seconds = time.monotonic() - self._started
            print(f"moec: compiled {count} kernels in {seconds:.0f} s{'':20}", file=sys.stderr, flush=True)
