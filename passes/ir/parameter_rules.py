"""The rules of a placed parameter's layouts: of its use, its weight, its gradient and its optimizer state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

from moec.passes.ir.layout import Layout, Shard
from moec.passes.ir.mesh import EXPERT_AXES, ZERO_AXES
from moec.passes.ir.value import Parameter, Table, Value


@lru_cache(maxsize=1024)
def parameter_complaint(parameter: Parameter, wide_axes: tuple[tuple[str, int], ...]) -> str:
    """The rule that the layouts of a placed parameter break; empty where they break none.

    `wide_axes` are those that may cut it, with sizes. Ops use the weight without ZeRO's cuts. The weight, the
    gradient and the optimizer state are each cut as the layout before is, and perhaps further: gathers undo the further
    cuts. The gradient is cut further only over axes over which it is summed. All axes belong to one mesh.
    """
    axes = dict(wide_axes)
    label, compute, summed = f"@{parameter.name}", parameter.layout, parameter.sum_over or ()
    weight, gradient, state = parameter.weight, parameter.gradient, parameter.optimizer_state
    if complaint := _unfoldable(parameter):
        return complaint
    if compute is None or weight is None or gradient is None or state is None:
        missing = "gradient" if gradient is None else "optimizer state" if state is None else "weight"
        return f"{label} has no layout for its {missing}"
    if parameter.frozen and (summed or not weight == gradient == state):
        return f"{label} is frozen, and has no gradient to sum or to cut"
    stored_layouts = {"weight": weight, "gradient": gradient, "optimizer state": state}
    for name, layout in stored_layouts.items():
        if not axes.keys() >= set(layout.axes):
            return f"the {name} of {label} lies on {layout}, axes are {set(axes)}"
        if complaint := uneven(parameter, layout, axes):
            return f"the {name} of {label} is {layout}: {complaint}"
    if compute != Layout.of((axis, cut) for axis, cut in weight.placements if axis not in ZERO_AXES):
        return f"ops use {label} as {compute}, which is not {weight} without the cuts over {' and '.join(ZERO_AXES)}"
    if unsummed := sorted(set(gradient.axes) - {*compute.axes, *summed}) if not parameter.frozen else ():
        return f"the gradient of {label} is cut over {unsummed[0]}, over which it is not summed"
    for (name, layout), outer in zip(stored_layouts.items(), (compute, weight, gradient), strict=True):
        if not layout.refines(outer):
            return f"the {name} of {label} is {layout}, which is not {outer} cut further"
    if not _on_one_mesh({*state.axes, *summed}):
        return f"the optimizer state of {label} is {state}, which are axes of two meshes"
    return ""


def guests_complaint(parameter: Parameter, tables: Sequence[Table], ranks: int) -> str:
    """Why the guests of a parameter are not those of its block's table of slots; empty where they are. `ranks`: of
    `ep`. Of a block with a table all parameters that `ep` cuts by experts have guests, and no others."""
    experts, wanted = parameter.shape[0] if parameter.shape else 0, 0
    for table in tables if parameter.is_of_experts else ():
        assert isinstance(experts, int)
        slots = [dim for dim in table.shape if isinstance(dim, int)]
        wanted = slots[1] * slots[2] - experts if len(slots) == 3 and slots[:2] == [2, ranks] else -1
    if parameter.guests == wanted:
        return ""
    shapes = ", ".join(str(list(table.shape)) for table in tables) or "none"
    return f"@{parameter.name} has {parameter.guests} guests on {ranks} ranks; the table of slots is {shapes}"


def _unfoldable(parameter: Parameter) -> str:
    matrices, rank = parameter.matrices, len(parameter.shape)
    if matrices.stack + matrices.rows >= rank:
        return f"@{parameter.name} has {rank} dims, too few for {matrices}"
    if matrices.hidden and not matrices.rows:
        return f"@{parameter.name} is hidden, but has no rows"
    return ""


def _on_one_mesh(axes: Collection[str]) -> bool:
    return len({axis in EXPERT_AXES for axis in axes}) < 2


def uneven(value: Value, layout: Layout, axes: Mapping[str, int]) -> str:
    """Why `layout` does not cut `value` evenly over axes of these sizes; empty where it does."""
    pieces: dict[int, int] = {}
    for axis, placement in layout.placements:
        if isinstance(placement, Shard):
            pieces[placement.dim] = pieces.get(placement.dim, 1) * axes[axis]
    for dim, count in pieces.items():
        if dim >= len(value.shape):
            return f"there is no dim {dim}"
        size = value.shape[dim]
        if isinstance(size, int) and size % count and "sources" not in value.shape:
            return f"dim {dim} of {size} is cut into {count} pieces"
    return ""
