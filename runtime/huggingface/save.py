"""`moec.save_hf`: a model's weights and config as a folder that transformers loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

from moec.codegen.emit import DTYPES as COMPUTED
from moec.grammar.huggingface.read import CONFIG, parsed_config
from moec.grammar.huggingface.rules import Rule
from moec.grammar.huggingface.write import config_for
from moec.runtime.calls import called
from moec.runtime.checkpoint.temporary import sweep_left_over
from moec.runtime.errors import JobError
from moec.runtime.huggingface.kept import carried
from moec.runtime.huggingface.load import complaint_of, plan_tensors, require_module
from moec.runtime.huggingface.writer import MOST_BYTES, Writer, dtypes_of
from moec.runtime.job.home import home_of
from moec.runtime.job.module import PlanModule


@called("moec.save_hf")
def save_hf(
    module: PlanModule,
    folder: str | Path,
    *,
    like: str | Path | None = None,
    model_type: str | None = None,
    max_file_bytes: int = MOST_BYTES,
) -> None:
    """Writes parameters in their compute dtype, online biases in fp32, and `config.json` as the new `folder`.

    The architecture is `model_type`, by default that of the model's name or the first that computes the same. The
    tokenizer and other files come from the folder `like`, and with them the special tokens' ids in the config. Every
    rank of a job calls it, rank 0 writes; a rank needs memory for the largest whole parameter. What a killed save has
    left beside `folder` is removed.

    Raises `DiagnosticError` on every rank, with nothing at `folder`: MOE0710, MOE0714, MOE0724 as `load_hf`, MOE0901
    for an unknown `model_type`, MOE0908 for a model that no architecture computes, MOE0909 where the folder exists or
    cannot be written.
    """
    require_module(module)
    home = home_of(module)
    home.require_running()
    home.checks.require("save_hf", module.open_step_complaint())
    writer: Writer | None = None
    error: Exception | None = None
    beside: Mapping[str, bytes] = {}
    try:
        try:
            config, family = config_for(module.spec, model_type)
            tensors = plan_tensors(module)
            rules = [rule for rule in family.rules(module.spec.model, None) if rule.written]
            if home.rank == 0:
                shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
                dtypes = dtypes_of(rules, COMPUTED[str(module.spec.model.dtype)], module.program)
                sweep_left_over(Path(folder))
                writer = Writer(Path(folder), rules, shapes, dtypes, max_file_bytes)
                beside, config = _of_folder(like, config)
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


SPECIAL = "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "eod_token_id", "tokenizer_class"


def _of_folder(like: str | Path | None, config: Mapping[str, Any]) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The files of the folder that a model is saved like, and the config with its special tokens."""
    if like is None:
        return {}, dict(config)
    try:
        files = carried(Path(like))
    except (OSError, ValueError) as error:  # ValueError: a NUL
        reason = getattr(error, "strerror", None) or str(error)
        raise JobError("MOE0900", f"{like}: {reason}", "`like` must be the folder that the model came from") from error
    values, _ = parsed_config(files.pop(CONFIG, b"{}"), f"{like}/{CONFIG}")
    return files, {**config, **{key: values[key] for key in SPECIAL if key in values}}


def _require_none(module: PlanModule, error: Exception | None) -> None:
    """Raises one rank's error on every rank. A collective."""
    checks = home_of(module).checks
    if error is not None and not checks.compares:
        raise error
    checks.require("save_hf", None if error is None else complaint_of(error))
