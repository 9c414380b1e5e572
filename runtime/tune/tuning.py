"""`moec tune`: measures the fastest tiles of a plan's grouped products on this machine's device.

Only this command measures. A job reads the plan's tiles (`backends/triton_tiles.py`): no step waits for a search, and
all ranks run the same kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moec.codegen.kernels.plan_kernels import products_of
from moec.codegen.kernels.plan_ways import KNOWN
from moec.codegen.kernels.stored_tiles import StoredTiles
from moec.codegen.kernels.tile_rule import INTERPRETER
from moec.codegen.kernels.tiles import LIBRARIES
from moec.codegen.plan import Plan
from moec.grammar.spec import Device
from moec.runtime.backends import forced_backend, require_known
from moec.runtime.backends.triton import triton_support
from moec.runtime.backends.triton.triton_tiles import short_name
from moec.runtime.errors import JobError
from moec.runtime.tune.tune_search import Say, Tuned, search
from moec.runtime.tune.tune_trial import Bench

MOST = 12
"""Tiles of each height to try for each product."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """The measured shapes of a plan, and `plan` with the fastest tiles. No results: the plan has nothing to tune."""

    plan: Plan
    device: str
    results: tuple[Tuned, ...]


def tune(plan: Plan, *, max_tiles: int = MOST, report: Say = lambda line: None) -> Tuning:
    """Measures the plan's grouped products with at most `max_tiles` tiles of each height; `report` gets progress.

    Raises `JobError` if this machine has no device of the plan's kind.
    """
    products = products_of(plan)
    if not products:
        return Tuning(plan, plan.spec.cluster.device.name, ())
    bench = bench_for(plan)
    results = tuple(search(shape, bench, max_tiles, report) for shape in products)
    import triton

    entries = tuple(result.entry for result in results)
    stored = StoredTiles(device=bench.name, triton=triton.__version__, entries=entries)
    return Tuning(replace(plan, tiles=stored), bench.name, results)


# ---- device ------------------------------------------------------------------------------------------


def bench_for(plan: Plan) -> Bench:
    """This machine's device; Triton's interpreter, if on, stands for any device. Raises `JobError` if none fits.

    Raises `BackendError` if `MOEC_BACKEND` names no backend.
    """
    device = plan.spec.cluster.device
    require_known(forced_backend())
    interpreted = triton_support.interpreting()
    complaint = triton_support.complaint("cpu" if interpreted else "cuda")
    if interpreted and complaint is None and any(shape.key.dtype == "bf16" for shape in products_of(plan)):
        complaint = "Triton's interpreter computes bf16 wrongly"
    if forced_backend() in LIBRARIES:
        complaint = f"MOEC_BACKEND={forced_backend()} has every product computed by it; unset it to measure ways"
    if complaint is not None:
        raise _unfit(device, complaint)
    if interpreted:
        return Bench(torch.device("cpu"), INTERPRETER, None, 1 << 40)
    if not torch.cuda.is_available():
        raise _unfit(device, "torch finds no GPU")
    cuda_device = torch.device("cuda", torch.cuda.current_device())
    name, properties = torch.cuda.get_device_name(cuda_device), torch.cuda.get_device_properties(cuda_device)
    hip = torch.version.hip is not None
    require_fit(device, "hip" if hip else "cuda", name)
    from triton.runtime.driver import driver

    from moec.runtime.backends.triton.triton_compile import TARGETS

    target = properties.gcnArchName.split(":")[0] if hip else f"sm_{properties.major}{properties.minor}"
    # Triton refuses launches above this limit.
    shared = driver.active.utils.get_device_properties(cuda_device.index)["max_shared_mem"]
    return Bench(cuda_device, short_name(name), target if target in TARGETS else None, shared)


def require_fit(device: Device, kind: str, name: str) -> None:
    """Raises `JobError` unless the device that torch calls `name` can be the plan's."""
    short = short_name(name)
    differs = device.name != short and device.name in KNOWN and short in KNOWN
    if device.kind != kind or differs:
        raise _unfit(device, f"this machine has {name}")


def _unfit(device: Device, message: str) -> JobError:
    return JobError(
        "MOE0706",
        f"the plan is for {device.name} ({device.kind}), but {message}",
        f"run `moec tune` on a machine with {device.name}, or compile the file for this machine's device",
    )
