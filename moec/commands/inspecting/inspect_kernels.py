"""`moec inspect PLAN --kernels`: the kernels of a rank, compiled for the plan's device: limits and predicted times."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from moec.codegen.kernels.model.model import Prediction
from moec.codegen.kernels.model.model_device import complaint
from moec.codegen.kernels.plan_kernels import kernel_sources, kernels_of
from moec.codegen.kernels.plan_ways import takes_tuned
from moec.codegen.kernels.resources import Resources
from moec.codegen.plan import Plan
from moec.commands.console.output import emit
from moec.commands.console.table import table, without_empty_columns
from moec.commands.inspecting.inspect_documents import (
    BlockKernels,
    CompiledKernel,
    DirectionTime,
    KernelBound,
    KernelEntry,
    KernelsDocument,
    KernelTime,
)
from moec.commands.inspecting.kernel_listing import Direction, KernelListing, ListedBlock, ListedKernel
from moec.driver import load

HEAD = (
    "kernel",
    "computed by",
    "registers",
    "spilled",
    "shared memory",
    "blocks per SM",
    "bound by",
    "at least",
    "predicted",
    "TFLOP/s",
    "not padding",
    "line",
)
SOURCES = {"tuned": "that `moec tune` measured", "shipped": "that moec ships for this device", "rule": "by a rule"}
"""The sources of tiles and libraries, in words."""

DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")


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


def run(path: Path, style: str) -> None:
    """Prints the kernels as text or JSON. Compiling them takes some seconds. Raises `BackendError` if Triton cannot."""
    plan = load(path)
    if kernels_of(plan):
        _require_triton()
    listing = KernelListing(plan)
    lines = (lambda: _lines(listing)) if kernels_of(plan) else (lambda: iter([_no_kernels(plan)]))
    emit(style, lines, lambda: _document(listing))


def _require_triton() -> None:
    from moec.runtime.backends import BackendError
    from moec.runtime.backends.triton.triton_support import TRITONS, triton_complaint

    reason = triton_complaint()
    if reason is not None:
        raise BackendError(f"`moec inspect --kernels` compiles them, but {reason}", f"install {TRITONS}")


def _lines(listing: KernelListing) -> Iterator[str]:
    plan, device = listing.plan, listing.device
    yield f"{plan.name}: kernels of a rank, for {_tokens(listing)}, on {device.name} ({listing.target})"
    if plan.tiles is not None:
        note = "" if takes_tuned(plan) else f": not used on {device.name}"
        yield f"tiles tuned on {plan.tiles.device}, with Triton {plan.tiles.triton}{note}"
    yield f"predicted times are {listing.model.origin}" if listing.model else str(complaint(device.name))
    for block in listing.blocks:
        yield ""
        yield block.block
        if block.choice is not None:
            yield f"  tiles and libraries {SOURCES[block.choice.source]}: {block.choice.reason}"
        yield from table(without_empty_columns([HEAD, *(_cells(listing, block, kernel) for kernel in block.kernels)]))
        yield from _totals(block)


def _tokens(listing: KernelListing) -> str:
    suffix = "of a micro-batch" if listing.plan.program.microbatches > 1 else ""
    return f"{listing.tokens:,} tokens {suffix}".rstrip()


def _cells(listing: KernelListing, block: ListedBlock, kernel: ListedKernel) -> tuple[str, ...]:
    """One row of the table; a dash for what a kernel does not have."""
    resources, work, prediction = kernel.resources, kernel.work, kernel.prediction
    bandwidth, peak = listing.device.bandwidth, _peak(listing, block)
    bound = prediction.bound if prediction else work.bound(peak, bandwidth) if work else "-"
    product = prediction is not None and prediction.flops > 0
    return (
        kernel.kernel,
        str(kernel.way or "-"),
        str(resources.registers) if resources else "-",
        f"{resources.spilled} B" if resources and resources.spilled else "-",
        f"{resources.shared / 1024:.1f} KiB" if resources and resources.shared else "-",
        str(resources.blocks) if resources else "-",
        bound,
        _micro(work.seconds(peak, bandwidth)) if work else "-",
        _micro(prediction.seconds) if prediction else "-",
        f"{prediction.tflops:.0f}" if prediction and product else "-",
        f"{prediction.padding_efficiency:.0%}" if prediction and product else "-",
        kernel.line or "",
    )


def _peak(listing: KernelListing, block: ListedBlock) -> float | None:
    dtype = block.layer.dtype if block.layer is not None else "fp32"
    peak: float | None = getattr(listing.device.peak, dtype)
    return peak


def _micro(seconds: float) -> str:
    """Microseconds with three digits, or with all digits before the point: `0.083 µs`, `962 µs`, `31,116 µs`."""
    micros = seconds * 1e6
    return f"{micros:,.0f} µs" if micros >= 100 else f"{micros:.3g} µs"


def _totals(block: ListedBlock) -> Iterator[str]:
    """Time and rate of the layer if its FLOPs are 6 · T · k · D · F forward and 12 · T · k · D · F backward."""
    for direction in DIRECTIONS:
        seconds, flops = block.predicted(direction), block.flops(direction)
        if seconds is not None and flops:
            yield f"  {direction}: {seconds * 1e3:,.3g} ms predicted, {flops / seconds / 1e12:,.3g} TFLOP/s"


def _document(listing: KernelListing) -> KernelsDocument:
    has_kernels = bool(kernels_of(listing.plan))
    return KernelsDocument(
        plan=listing.plan.name,
        device=listing.device.name,
        tokens=listing.tokens,
        target=listing.target if has_kernels else None,
        model=listing.model.origin if has_kernels and listing.model else None,
        layers=[_block(block) for block in listing.blocks] if has_kernels else [],
    )


def _block(block: ListedBlock) -> BlockKernels:
    choice = block.choice
    return BlockKernels(
        layer=block.block,
        ways=str(choice.ways) if choice else None,
        source=choice.source if choice else None,
        why=choice.reason if choice else None,
        rows=block.rows,
        forward=_direction(block, "forward"),
        backward=_direction(block, "backward"),
        kernels=[_kernel(kernel) for kernel in block.kernels],
    )


def _direction(block: ListedBlock, direction: Direction) -> DirectionTime:
    return DirectionTime(seconds=block.predicted(direction), flops=block.flops(direction))


def _kernel(kernel: ListedKernel) -> KernelEntry:
    return KernelEntry(
        kernel=kernel.kernel,
        direction=kernel.direction,
        line=kernel.line,
        way=str(kernel.way) if kernel.way else None,
        compiled=_compiled(kernel.resources) if kernel.resources else None,
        least=KernelBound(flops=kernel.work.flops, bytes=kernel.work.moved) if kernel.work else None,
        predicted=_time(kernel.prediction) if kernel.prediction else None,
    )


def _compiled(resources: Resources) -> CompiledKernel:
    return CompiledKernel(
        registers=resources.registers, spilled=resources.spilled, shared=resources.shared, blocks=resources.blocks
    )


def _time(prediction: Prediction) -> KernelTime:
    return KernelTime(
        seconds=prediction.seconds,
        bound=prediction.bound,
        parts={**prediction.parts},
        flops=prediction.flops,
        useful=prediction.padding_efficiency,
        bytes=prediction.moved,
    )
