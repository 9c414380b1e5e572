"""`moec.save_hf`: a model's weights and config as a folder that transformers loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

from moec.codegen.emit import DTYPES as COMPUTED
from moec.codegen.plan import parameters_of
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.huggingface.family import Family
from moec.grammar.huggingface.read import CONFIG, INERT, read_config
from moec.grammar.huggingface.rules import Rule
from moec.grammar.huggingface.write import config_for
from moec.passes.lower.lower_model import lower
from moec.runtime.calls import called
from moec.runtime.checkpoint.format.temporary import sweep_left_over
from moec.runtime.errors import JobError
from moec.runtime.huggingface.fit import OF_TOKENS
from moec.runtime.huggingface.kept import other_files
from moec.runtime.huggingface.load import complaint_of, plan_tensors, remark_of, require_module
from moec.runtime.huggingface.writer import MAX_FILE_BYTES, Writer, dtypes_of
from moec.runtime.model.module import PlanModule
from moec.runtime.model.stage_pass import require_whole
from moec.runtime.script import warn
from moec.runtime.weights.home import home_of


@called("moec.save_hf")
def save_hf(
    module: PlanModule,
    folder: str | Path,
    *,
    like: str | Path | None = None,
    model_type: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes parameters in their compute dtype, online biases in fp32, and `config.json` as the new `folder`.

    The architecture is `model_type`, by default that of the model's name or the first that computes the same. The
    tokenizer and other files come from the folder `like`, and with them the keys of its config that moec does not
    read: special tokens, coefficients of losses. Every rank of a job calls it, rank 0 writes; a rank needs memory for
    the largest whole parameter. Temporary folders that killed saves left beside `folder` are removed. Warns on rank 0
    if the model differs from the config of `like`; the written config is the model's own.

    Raises `DiagnosticError` on every rank, with nothing at `folder`: MOE0710, MOE0714, MOE0724 as `load_hf`, MOE0901
    for an unknown `model_type`, MOE0908 for a model that no architecture computes, and for a folder `like` of a model
    with other parameters, MOE0909 where the folder exists or cannot be written; those of `read_config` for `like`.
    """
    require_module(module)
    home = home_of(module)
    home.require_running()
    require_whole(module.program, "moec.save_hf", "`job.save` and `moec weights export CHECKPOINT FOLDER` write it")
    home.checks.require("save_hf", module.open_step_complaint())
    writer: Writer | None = None
    error: Exception | None = None
    beside: Mapping[str, bytes] = {}
    try:
        try:
            config, family = _config_for(module, model_type)
            tensors = plan_tensors(module)
            rules = [rule for rule in family.rules(module.spec.model, None) if rule.written]
            if home.rank == 0:
                shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
                dtypes = dtypes_of(rules, COMPUTED[str(module.spec.model.dtype)], module.program)
                sweep_left_over(Path(folder))
                writer = Writer(Path(folder), rules, shapes, dtypes, max_file_bytes)
                if like is not None:
                    beside, config = _like(Path(like), module, config, shapes)
        except Exception as raised:  # noqa: BLE001 - the other ranks wait
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
                writer.publish(config, beside)
            except Exception as raised:  # noqa: BLE001 - the other ranks wait
                error = raised
        _require_none(module, error)
    finally:
        if writer is not None:
            writer.discard()


def _config_for(module: PlanModule, model_type: str | None) -> tuple[dict[str, Any], Family]:
    """`config_for`, whose refusal names another way to write a folder."""
    try:
        return config_for(module.spec, model_type)
    except DiagnosticError as error:
        explained = [
            diagnostic._replace(help="; ".join(filter(None, (diagnostic.help, EXPORT))))
            if diagnostic.code == "MOE0908"
            else diagnostic
            for diagnostic in error.diagnostics
        ]
        raise DiagnosticError(explained) from error


EXPORT = "`moec weights export CHECKPOINT FOLDER --like DIR` writes a checkpoint's tensors with the config of DIR"


def _like(
    folder: Path, module: PlanModule, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The other files of the folder `like`, and the config to write.

    It is the folder's config if the model computes the same, else the model's own with the folder's keys of training,
    generation and tokens.
    """
    imported = read_config(folder)
    try:
        files = other_files(folder)
    except OSError as error:
        raise JobError("MOE0900", f"{folder}: {error.strerror}", "`like` is a model's folder") from error
    files.pop(CONFIG, None)
    remark = remark_of(imported, module.spec.model, shapes, str(folder))
    theirs_only = {name: p.shape for name, p in parameters_of(lower(imported.spec)).items()}.items() - shapes.items()
    if any(name not in OF_TOKENS or name not in shapes for name, _ in theirs_only):
        raise JobError("MOE0908", remark, OTHER_FOLDER)
    if remark:
        warn(remark)
    theirs = {key: value for key, value in imported.config.items() if key != "quantization_config"}
    if not remark and not imported.inside and theirs.get("model_type") == config["model_type"]:
        own = {"torch_dtype": config["dtype"], **config}
        return files, {**theirs, **{key: own[key] for key in FREE_KEYS if theirs.get(key) is not None and key in own}}
    inert = (INERT | imported.family.ignored) - OF_FILES
    return files, {**config, **{key: value for key, value in theirs.items() if key in inert}}


OTHER_FOLDER = "name the folder that the model came from, or leave `like` out and copy the tokenizer's files"

FREE_KEYS = "dtype", "torch_dtype", "max_position_embeddings"
"""Keys in which the model may differ from the folder `like` and yet compute the same."""

OF_FILES = frozenset((
    "architectures", "model_type", "auto_map", "torch_dtype", "dtype", "transformers_version"
))  # fmt: skip
"""Keys that name the files' class, and how their tensors are stored."""


def _require_none(module: PlanModule, error: Exception | None) -> None:
    """Raises one rank's error on every rank. A collective."""
    checks = home_of(module).checks
    if error is not None and not checks.compares:
        raise error
    checks.require("save_hf", None if error is None else complaint_of(error))
