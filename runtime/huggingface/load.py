"""`moec.load_hf`: loads weights of Hugging Face into a model of moec. Every rank reads its part."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moec.codegen.plan import parameters_of
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
from moec.runtime.huggingface.moves import LocalPart, pairs
from moec.runtime.huggingface.source_tensors import SourceTensor, digest_of, source_tensors
from moec.runtime.model.module import PlanModule
from moec.runtime.model.plan_names import by_plan_names
from moec.runtime.model.stage_pass import require_whole
from moec.runtime.ranks.checks import Complaint, MustMatch
from moec.runtime.script import warn
from moec.runtime.weights.home import home_of


@called("moec.load_hf")
def load_hf(module: PlanModule, source: str | Path | Mapping[str, Any] | nn.Module) -> None:
    """Copies weights into the parameters and online biases of `module`, the reference or a job's model.

    `source`: a folder as `save_pretrained` writes it, one safetensors file, or a model of transformers or its
    state dict.
    Weights in fp32, bf16 and fp16 become fp32 parameters exactly; those that are frozen are rounded to the dtype in
    which they compute. Warns on rank 0 if the folder has no config, or one of another model with tensors of the same
    shapes (other positions, another k). Every rank of a job calls it with the same files and reads only its part.
    Call it before the optimizer's first step, because the optimizer's masters are the parameters.

    Raises the same `DiagnosticError` on every rank, before anything is copied: MOE0724 inside of a step, MOE0714 for
    a module that is no model of moec, MOE0710 for one with an adapter in place of a parameter, MOE0905 for files that
    cannot be read, MOE0906 for tensors that are missing or superfluous, MOE0907 for other shapes or dtypes, MOE0908 for
    a config of a model with other parameters, or if no architecture computes the model, MOE0811 if ranks read different
    weights; and those of `moec.from_hf`.
    """
    require_module(module)
    home = home_of(module)
    home.require_running()
    require_whole(module.program, "moec.load_hf", "`moec weights import FOLDER CHECKPOINT` and `job.load` read it")
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
class PlannedLoad:
    """The tensors to load with their rules, and this rank's parts of the parameters.

    `digest` is equal on ranks that read the same source; `remarks` are warnings.
    """

    tensors: Sequence[tuple[Rule, SourceTensor]]
    parts: Mapping[str, LocalPart]
    digest: int
    remarks: Sequence[str]


def _planned(module: PlanModule, source: str | Path | Mapping[str, Any]) -> PlannedLoad:
    """Makes all checks; returns what `load_hf` copies."""
    named = "the state dict" if isinstance(source, Mapping) else str(source)
    parts = local_parts(module)
    shapes = {name: local.shape for name, local in parts.items()}
    family, extra, remarks = _family(module, source, shapes)
    stored = source_tensors(source)
    try:
        tensors = require_fit(family, family.rules(module.spec.model, stored), shapes, stored, named, extra)
    except DiagnosticError as error:
        raise (JobError("MOE0908", remarks[0], error.diagnostics[0].help) if remarks else error) from error
    digest = digest_of(stored) if home_of(module).checks.compares else 0
    return PlannedLoad(tensors, parts, digest, remarks)


def complaint_of(error: Exception) -> Complaint:
    """One rank's error as a complaint that all ranks raise."""
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


def local_parts(module: PlanModule) -> dict[str, LocalPart]:
    """This rank's part of every parameter and state, by its name in the plan."""
    parts = {}
    for name, tensor in plan_tensors(module).items():
        part = part_of(tensor)
        parts[name] = LocalPart(part.local, part.box, part.shape)
    return parts


def plan_tensors(module: PlanModule) -> dict[str, Tensor]:
    """Every parameter and state by its name in the plan, in the plan's order. Raises `JobError` MOE0710."""
    known = [*parameters_of(module.program), *module.program.states]
    named: dict[str, Tensor] = {}
    for tensors in (module.named_parameters(), module.named_buffers()):
        by_plan_name, _ = by_plan_names(module, tensors, set(known))
        named |= by_plan_name
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
        remark = f"{folder} has no {CONFIG}: moec cannot tell whether its weights are this model's"
        return family, 0, [] if folder is None else [remark]
    imported = read_config(folder)
    remark = remark_of(imported, model, shapes, str(source))
    return imported.family, num_further_layers(imported.config), [remark] if remark else []


def num_further_layers(config: Mapping[str, Any]) -> int:
    """The number of layers that predict further tokens, which the files may have after the model's layers."""
    number = config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0
    return number if isinstance(number, int) else 0


OTHER_MODEL = "make the module from `moec.from_hf` of this folder"


def remark_of(imported: Imported, model: Model, shapes: Mapping[str, tuple[int, ...]], source: str) -> str:
    """A sentence on how `model` differs from the config of `source`; empty if it does not.

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
    """The phrases of `differences`, without fields that matter in training alone and `FREE_FIELDS`.

    Equal differences of several layers are one phrase.
    """
    theirs, ours = as_inferred(theirs), as_inferred(ours)
    if ours.dtype is DType.FP32 or {*theirs.keep_in_fp32} <= {*ours.keep_in_fp32}:
        theirs = theirs.replace(keep_in_fp32=ours.keep_in_fp32)  # nothing is rounded that the config keeps
    layers = dict[tuple[str, str], list[int]]()
    for difference in differences(theirs, ours):
        if not difference.startswith(FREE_FIELDS):
            match = _DIFFERENT.fullmatch(difference)
            assert match is not None
            number, what, how = match.groups()
            layers.setdefault((what, how), []).extend([int(number)] if number else [])
    return [f"`{what}`{f' of {numbered(numbers)}' if numbers else ''} {how}" for (what, how), numbers in layers.items()]


_DIFFERENT = re.compile(r"`(?:layers\.(\d+)\.)?(.*?)` (.*)")
FREE_FIELDS = "`dtype`", "`context`"
"""How the phrases of fields that may differ begin: the compute dtype, and the longest sequence."""
