"""The conversions of a parameter between its uses: from its master to its weight, and of its gradient.

Of ZeRO 1 and 2 no op of a block takes them: a job runs them once per step, and `moec verify` with it.
"""

from __future__ import annotations

from collections.abc import Iterator

from moec.passes.ir import Layout, LayoutError
from moec.passes.ir.ops.conversion import Conversion, matching
from moec.passes.place.communicate import steps_between


def conversions_between(layout: Layout, wanted: Layout) -> Iterator[Conversion]:
    """The conversions, made by `over`, that take a dense value from `layout` to `wanted`, in order.

    Raises `LayoutError` where there is none.
    """
    for step in steps_between(layout, wanted):
        conversions = matching("dense", step.axis, layout.get(step.axis), step.target, partial_gradient=False)
        if not conversions:
            raise LayoutError(f"no conversion from {layout} to {step.axis}:{step.target}")
        yield conversions[0]
        layout = layout.replace(step.axis, step.target)
