"""ZeRO as layouts: which dim of a parameter data-parallel ranks cut, and of what.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.
"""

from __future__ import annotations

from dataclasses import replace

from moec.passes.ir import Meshes, Parameter, Shard


def cut_by_zero(parameter: Parameter, meshes: Meshes, axis: str, stage: int) -> Parameter:
    """`parameter`, placed and without ZeRO, with the layouts of ZeRO's `stage` (0 to 3) over `axis`.

    Cuts the first dim that the axis divides and that nothing else cuts; without such a dim the parameter stays whole.
    Stage 1 cuts the optimizer state, 2 the gradient too, 3 the weight too: never what ops use. A frozen parameter has
    only a weight.
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
        weight=cut if stage > 2 else layout,
        gradient=cut if stage > 1 else layout,
        optimizer_state=cut,
    )
