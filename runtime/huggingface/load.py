"""`moec.load_hf`: weights of Hugging Face into a model of moec, of which every rank reads its part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moec.codegen.plan import parameters_of, states_of
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.huggingface.family import Family
from moec.grammar.huggingface.read import CONFIG, read_config
from moec.grammar.huggingface.rules import Rule
from moec.grammar.huggingface.write import as_inferred, config_for, differences
from moec.grammar.spec import Model
from moec.runtime.checkpoint.parts import part_of
from moec.runtime.errors import JobError
from moec.runtime.huggingface.fit import require_fit
from moec.runtime.huggingface.moves import Local, pairs
from moec.runtime.huggingface.stored import Stored, stored_in
from moec.runtime.job.checks import Complaint
from moec.runtime.job.home import home_of
from moec.runtime.job.module import PlanModule
from moec.runtime.job.plan_names import by_plan_names


def load_hf(module: PlanModule, source: str | Path | Mapping[str, Any]) -> None:
    """Copies weights into the parameters and online biases of `module`, the reference or a job's model.

    `source`: a folder as `save_pretrained` writes it, one safetensors file, or the state dict of a transformers model.
    Weights in fp32, bf16 and fp16 become the fp32 parameters exactly. A folder's config, if it has one, must say the
    module's model. Every rank of a job calls it, and reads only its part; call it before the optimizer's first step,
    whose masters are the parameters.

    Raises the same `DiagnosticError` on every rank, before anything is copied: MOE0724 inside of a step, MOE0714 for
    a module that is no model of moec, MOE0710 for one with an adapter in place of a parameter, MOE0905 for files that
    cannot be read, MOE0906 for tensors that are missing or too many, MOE0907 for other shapes or dtypes, MOE0908 for a
    config of another model, or where no architecture computes the model; and those of `moec.from_hf`.
    """
    require_module(module)
    home = home_of(module)
    home.require_running()
    home.checks.require("load_hf", module.open_step_complaint())
    try:
        loads = _planned(module, source)
    except DiagnosticError as error:
        if home.checks.compares:
            home.checks.require("load_hf", Complaint.of(error))
        raise
    home.checks.require("load_hf", None)
    with torch.no_grad():
        for rule, tensor in loads.tensors:
            for part, theirs in pairs(rule, tensor.view(), loads.parts):
                part.copy_(theirs)
    module.drop_loads()


@dataclass(frozen=True, slots=True)
class Loads:
    """The tensors to load, each with its rule, and this rank's parts of the parameters."""

    tensors: Sequence[tuple[Rule, Stored]]
    parts: Mapping[str, Local]


def _planned(module: PlanModule, source: str | Path | Mapping[str, Any]) -> Loads:
    """What `load_hf` copies, after every check."""
    family, model = _family(module, source)
    stored, parts = stored_in(source), local_parts(module)
    shapes = {name: local.shape for name, local in parts.items()}
    name = "the state dict" if isinstance(source, Mapping) else str(source)
    return Loads(require_fit(family, family.rules(model, stored), shapes, stored, name), parts)


def require_module(module: object) -> None:
    """Raises `JobError` MOE0714 for anything but a model of moec."""
    if not isinstance(module, PlanModule):
        raise JobError(
            "MOE0714",
            f"an object of class {type(module).__name__} is no model of moec",
            "give the module of `moec.reference` or `job.build`, without a wrapper around it",
        )


def local_parts(module: PlanModule) -> dict[str, Local]:
    """This rank's part of every parameter and state, by its name in the plan."""
    parts = {}
    for name, tensor in plan_tensors(module).items():
        part = part_of(tensor)
        parts[name] = Local(part.local, part.box, part.shape)
    return parts


def plan_tensors(module: PlanModule) -> dict[str, Tensor]:
    """Every parameter and state by its name in the plan, in the plan's order. Raises `JobError` MOE0710."""
    known = [*parameters_of(module.program), *states_of(module.program)]
    named: dict[str, Tensor] = {}
    for tensors in (module.named_parameters(), module.named_buffers()):
        found, _ = by_plan_names(module, tensors, set(known))
        named |= found
    absent = [name for name in known if name not in named]
    if absent:
        message = f"{absent[0]} is no longer a parameter of the model"
        raise JobError("MOE0710", message, "load and save while no adapter or parametrization is in its place")
    return {name: named[name] for name in known}


def _family(module: PlanModule, source: str | Path | Mapping[str, Any]) -> tuple[Family, Model]:
    """The family of the source's config, which must say the module's model; of a state dict the model's own."""
    model = module.spec.model
    if isinstance(source, Mapping) or not (Path(source) / CONFIG).is_file():
        _, family = config_for(module.spec)
        return family, model
    imported = read_config(source)
    require_same(imported.spec.model, model, str(source))
    return imported.family, model


def require_same(theirs: Model, ours: Model, source: str) -> None:
    """Raises `JobError` MOE0908 unless the config of `source` says `ours`, apart from what acts in training alone."""
    different = first_difference(theirs, ours)
    if different is None:
        return
    how = different.replace("would be read as", "in the module")
    message = f"{source} is another model than {ours.name}: in its config {how}"
    raise JobError("MOE0908", message, "make the module from `moec.from_hf` of this folder")


def first_difference(theirs: Model, ours: Model) -> str | None:
    """What differs first, as `differences` says it, apart from what acts in training alone and from `FREE`, or None."""
    found = differences(as_inferred(theirs), as_inferred(ours))
    return next((each for each in found if not each.startswith(FREE)), None)


FREE = "`dtype`", "`context`"
"""What may differ: the dtype in which layers compute, and the longest sequence."""
