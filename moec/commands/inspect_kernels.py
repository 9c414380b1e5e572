"""`moec inspect PLAN --kernels`: the kernels of a rank, compiled for the plan's device: limits and predicted times."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

from moec.codegen.kernels.model_device import complaint
from moec.codegen.kernels.of_plan import kernel_sources, kernels_of
from moec.codegen.kernels.plan_ways import takes_tuned
from moec.codegen.plan import Plan
from moec.commands.kernel_listing import Direction, ListedBlock, ListedKernel, Listing
from moec.commands.table import table, without_empty_columns
from moec.driver import load

HEAD = (
    "kernel",
    "way",
    "from",
    "registers",
    "spilled",
    "shared",
    "blocks",
    "bound by",
    "at least",
    "predicted",
    "TFLOP/s",
    "useful",
    "line",
)
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


def inspect_kernels(path: Path) -> str:
    """The kernels as text. Compiles each, which takes some seconds; raises `BackendError` if Triton cannot."""
    plan = load(path)
    if not kernels_of(plan):
        return _no_kernels(plan)
    _require_triton()
    return "\n".join(_lines(Listing(plan)))


def kernels_json(path: Path) -> dict[str, Any]:
    """The same as numbers: seconds, bytes, operations. Raises `BackendError` if Triton cannot compile."""
    plan = load(path)
    listing = Listing(plan)
    said: dict[str, Any] = {"plan": plan.name, "device": listing.device.name, "tokens": listing.tokens, "layers": []}
    if not kernels_of(plan):
        return said
    _require_triton()
    said |= {"target": listing.target, "model": listing.model.origin if listing.model else None}
    said["layers"] = [_block_json(listing, block) for block in listing.blocks]
    return said


def _require_triton() -> None:
    from moec.runtime.backends import BackendError
    from moec.runtime.backends.triton.triton_support import TRITONS, triton_complaint

    said = triton_complaint()
    if said is not None:
        raise BackendError(f"`moec inspect --kernels` compiles them, but {said}", f"install {TRITONS}")


def _lines(listing: Listing) -> Iterator[str]:
    plan, device = listing.plan, listing.device
    yield f"{plan.name}: kernels of a rank, for {listing.tokens:,} tokens, on {device.name} ({listing.target})"
    if plan.tiles is not None:
        taken = "" if takes_tuned(plan) else f": not taken on {device.name}"
        yield f"tiles tuned on {plan.tiles.device}, with Triton {plan.tiles.triton}{taken}"
    yield f"predicted times are {listing.model.origin}" if listing.model else str(complaint(device.name))
    for block in listing.blocks:
        yield ""
        yield block.block
        if block.choice is not None:
            yield f"  ways: {block.choice.source}, {block.choice.why}"
        yield from table(without_empty_columns([HEAD, *(_cells(listing, block, each) for each in block.kernels)]))
        yield from _totals(block)


def _cells(listing: Listing, block: ListedBlock, each: ListedKernel) -> tuple[str, ...]:
    """One row of the table; a dash for what a kernel does not have."""
    made, work, prediction = each.made, each.work, each.prediction
    bandwidth, peak = listing.device.bandwidth, _peak(listing, block)
    bound = prediction.bound if prediction else work.bound(peak, bandwidth) if work else "-"
    product = prediction is not None and prediction.flops > 0
    return (
        each.kernel,
        str(each.way or "-"),
        block.choice.source if block.choice and each.way else "-",
        str(made.registers) if made else "-",
        f"{made.spilled} B" if made and made.spilled else "-",
        f"{made.shared / 1024:.1f} KiB" if made and made.shared else "-",
        str(made.blocks) if made else "-",
        bound,
        _micro(work.seconds(peak, bandwidth)) if work else "-",
        _micro(prediction.seconds) if prediction else "-",
        f"{prediction.tflops:.0f}" if prediction and product else "-",
        f"{prediction.padding_efficiency:.0%}" if prediction and product else "-",
        each.line or "",
    )


def _peak(listing: Listing, block: ListedBlock) -> float | None:
    dtype = block.layer.dtype if block.layer is not None else "fp32"
    peak: float | None = getattr(listing.device.peak, dtype)
    return peak


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} µs"


def _totals(block: ListedBlock) -> Iterator[str]:
    """Time and rate of the layer, by the convention that its FLOPs are 6 · T · k · D · F, and 12 backward."""
    for direction in DIRECTIONS:
        seconds, flops = block.predicted(direction), block.flops(direction)
        if seconds is not None and flops:
            yield f"  {direction}: {seconds * 1e3:,.3g} ms predicted, {flops / seconds / 1e12:,.3g} TFLOP/s"


def _block_json(listing: Listing, block: ListedBlock) -> dict[str, Any]:
    choice = block.choice
    return {
        "layer": block.block,
        "ways": str(choice.ways) if choice else None,
        "source": choice.source if choice else None,
        "why": choice.why if choice else None,
        "rows": block.rows,
        **{direction: _total_json(block, direction) for direction in DIRECTIONS},
        "kernels": [_kernel_json(each) for each in block.kernels],
    }


def _total_json(block: ListedBlock, direction: Direction) -> dict[str, float | None]:
    return {"seconds": _finite(block.predicted(direction)), "flops": block.flops(direction)}


def _finite(seconds: float | None) -> float | None:
    """None for the infinite time of a tile that does not fit: JSON has no infinity."""
    return seconds if seconds is not None and isfinite(seconds) else None


def _kernel_json(each: ListedKernel) -> dict[str, Any]:
    made, prediction = each.made, each.prediction
    said: dict[str, Any] = {"kernel": each.kernel, "direction": each.direction, "line": each.line}
    said["way"] = str(each.way) if each.way else None
    if made is not None:
        said |= {"registers": made.registers, "spilled": made.spilled, "shared": made.shared, "blocks": made.blocks}
    if each.work is not None:
        said |= {"least_flops": each.work.flops, "least_bytes": each.work.moved}
    if prediction is not None:
        said |= {
            "seconds": _finite(prediction.seconds),
            "bound": prediction.bound,
            "parts": dict(prediction.parts),
            "flops": prediction.flops,
            "useful": prediction.padding_efficiency,
            "bytes": prediction.moved,
        }
    return said
