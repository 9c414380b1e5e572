"""ZeRO as layouts: which dim of a parameter data-parallel ranks cut, and of what.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.
"""

from __future__ import annotations

from dataclasses import replace

from moec.passes.ir import Meshes, Parameter, Shard, local_shape
from moec.passes.ir.mesh import ZERO_AXES, joined


def cut_by_zero(
    parameter: Parameter, meshes: Meshes, stage: int, summed: frozenset[str], hidden: int | None = None
) -> Parameter:
    """`parameter`, placed and without ZeRO, with the layouts of ZeRO's `stage` (0 to 3).

    Cuts over the ranks that have the same part of the weight and other tokens: of the axes `summed`, over which the
    gradient is summed, those of ZeRO. It takes a dim that these ranks divide and that nothing else cuts:
    dim 0, else `hidden`, the experts' width, which `etp` may have cut before, else the first one. Without such a dim
    the parameter stays whole.

    Stage 1 cuts the optimizer state, 2 the gradient too, 3 the weight too: never what ops use. A frozen parameter has
    only a weight.
    """
    if parameter.frozen and stage < 3:
        return parameter
    layout, axes = parameter.layout, joined(summed.intersection(ZERO_AXES), meshes.dense)
    assert layout is not None
    if not axes:
        return parameter
    (axis,) = axes
    ranks = meshes.size(axis)
    local = local_shape(parameter.shape, layout, meshes)
    free = [
        d for d, n in enumerate(local) if (d == hidden or not layout.cuts(d)) and isinstance(n, int) and not n % ranks
    ]
    dim = min(free, key=lambda d: (d > 0, d != hidden, d), default=None) if stage and ranks > 1 else None
    if dim is None:
        return parameter
    cut = layout.replace(axis, Shard(dim))
    return replace(
        parameter,
        weight=cut if stage > 2 else layout,
        gradient=cut if stage > 1 else layout,
        optimizer_state=cut,
    )
