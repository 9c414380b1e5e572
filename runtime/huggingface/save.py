"""`moec.save_hf`: a model's weights and config as a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path

from torch.distributed.tensor import DTensor

from moec.codegen.emit import DTYPES as COMPUTED
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.huggingface.rules import Rule
from moec.grammar.huggingface.write import config_for
from moec.runtime.errors import JobError
from moec.runtime.huggingface.load import plan_tensors, require_module
from moec.runtime.huggingface.writer import MOST_BYTES, Writer
from moec.runtime.job.checks import Complaint
from moec.runtime.job.home import home_of
from moec.runtime.job.module import PlanModule


def save_hf(
    module: PlanModule, folder: str | Path, *, model_type: str | None = None, max_file_bytes: int = MOST_BYTES
) -> None:
    """Writes the model's parameters and online biases, in the model's dtype, and `config.json` as the new `folder`.

    The architecture is `model_type`, by default that of the model's name or the first that computes the same. Every
    rank of a job calls it, rank 0 writes; a rank needs memory for the largest whole parameter. Tokenizer files are the
    caller's: `moec weights export` carries them along.

    Raises `DiagnosticError` on every rank, with nothing at `folder`: MOE0710, MOE0714, MOE0724 as `load_hf`, MOE0901
    for an unknown `model_type`, MOE0908 for a model that no architecture computes, MOE0909 where the folder exists or
    cannot be written.
    """
    require_module(module)
    home = home_of(module)
    home.require_running()
    home.checks.require("save_hf", module.open_step_complaint())
    writer: Writer | None = None
    error: DiagnosticError | None = None
    try:
        try:
            config, family = config_for(module.spec, model_type)
            tensors = plan_tensors(module)
            rules = [rule for rule in family.rules(module.spec.model, None) if rule.written]
            if home.rank == 0:
                shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
                dtype = COMPUTED[str(module.spec.model.dtype)]
                writer = Writer(Path(folder), rules, shapes, dtype, max_file_bytes)
        except DiagnosticError as raised:
            error = raised
        _require_none(module, error)
        by_parameter: dict[str, list[Rule]] = {}
        for rule in rules:
            for piece in rule.pieces:
                by_parameter.setdefault(piece.parameter, []).append(rule)
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if writer is not None:
                writer.write(name, whole.detach().cpu(), by_parameter.get(name, ()))
        if writer is not None:
            try:
                writer.publish(config)
            except JobError as raised:
                error = raised
        _require_none(module, error)
    finally:
        if writer is not None:
            writer.discard()


def _require_none(module: PlanModule, error: DiagnosticError | None) -> None:
    """Raises one rank's error on every rank. A collective."""
    checks = home_of(module).checks
    if error is not None and not checks.compares:
        raise error
    checks.require("save_hf", None if error is None else Complaint.of(error))
