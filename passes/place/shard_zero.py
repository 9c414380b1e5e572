"""ZeRO as layouts: which dim of a parameter data-parallel ranks cut, and of what.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from moec.passes.ir import Layout, Meshes, Op, Parameter, Shard, Value
from moec.passes.ir.ops import AllGather

ZERO_AXES = ("dp", "edp")
"""The axes that ZeRO cuts: dense parameters over `dp`, experts over `edp`."""


def cut_by_zero(parameter: Parameter, meshes: Meshes, axis: str, stage: int) -> Parameter:
    """`parameter`, placed and without ZeRO, with the layouts of ZeRO's `stage` (0 to 3) over `axis`.

    Cuts the first dim that the axis divides and that nothing else cuts; without such a dim the parameter stays whole.
    Stage 1 cuts the optimizer state, 2 the gradient too, 3 the weight too. A frozen parameter has only a weight.
    """
    if parameter.frozen and stage < 3:
        return parameter
    layout, ranks = parameter.layout, meshes.size(axis)
    assert layout is not None
    free = (d for d, n in enumerate(parameter.shape) if not layout.cuts(d) and isinstance(n, int) and n % ranks == 0)
    dim = next(free, None) if stage and ranks > 1 else None
    if dim is None:
        return parameter
    cut = layout.replace(axis, Shard(dim))
    return replace(
        parameter,
        layout=cut if stage > 2 else layout,
        gradient=cut if stage > 1 else layout,
        optimizer_state=cut,
    )


def as_used(value: Value) -> Value:
    """A parameter without ZeRO's cut: the layout rules of ops ask for parameters as tp and ep cut them."""
    if not isinstance(value, Parameter) or value.layout is None:
        return value
    return replace(value, layout=Layout.of((a, p) for a, p in value.layout.placements if a not in ZERO_AXES))


def is_zero_gather(op: Op) -> bool:
    """Whether `op` gathers a parameter that ZeRO cuts. A job gathers all parameters of a layer together instead."""
    return isinstance(op, AllGather) and op.axis in ZERO_AXES and op.operands[0].startswith("@")


class Stored(Protocol):
    """A parameter of a Program or of a plan."""

    @property
    def layout(self) -> Layout | None: ...
    @property
    def gradient(self) -> Layout | None: ...
    @property
    def optimizer_state(self) -> Layout | None: ...


def zero_stage(p: Stored) -> int:
    """The stage of ZeRO, 0 to 3, that the layouts of a placed parameter are those of; 0 where ZeRO cuts nothing."""
    if p.optimizer_state is None or zero_cut(p.optimizer_state) is None:
        return 0
    return 3 if p.layout == p.optimizer_state else 2 if p.gradient == p.optimizer_state else 1


def zero_cut(master: Layout) -> tuple[str, int] | None:
    """The axis and the dim of ZeRO's cut in the layout of a parameter's master; None where it is whole."""
    found = ((axis, p.dim) for axis, p in master.placements if axis in ZERO_AXES and isinstance(p, Shard))
    return next(found, None)
