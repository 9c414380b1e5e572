"""Which parts of a checkpoint belong to a rank's pipeline stages. A checkpoint itself knows no stages."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from moec.codegen.plan import Plan
from moec.runtime.checkpoint.format.index import MODEL, Entry, OptimizerEntry
from moec.runtime.checkpoint.optimizer_state import OPTIONS, PREFIX
from moec.runtime.errors import JobError


def writes(stored_name: str, plan: Plan, rank: int) -> bool:
    """Whether the ranks of this rank's stages write a tensor that they have.

    The first pipeline rank writes the options of groups, which all have, and the first that has a parameter of several
    stages writes it and its states.
    """
    number = rank // plan.stage_size
    if stored_name.startswith(OPTIONS):
        return number == 0
    return plan.owners_of_tied.get(_parameter(stored_name), (number,))[0] == number


def _parameter(stored_name: str) -> str:
    """The parameter or state of `model/NAME`, or of `optimizer/KEY/NAME`."""
    return stored_name.removeprefix(MODEL) if stored_name.startswith(MODEL) else stored_name.split("/", 2)[-1]


def joined_entries(entries: Sequence[dict[str, Any]], order: Sequence[str]) -> dict[str, Any] | None:
    """The entry of an optimizer from those of all pipeline ranks, each over the parameters of its stages. `order`: of
    all parameters. Raises `JobError` MOE0807 for stages with different numbers of groups."""
    if len(entries) < 2:
        return entries[0] if entries else None
    sizes = {len(entry["groups"]) for entry in entries}
    if len(sizes) > 1:
        message = f"pipeline stages have optimizers of {min(sizes)} and of {max(sizes)} groups of parameters"
        raise JobError("MOE0807", message, "make as many groups on every rank; a group may have no parameter there")
    groups = []
    for number, group in enumerate(entries[0]["groups"]):
        members = {name for entry in entries for name in entry["groups"][number]["parameters"]}
        groups.append({**group, "parameters": [name for name in order if name in members]})
    numbers = {name: tree for entry in entries for name, tree in entry["numbers"].items()}
    return {**entries[0], "groups": groups, "numbers": numbers}


def without(entry: OptimizerEntry | None, names: Container[str]) -> OptimizerEntry | None:
    """The entry of an optimizer without the parameters `names`; groups keep their numbers."""
    if entry is None:
        return None
    groups = tuple(
        group.model_copy(update={"parameters": tuple(name for name in group.parameters if name not in names)})
        for group in entry.groups
    )
    numbers = {name: trees for name, trees in entry.numbers.items() if name not in names}
    return entry.model_copy(update={"groups": groups, "numbers": numbers})


def tensors_without(tensors: Mapping[str, Entry], names: Container[str]) -> dict[str, Entry]:
    """The tensors of a checkpoint without those of the parameters `names`, and without their optimizer states."""
    return {
        stored: entry
        for stored, entry in tensors.items()
        if not (stored.startswith((MODEL, PREFIX)) and _parameter(stored) in names)
    }
