"""`moec.load_hf`: weights of Hugging Face into a model of moec, of which every rank reads its part."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moec.codegen.plan import parameters_of, states_of
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.huggingface.family import Family
from moec.grammar.huggingface.read import CONFIG, Imported, read_config
from moec.grammar.huggingface.rules import Rule
from moec.grammar.huggingface.write import as_inferred, config_for, differences
from moec.grammar.layer_numbers import numbered
from moec.grammar.spec import DType, Model
from moec.runtime.calls import called
from moec.runtime.checkpoint.format.parts import part_of
from moec.runtime.errors import JobError
from moec.runtime.huggingface.fit import require_fit
from moec.runtime.huggingface.moves import Local, pairs
from moec.runtime.huggingface.stored import Stored, digest_of, stored_in
from moec.runtime.model.module import PlanModule
from moec.runtime.model.plan_names import by_plan_names
from moec.runtime.ranks.checks import Complaint, MustMatch
from moec.runtime.script import warn
from moec.runtime.weights.home import home_of


@called("moec.load_hf")
def load_hf(module: PlanModule, source: str | Path | Mapping[str, Any] | nn.Module) -> None:
    """Copies weights into the parameters and online biases of `module`, the reference or a job's model.

    `source`: a folder as `save_pretrained` writes it, one safetensors file, or a model of transformers or its
    state dict.
    Weights in fp32, bf16 and fp16 become fp32 parameters exactly; those that are frozen are rounded to the dtype in
    which they compute. Warns on rank 0 where the folder's config says another model than the module, whose tensors
    fit (other positions, another k), and where there is no config. Every rank of a job calls it, and reads only its
    part, of the same files; call it before the optimizer's first step, whose masters are the parameters.

    Raises the same `DiagnosticError` on every rank, before anything is copied: MOE0724 inside of a step, MOE0714 for
    a module that is no model of moec, MOE0710 for one with an adapter in place of a parameter, MOE0905 for files that
    cannot be read, MOE0906 for tensors that are missing or too many, MOE0907 for other shapes or dtypes, MOE0908 for a
    config of a model with other parameters, or where no architecture computes the model, MOE0811 where ranks read
    different weights; and those of `moec.from_hf`.
    """
    require_module(module)
    home = home_of(module)
    home.require_running()
    home.checks.require("load_hf", module.open_step_complaint())
    if isinstance(source, nn.Module):
        source = source.state_dict()
    try:
        loads = _planned(module, source)
    except Exception as error:
        if home.checks.compares:
            home.checks.require("load_hf", complaint_of(error))
        raise
    home.checks.require("load_hf", None, MustMatch("MOE0811", "ranks load different weights", (loads.digest,)))
    if home.rank == 0:
        for remark in loads.remarks:
            warn(remark)
    with torch.no_grad():
        for rule, tensor in loads.tensors:
            for part, theirs in pairs(rule, tensor.view(), loads.parts):
                part.copy_(theirs)
    module.drop_loads()


@dataclass(frozen=True, slots=True)
class Loads:
    """The tensors to load, each with its rule, and this rank's parts of the parameters.

    `digest` is that of the source, the same on ranks that read the same; `remarks` are warnings.
    """

    tensors: Sequence[tuple[Rule, Stored]]
    parts: Mapping[str, Local]
    digest: int
    remarks: Sequence[str]


def _planned(module: PlanModule, source: str | Path | Mapping[str, Any]) -> Loads:
    """What `load_hf` copies, after every check."""
    named = "the state dict" if isinstance(source, Mapping) else str(source)
    parts = local_parts(module)
    shapes = {name: local.shape for name, local in parts.items()}
    family, extra, remarks = _family(module, source, shapes)
    stored = stored_in(source)
    try:
        found = require_fit(family, family.rules(module.spec.model, stored), shapes, stored, named, extra)
    except DiagnosticError as error:
        raise (JobError("MOE0908", remarks[0], error.diagnostics[0].help) if remarks else error) from error
    digest = digest_of(stored) if home_of(module).checks.compares else 0
    return Loads(found, parts, digest, remarks)


def complaint_of(error: Exception) -> Complaint:
    """An error of one rank as the error of all."""
    if isinstance(error, DiagnosticError):
        return Complaint.of(error)
    return Complaint("MOE0812", f"{type(error).__name__}: {error}", "that error's own traceback shows where")


def require_module(module: object) -> None:
    """Raises `JobError` MOE0714 for anything but a model of moec."""
    if not isinstance(module, PlanModule):
        raise JobError(
            "MOE0714",
            f"an object of class {type(module).__name__} is not a model of moec",
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


def _family(
    module: PlanModule, source: str | Path | Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Family, int, list[str]]:
    """The family that names the source's tensors, its layers for further predictions, and warnings."""
    model = module.spec.model
    folder = None if isinstance(source, Mapping) else Path(source)
    if folder is not None and folder.is_file():
        folder = folder.parent
    if folder is None or not (folder / CONFIG).is_file():
        _, family = config_for(module.spec)
        remarks = (
            []
            if folder is None
            else [f"{folder} has no {CONFIG}: moec cannot tell whether its weights are this model's"]
        )
        return family, 0, remarks
    imported = read_config(folder)
    remark = remark_of(imported, model, shapes, str(source))
    return imported.family, further_layers(imported.config), [remark] if remark else []


def further_layers(config: Mapping[str, Any]) -> int:
    """How many layers that predict further tokens the files may have beside the model's."""
    number = config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0
    return number if isinstance(number, int) else 0


OTHER_MODEL = "make the module from `moec.from_hf` of this folder"


def remark_of(imported: Imported, model: Model, shapes: Mapping[str, tuple[int, ...]], source: str) -> str:
    """What a model computes otherwise than the config of `source` says, or nothing.

    Raises `JobError` MOE0908 for models whose parameters are not those of the config.
    """
    different = differing(imported.spec.model, model)
    if not different:
        return ""
    how = "; ".join(different).replace("would be read as", "in the model")
    message = f"{source} is another model than {model.name}: in its config {how}"
    if any(piece.parameter not in shapes for rule in imported.family.rules(model, None) for piece in rule.pieces):
        raise JobError("MOE0908", message, OTHER_MODEL)
    return message


def differing(theirs: Model, ours: Model) -> list[str]:
    """What differs, as `differences` says it, apart from what acts in training alone and from `FREE`.

    What differs alike in several layers is said once, of all of them.
    """
    theirs, ours = as_inferred(theirs), as_inferred(ours)
    if ours.dtype is DType.FP32 or {*theirs.keep_in_fp32} <= {*ours.keep_in_fp32}:
        theirs = theirs.replace(keep_in_fp32=ours.keep_in_fp32)  # nothing is rounded that the config keeps
    layers = dict[tuple[str, str], list[int]]()
    for each in differences(theirs, ours):
        if not each.startswith(FREE):
            said = _DIFFERENT.fullmatch(each)
            assert said is not None
            number, what, how = said.groups()
            layers.setdefault((what, how), []).extend([int(number)] if number else [])
    return [f"`{what}`{f' of {numbered(of)}' if of else ''} {how}" for (what, how), of in layers.items()]


_DIFFERENT = re.compile(r"`(?:layers\.(\d+)\.)?(.*?)` (.*)")
FREE = "`dtype`", "`context`"
"""What may differ: the dtype in which layers compute, and the longest sequence."""
