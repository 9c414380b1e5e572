"""Imports weights of Hugging Face as a checkpoint of moec, and exports them, in one process and bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moec.codegen.emit import DTYPES as COMPUTED
from moec.codegen.plan import Plan, make_plan
from moec.grammar.diagnostics import Diagnostic, DiagnosticError, Severity, diagnose
from moec.grammar.huggingface.family import Family
from moec.grammar.huggingface.read import CONFIG, Imported, parsed_config, read_config
from moec.grammar.huggingface.write import config_for
from moec.grammar.spec import Spec
from moec.passes.pipeline import compile_program
from moec.runtime.checkpoint.convert import Advance, NewTensor, no_progress, shapes_of, write_new
from moec.runtime.checkpoint.format.index import MODEL
from moec.runtime.checkpoint.format.parts import DTYPES, copy_block
from moec.runtime.checkpoint.format.reading import Checkpoint
from moec.runtime.checkpoint.format.shards import parse_header
from moec.runtime.checkpoint.model_fields import differences
from moec.runtime.checkpoint.remarks import first_of
from moec.runtime.errors import JobError
from moec.runtime.huggingface.fit import require_fit
from moec.runtime.huggingface.folder_weights import FolderWeights
from moec.runtime.huggingface.kept import Layout, layout_of, other_files, read_kept, write_kept
from moec.runtime.huggingface.load import num_further_layers, remark_of
from moec.runtime.huggingface.row_blocks import RulesOfRows, box_of_rows, bytes_of, row_blocks
from moec.runtime.huggingface.source_tensors import INDEX, source_tensors
from moec.runtime.huggingface.writer import MAX_FILE_BYTES, File, Writer, dtypes_of


@dataclass(frozen=True, slots=True)
class Transferred:
    """The result of an import or an export: bytes and tensors written, warnings, and tensors that were left out."""

    num_bytes: int
    num_tensors: int
    notes: tuple[Diagnostic, ...] = ()
    left_out: tuple[str, ...] = ()


def import_weights(
    folder: Path, target: Path, version: str, plan: Plan | None = None, advance: Advance = no_progress
) -> Transferred:
    """Writes the checkpoint `target` of step 0 with the weights of a Hugging Face folder, in fp32.

    It loads under any plan of the model. Beside the weights it keeps the folder's other files (config, tokenizer) and
    the layout of the weights' files. Warns of a `plan` whose model has the config's parameters but computes something
    else.

    Raises `DiagnosticError`: those of `read_config`; MOE0905, MOE0906, MOE0907 for files and tensors, MOE0908 for a
    plan with other parameters, MOE0803 and MOE0804 for the target. Nothing is left at `target` then.
    """
    imported = read_config(folder)
    notes = imported.notes
    plan = plan or plan_of(imported.spec, version)
    shapes = shapes_of(plan)
    remark = remark_of(imported, plan.spec.model, shapes, str(folder))
    if remark:
        notes = (*notes, _warning("MOE0904", remark))
    try:
        weights = FolderWeights(folder, imported, shapes, plan.spec.model)
    except DiagnosticError as error:
        raise (JobError("MOE0908", remark, error.diagnostics[0].help) if remark else error) from error
    tensors = [NewTensor(name, shape, _content(name, shape, weights)) for name, shape in sorted(weights.shapes.items())]
    num_bytes = write_new(target, plan, version, tensors, lambda into: write_kept(folder, into), advance)
    return Transferred(num_bytes, len(tensors), notes, weights.left_out)


def _warning(code: str, message: str) -> Diagnostic:
    return diagnose(code, None, message, severity=Severity.WARNING)


def plan_of(spec: Spec, version: str) -> Plan:
    """A plan of the model for one process."""
    return make_plan(spec, compile_program(spec).program, version)


def _content(name: str, shape: tuple[int, ...], weights: FolderWeights) -> Iterator[memoryview]:
    """The bytes of a whole parameter in fp32, block by block."""
    for rows in row_blocks(shape):
        yield bytes_of(weights.rows(name, rows))


def export_weights(
    source: Path,
    target: Path,
    version: str,
    *,
    like: Path | None = None,
    plan: Plan | None = None,
    model_type: str | None = None,
    advance: Advance = no_progress,
) -> Transferred:
    """Writes the model of a checkpoint, imported or trained, as the new folder `target` that transformers loads.

    The config is that of the folder `like`, or the one that the checkpoint keeps, or that of the plan's model. With the
    first two come the other files, and their layout and dtypes of the weights' files: an import and an export give back
    the same bytes. With a plan alone the weights have its model's dtype. Online biases and `keep_in_fp32` are written
    in fp32, even if `like` has them narrower. `model_type` is the architecture to write; it also replaces the one that
    the checkpoint keeps.

    Warns if the checkpoint's model computes something else from tensors of the same shapes: the exported model is then
    not the one that was trained.

    Raises `DiagnosticError`: MOE0800 to MOE0802 for the checkpoint, MOE0805 for one of another model, MOE0905 to
    MOE0907 for files and tensors of `like`, MOE0908 if the architecture is unknown or not the plan's, MOE0909 for the
    target, and those of `read_config`; then there is nothing at `target`.
    """
    checkpoint = Checkpoint(source)
    folder_format = _folder_format(source, like, plan, model_type)
    plan = plan or plan_of(folder_format.spec, version)
    shapes = shapes_of(plan)
    _require_tensors(checkpoint, shapes, folder_format)
    notes = (*folder_format.notes, *_other_mathematics(checkpoint, folder_format.spec))
    rules = {rule.name: rule for rule in folder_format.family.rules(plan.spec.model, folder_format.dtypes or None)}
    if like is not None:
        stored = source_tensors(like)
        theirs = folder_format.family.rules(plan.spec.model, stored)
        require_fit(folder_format.family, theirs, shapes, stored, str(like), num_further_layers(folder_format.config))
    wanted = [
        rule for name, rule in rules.items() if (name in folder_format.dtypes if folder_format.dtypes else rule.written)
    ]
    left_out = tuple(name for name in folder_format.dtypes if name not in rules)
    dtypes = {**dtypes_of(wanted, folder_format.dtype, plan.program), **folder_format.dtypes}
    if like is not None:  # trained fp32 values are not rounded to the dtype in `like`
        narrow = dtypes_of(wanted, torch.bfloat16, plan.program)
        dtypes |= {name: dtype for name, dtype in narrow.items() if dtype == torch.float32}
    same = all(dtypes.get(name) == dtype for name, dtype in folder_format.dtypes.items())
    layout = folder_format.layout if same and not left_out else None
    writer = Writer(target, wanted, shapes, dtypes, MAX_FILE_BYTES, layout)
    try:
        rules_of_rows = RulesOfRows(wanted, shapes)
        for name in sorted(shapes):
            for rows in row_blocks(shapes[name]):
                if block_rules := rules_of_rows.rules(name, rows):
                    block = read_rows(checkpoint, name, rows, shapes[name])
                    for rule in block_rules:
                        writer.write_part(rule, rules_of_rows.parts(name, rows, block, rule))
                    advance(block.numel() * 4)
        beside = dict(folder_format.beside)
        if layout is not None and folder_format.index is not None:
            beside[INDEX] = folder_format.index
        writer.publish(folder_format.config, beside)
    finally:
        writer.discard()
    return Transferred(sum(file.num_bytes for file in writer.files), len(wanted), notes, left_out)


def read_rows(checkpoint: Checkpoint, name: str, rows: range, shape: tuple[int, ...]) -> Tensor:
    """Rows of a parameter; the digests of the blocks that it reads are checked."""
    dtype = DTYPES[checkpoint.index.tensors[MODEL + name].dtype]
    read = torch.empty((len(rows), *shape[1:]) if shape else (), dtype=dtype)
    blocks = checkpoint.blocks(MODEL + name, box_of_rows(shape, rows))
    checkpoint.read(blocks, lambda block, content: copy_block(block, content, dtype, read), check=True)
    return read


@dataclass(frozen=True, slots=True)
class FolderFormat:
    """What an export writes: the architecture's spec and family, its config and other files, and the tensors' dtypes.

    `dtype` is that of tensors that `dtypes` does not name; `layout` and `index` are those of the original folder.
    """

    spec: Spec
    family: Family
    config: Mapping[str, Any]
    dtype: torch.dtype
    beside: Mapping[str, bytes]
    dtypes: Mapping[str, torch.dtype]
    layout: Sequence[File] | None
    index: bytes | None
    notes: tuple[Diagnostic, ...] = ()


def _folder_format(source: Path, like: Path | None, plan: Plan | None, model_type: str | None) -> FolderFormat:
    """The format of the exported folder. Raises `DiagnosticError` MOE0908 if nothing states the architecture."""
    files: tuple[Mapping[str, bytes], Layout] | None
    if like is not None:
        imported = read_config(like)
        source_tensors(like)  # its diagnostics of damaged files
        files = other_files(like), layout_of(like)
    else:
        files = read_kept(source)
        if files is None or model_type is not None:
            return _plan_format(source, plan, model_type)
        imported = read_config(parsed_config(files[0].get(CONFIG, b""), f"{source}/huggingface/{CONFIG}"))
    notes: tuple[Diagnostic, ...] = ()
    if plan is not None and (remark := remark_of(imported, plan.spec.model, shapes_of(plan), str(like or source))):
        notes = (_warning("MOE0904", remark),)
    beside, layout = files
    if imported.inside:
        return _decoder_format(imported, beside, layout, notes)
    dtypes, stored_files = dict[str, torch.dtype](), list[File]()
    for name, header in layout.headers.items():
        tensors = parse_header(name, header)
        dtypes |= {tensor_name: DTYPES[tensor.dtype] for tensor_name, tensor in tensors.items()}
        offsets = {tensor_name: tensor.offset - len(header) for tensor_name, tensor in tensors.items()}
        stored_files.append(File(name, header, offsets, sum(tensor.num_bytes for tensor in tensors.values())))
    dtype = next(iter(dtypes.values()), torch.float32)
    return FolderFormat(
        imported.spec, imported.family, imported.config, dtype, beside, dtypes, stored_files, layout.index, notes
    )


def _decoder_format(
    imported: Imported, beside: Mapping[str, bytes], layout: Layout, notes: tuple[Diagnostic, ...]
) -> FolderFormat:
    """The format of a pure decoder, in the dtype of most tensors, for the decoder of a model of images and text."""
    config, family = config_for(imported.spec)
    num_tensors = Counter(
        tensor.dtype for name, header in layout.headers.items() for tensor in parse_header(name, header).values()
    )
    dtype = DTYPES[num_tensors.most_common(1)[0][0]] if num_tensors else torch.float32
    without = {name: content for name, content in beside.items() if name != CONFIG}
    message = (
        f"only the decoder is exported, as `{family.model_type}`; the other parts of the original model are left out"
    )
    return FolderFormat(
        imported.spec, family, config, dtype, without, {}, None, None, (*notes, _warning("MOE0904", message))
    )


def _plan_format(source: Path, plan: Plan | None, model_type: str | None) -> FolderFormat:
    if plan is None:
        raise JobError(
            "MOE0908",
            f"{source} was not imported from a folder, and does not name its architecture",
            "give `--like DIR`, a folder of the architecture with its tokenizer, or `--plan PLAN`",
        )
    config, family = config_for(plan.spec, model_type)
    return FolderFormat(plan.spec, family, config, COMPUTED[str(plan.spec.model.dtype)], {}, {}, None, None)


def _other_mathematics(checkpoint: Checkpoint, spec: Spec) -> list[Diagnostic]:
    """A warning if the checkpoint's model computes something else than the exported one."""
    different = differences(checkpoint.index.model, spec)
    if not different:
        return []
    return [_warning("MOE0805", f"{checkpoint.path} computes something else: {first_of(different)}")]


def _require_tensors(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], folder_format: FolderFormat
) -> None:
    """Raises `JobError` MOE0805 unless the checkpoint has the model's tensors."""
    there = checkpoint.index.model_tensors
    for name in sorted(shapes.keys() | there.keys()):
        here, stored = shapes.get(name), there.get(name)
        stored_shape = None if stored is None else tuple(stored.shape)
        if here != stored_shape:
            raise JobError(
                "MOE0805",
                f"{checkpoint.path} is not the {folder_format.family.model_type} of this config: {name} is "
                f"{'missing' if stored_shape is None else list(stored_shape)} in the checkpoint, "
                f"{'missing' if here is None else list(here)} in the config's model",
                "export with the folder or the plan of the model that was trained",
            )
