"""A rank's part of a parameter, and its initial values, which do not depend on the sharding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from moec.codegen.plan import PlanParameter
from moec.passes.ir import Layout, Mesh, Program, Shard, State
from moec.passes.ir.mesh import CUT_ORDER, JOINT_AXES, parts_of
from moec.passes.ir.order_rules import order_complaint
from moec.runtime import philox
from moec.runtime.errors import JobError

CPU_CHUNK = 1 << 16
"""Elements drawn at a time: their int64 temporaries stay in the cache."""

SMALL = 1 << 12
"""Elements of a part whose numbers are kept: 16 MB for the last 1,024."""

GPU_CHUNK = 1 << 22
"""A draw is some two hundred launches, and its temporaries take half a GB. Building a model of 3.1 B parameters and 15
steps took 82 s by the CPU's chunks, and takes 17 s by these (H200)."""


def require_executable(parameters: Mapping[str, PlanParameter]) -> None:
    """Raises `JobError` where the layouts of a parameter are not those of a stage of ZeRO: jobs run no others.

    The optimizer state is cut over at most one axis more than the layout that ops use. The weight has that cut too or
    lacks it; so does the gradient.
    """
    for name, data in parameters.items():
        cut, state = data.zero_cut, data.optimizer_state
        uncut = state if cut is None else state.replace(cut.axis, None)
        for role, layout, allowed in (
            ("compute layout", data.layout, (uncut,)),
            ("weight", data.weight, (uncut, state)),
            ("gradient", data.gradient, (uncut, state)),
        ):
            if layout not in allowed:
                raise _not_executable(f"the {role} of {name} is {layout} and its optimizer state {state}")


def require_order(program: Program) -> None:
    """Raises `JobError` where the order of a step breaks a rule. Plan folders are checked when they are read."""
    for order in program.orders:
        if complaint := order_complaint(program, order, order.microbatches):
            raise JobError("MOE0700", complaint, "compile the .moe file again")


def require_gatherable(parameters: Mapping[str, PlanParameter]) -> None:
    """Raises `JobError` unless a job can gather weights and scatter gradients, layer by layer.

    ZeRO's cut must be the last cut of its dim, cuts in DTensor's order, and the gradient summed over the cut's axis.
    """
    for name, data in parameters.items():
        if (cut := data.zero_cut) is None:
            continue
        in_order = data.master.in_order_of((*JOINT_AXES, *CUT_ORDER))
        if not data.master.can_undo(cut.axis) or data.master != in_order:
            raise _not_executable(
                f"the optimizer state of {name} is {data.master}, with two cuts of one dim in this order"
            )
        if not data.frozen and cut.group not in data.sum_over:
            raise _not_executable(f"{name} is cut over {cut.axis}, over which its gradient is not summed")


def _not_executable(reason: str) -> JobError:
    return JobError("MOE0700", f"{reason}; a later version of moec runs this", "compile the .moe file again")


def dtensor_placements(layout: Layout, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """A parameter's layout as DTensor placements. Raises `JobError` unless dims are cut in the mesh's order."""
    axes = mesh.mesh_dim_names or ()
    cuts = ((part, placement) for axis, placement in layout.placements for part in parts_of(axis))
    layout = Layout.of(cuts)
    if layout != layout.in_order_of(axes):
        raise JobError(
            "MOE0700",
            f"a parameter lies as {layout} on a mesh of {', '.join(axes)}; a later version of moec runs this",
            "compile the .moe file again with this moec",
        )
    placements = (layout.get(axis) for axis in axes)
    return tuple(ShardPlacement(p.dim) if isinstance(p, Shard) else Replicate() for p in placements)


def initial_state(state: State, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
    """The initial value of a state, whole: zeros or ones."""
    shape = [dim for dim in state.shape if isinstance(dim, int)]
    return torch.full(shape, float(state.init.kind == "ones"), dtype=dtype, device=device)


def initial_shard(
    name: str,
    data: PlanParameter,
    mesh: Mesh,
    rank: int,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Tensor:
    """`rank`'s part of a new parameter, on `device` (default: the CPU), in `dtype`.

    Each element is drawn in fp32 from its index in the whole parameter: its value depends on neither the sharding nor
    the number of ranks. A rank draws only its part. On `meta` nothing is drawn.
    """
    index = data.cells(mesh, rank)
    local = [part.stop - part.start for part in index]
    if data.init.kind in ("ones", "zeros"):
        return torch.full(local, float(data.init.kind == "ones"), dtype=dtype, device=device)
    shard = torch.empty(local, dtype=dtype, device=device)
    if shard.device.type == "meta":
        return shard
    if shard.device.type == "cpu" and shard.numel() <= SMALL and not is_in_torch_dispatch_mode():
        bounds = tuple([(part.start, part.stop) for part in index])
        return shard.copy_(_small(philox.key_of(seed, name), data.shape, bounds).view(local) * data.init.std)
    runs, starts = _runs(index, data.shape, shard)
    key, run = philox.key_of(seed, name), runs.shape[1]
    chunk = CPU_CHUNK if shard.device.type == "cpu" else GPU_CHUNK
    rows_per_draw = max(1, chunk // run)
    for row in range(0, len(runs), rows_per_draw):
        for column in range(0, run, chunk):
            length = min(chunk, run - column)
            normal = _draw(starts[row : row + rows_per_draw] + column, length, key)
            runs[row : row + rows_per_draw, column : column + length] = normal * data.init.std
    return shard


@lru_cache(maxsize=1024)
def _small(key: tuple[int, int], shape: tuple[int, ...], bounds: tuple[tuple[int, int], ...]) -> Tensor:
    """The normal numbers of a part of at most `SMALL` elements. Small models are made many times: a verification makes
    one of every rank, and the unsharded one in several dtypes."""
    index = [slice(*each) for each in bounds]
    runs, starts = _runs(index, shape, torch.empty([part.stop - part.start for part in index], device="cpu"))
    return _draw(starts, runs.shape[1], key)


def _runs(index: Sequence[slice], shape: Sequence[int], shard: Tensor) -> tuple[Tensor, Tensor]:
    """A part as runs that are contiguous in the whole parameter, `[runs, run]`, and where each begins there."""
    cut = max((dim for dim, part in enumerate(index) if part.stop - part.start < shape[dim]), default=0)
    runs = shard.view(-1, math.prod(shard.shape[cut:]))
    return runs, _starts(index[: cut + 1], shape, shard.device)


def _starts(index: Sequence[slice], shape: Sequence[int], device: torch.device) -> Tensor:
    """Where each run of a part begins in the whole parameter; the last slice of `index` cuts the runs."""
    starts = torch.tensor([index[-1].start * math.prod(shape[len(index) :])], device=device)
    for dim in reversed(range(len(index) - 1)):
        steps = torch.arange(index[dim].start, index[dim].stop, device=device) * math.prod(shape[dim + 1 :])
        starts = (steps[:, None] + starts).flatten()
    return starts


def _draw(starts: Tensor, length: int, key: tuple[int, int]) -> Tensor:
    """`length` numbers from each of `starts` on: `[len(starts), length]`."""
    counters = torch.arange(length // philox.WORDS + 2, device=starts.device)
    drawn = philox.normal((starts // philox.WORDS)[:, None] + counters, key).flatten(1)
    offsets = (starts % philox.WORDS)[:, None] + torch.arange(length, device=starts.device)
    return drawn.gather(1, offsets)
