"""`moec inspect PLAN --kernels`: every kernel of a rank, compiled for the plan's device, and its limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from moec.codegen.kernels.of_plan import (
    PlanKernel,
    kernel_sources,
    kernels_of,
    rows_per_rank,
    tokens_per_rank,
    ways_of,
)
from moec.codegen.kernels.shapes import ProductShape
from moec.codegen.kernels.work import work_of
from moec.codegen.plan import Plan
from moec.driver import load
from moec.grammar.spec import Device
from moec.passes.cost.cost import Work
from moec.passes.cost.totals import BlockCost
from moec.passes.cost.workload import Workload

TARGETS: Mapping[str, str] = {
    "a100": "sm_80",
    "h100": "sm_90",
    "h200": "sm_90",
    "b200": "sm_100",
    "gb200": "sm_100",
    "gb300": "sm_100",
    "mi300x": "gfx942",
    "cuda": "sm_90",
    "hip": "gfx942",
}
"""The compile target by a device's name, else by its kind."""

HEAD = ("kernel", "tile", "from", "registers", "spilled", "shared", "bound by", "at least", "serves")


def inspect_sources(path: Path) -> str:
    """The source of every kernel of a plan."""
    return sources_of_kernels(load(path))


def sources_of_kernels(plan: Plan) -> str:
    """The source of every kernel, rendered for the plan's device, under its name."""
    sources = kernel_sources(plan)
    if not sources:
        return _no_kernels(plan)
    return "\n".join(f"# ---- {name}\n{source}" for name, source in sources.items())


def _no_kernels(plan: Plan) -> str:
    return f"{plan.name}: on {plan.spec.cluster.device.name} plain torch runs everything; there are no kernels"


def inspect_kernels(path: Path) -> str:
    """The kernels as text. Compiles each, which takes some seconds; raises `BackendError` if Triton cannot."""
    plan = load(path)
    kernels = kernels_of(plan)
    device = plan.spec.cluster.device
    if not kernels:
        return _no_kernels(plan)
    from moec.runtime.backends import BackendError
    from moec.runtime.backends.triton.triton_support import TRITONS, triton_complaint

    complaint = triton_complaint()
    if complaint is not None:
        raise BackendError(f"`moec inspect --kernels` compiles them, but {complaint}", f"install {TRITONS}")
    return "\n".join(_lines(plan, device, kernels))


def _lines(plan: Plan, device: Device, kernels: tuple[PlanKernel, ...]) -> Iterator[str]:
    target = TARGETS.get(device.name) or TARGETS[device.kind]
    yield f"{plan.name}: kernels of a rank, for {tokens_per_rank(plan):,} tokens, on {device.name} ({target})"
    if plan.tiles is not None:
        yield f"tiles tuned on {plan.tiles.device}, with Triton {plan.tiles.triton}"
    by_block: dict[str, list[PlanKernel]] = {}
    for kernel in kernels:
        by_block.setdefault(kernel.block, []).append(kernel)
    workload = Workload.of(plan.spec, plan.program).even
    for block, block_kernels in by_block.items():
        costs = BlockCost.of(plan.program, plan.program.block(block), workload).costs
        rows = [
            row
            for kernel in block_kernels
            for op, cost in costs
            if op is kernel.op
            for row in _rows(plan, device, target, kernel, cost.work)
        ]
        yield ""
        yield block
        widths = [max(len(row[column]) for row in (HEAD, *rows)) for column in range(len(HEAD))]
        for row in (HEAD, *rows):
            yield ("  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))).rstrip()


def _rows(plan: Plan, device: Device, target: str, kernel: PlanKernel, of_op: Work) -> Iterator[tuple[str, ...]]:
    from moec.runtime.backends.triton.triton_compile import compile_kernels

    for made in compile_kernels(kernel.shape, target, kernel.only):
        work = work_of(kernel.shape, made.kernel, of_op, tokens_per_rank(plan), rows_per_rank(plan, kernel.k))
        peak = getattr(device.peak, getattr(kernel.shape, "dtype", "fp32"))
        bound = work.bound(peak, device.bandwidth) if work else "-"
        least = f"{work.seconds(peak, device.bandwidth) * 1e6:,.1f} µs" if work else "-"
        size = f"{made.shared / 1024:.1f} KiB" if made.shared else "-"
        spilled = f"{made.spilled} B" if made.spilled else "-"
        tile = _tile(plan, kernel, made.kernel)
        yield (made.kernel, *tile, str(made.registers), spilled, size, bound, least, kernel.span or "")


def _tile(plan: Plan, kernel: PlanKernel, name: str) -> tuple[str, str]:
    """A product's tile and its source: tuned, shipped, or the rule."""
    shape = kernel.shape
    tile = shape.tile_of(name) if isinstance(shape, ProductShape) else None
    if not isinstance(shape, ProductShape) or tile is None:
        return "-", "-"
    widths = (shape.dim, shape.hidden)
    rows = rows_per_rank(plan, kernel.k)
    return str(tile), ways_of(plan, shape.dtype, rows, shape.experts, widths, shape.activation).source
