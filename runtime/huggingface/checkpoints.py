"""Weights of Hugging Face as a checkpoint of moec, and back: streamed, through bounded memory, on one process."""

from __future__ import annotations

import math
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
from moec.runtime.checkpoint.format.parts import DTYPES
from moec.runtime.checkpoint.format.reading import Checkpoint
from moec.runtime.checkpoint.format.shards import parse_header
from moec.runtime.checkpoint.model_fields import differences
from moec.runtime.checkpoint.remarks import first_of
from moec.runtime.errors import JobError
from moec.runtime.huggingface.fit import require_fit
from moec.runtime.huggingface.folder_weights import FolderWeights
from moec.runtime.huggingface.kept import Layout, carried, keep, kept_in, layout_of
from moec.runtime.huggingface.load import further_layers, remark_of
from moec.runtime.huggingface.slabs import Slabs, slab_bytes, slabs_of
from moec.runtime.huggingface.stored import INDEX, stored_in
from moec.runtime.huggingface.writer import MOST_BYTES, File, Writer, dtypes_of


@dataclass(frozen=True, slots=True)
class Moved:
    """What an import or an export has done: bytes and tensors written, warnings, tensors that were left out."""

    num_bytes: int
    num_tensors: int
    notes: tuple[Diagnostic, ...] = ()
    left_out: tuple[str, ...] = ()


def import_weights(
    folder: Path, target: Path, version: str, plan: Plan | None = None, advance: Advance = no_progress
) -> Moved:
    """Writes the checkpoint `target` of step 0 with the weights of a Hugging Face folder, in fp32.

    It loads under any plan of the model. Beside the weights it keeps the folder's other files (config, tokenizer), and
    how the weights lie in their files. A `plan` whose model computes otherwise than the config says, from the same
    parameters, is a warning.

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
    num_bytes = write_new(target, plan, version, tensors, lambda into: keep(folder, into), advance)
    return Moved(num_bytes, len(tensors), notes, weights.left_out)


def _warning(code: str, message: str) -> Diagnostic:
    return diagnose(code, None, message, severity=Severity.WARNING)


def plan_of(spec: Spec, version: str) -> Plan:
    """A plan of the model for one process."""
    return make_plan(spec, compile_program(spec).program, version)


def _content(name: str, shape: tuple[int, ...], weights: FolderWeights) -> Iterator[memoryview]:
    """The bytes of a whole parameter in fp32, slab by slab."""
    for rows in slabs_of(shape):
        yield slab_bytes(weights.rows(name, rows))


def export_weights(
    source: Path,
    target: Path,
    version: str,
    *,
    like: Path | None = None,
    plan: Plan | None = None,
    model_type: str | None = None,
    advance: Advance = no_progress,
) -> Moved:
    """Writes the model of a checkpoint, imported or trained, as the new folder `target` that transformers loads.

    The config is that of the folder `like`, or the one that the checkpoint keeps, or of the plan's model. Of the first
    two the other files come along, and the weights lie in files as theirs do, in their dtypes: an import and an export
    give back the same bytes. Weights of a plan alone are in its model's dtype. Online biases, and what the model keeps
    in fp32, are fp32, also where they are not in `like`. `model_type` is the architecture that its model is written as,
    also in place of the one that the checkpoint keeps.

    A checkpoint of a model that computes otherwise, from tensors of the same shapes, is a warning: what is exported is
    then another model than the one that was trained.

    Raises `DiagnosticError`: MOE0800 to MOE0802 for the checkpoint, MOE0805 for one of another model, MOE0905 to
    MOE0907 for files and tensors of `like`, MOE0908 where nothing says the architecture or it is not the plan's,
    MOE0909 for the target, and those of `read_config`; nothing is left at `target` then.
    """
    checkpoint = Checkpoint(source)
    origin = _origin(source, like, plan, model_type)
    plan = plan or plan_of(origin.spec, version)
    shapes = shapes_of(plan)
    _require_tensors(checkpoint, shapes, origin)
    notes = (*origin.notes, *_other_mathematics(checkpoint, origin.spec))
    found = origin.family.rules(plan.spec.model, origin.names)
    if like is not None:
        stored = stored_in(like)
        theirs = origin.family.rules(plan.spec.model, stored)
        require_fit(origin.family, theirs, shapes, stored, str(like), further_layers(origin.config))
    rules = {rule.name: rule for rule in found}
    wanted = [rule for name, rule in rules.items() if (name in origin.dtypes if origin.dtypes else rule.written)]
    left_out = tuple(name for name in origin.dtypes if name not in rules)
    dtypes = {**dtypes_of(wanted, origin.dtype, plan.program), **origin.dtypes}
    if like is not None:  # what has trained since is not rounded to what a folder like it has
        narrow = dtypes_of(wanted, torch.bfloat16, plan.program)
        dtypes |= {name: dtype for name, dtype in narrow.items() if dtype == torch.float32}
    same = all(dtypes.get(name) == dtype for name, dtype in origin.dtypes.items())
    layout = origin.layout if same and not left_out else None
    writer = Writer(target, wanted, shapes, dtypes, MOST_BYTES, layout)
    try:
        slabs = Slabs(wanted, shapes)
        for name in sorted(shapes):
            for rows, of_slab in slabs.of(name):
                if of_slab:
                    slab = read_rows(checkpoint, name, rows, shapes[name])
                    for rule in of_slab:
                        writer.write_part(rule, slabs.parts(name, rows, slab, rule))
                    advance(slab.numel() * 4)
        beside = dict(origin.beside)
        if layout is not None and origin.index is not None:
            beside[INDEX] = origin.index
        writer.publish(origin.config, beside)
    finally:
        writer.discard()
    return Moved(sum(file.num_bytes for file in writer.files), len(wanted), notes, left_out)


def read_rows(checkpoint: Checkpoint, name: str, rows: range, shape: tuple[int, ...]) -> Tensor:
    """Rows of a parameter, each block of them checked."""
    entry = checkpoint.index.tensors[MODEL + name]
    box = ((rows.start, rows.stop), *((0, dim) for dim in shape[1:])) if shape else ()
    slab = torch.empty((len(rows), *shape[1:]) if shape else (), dtype=DTYPES[entry.dtype])

    def place(block: Any, content: memoryview) -> None:
        flat = torch.frombuffer(content, dtype=slab.dtype)
        for part in block.copies:
            whole = flat[part.first : part.first + math.prod(part.shape)].view(part.shape)
            slab[part.target] = whole[part.source]

    checkpoint.read(checkpoint.blocks(MODEL + name, box), place, check=True)
    return slab


@dataclass(frozen=True, slots=True)
class Origin:
    """What says an export's architecture: the spec and its family, and what comes along with it."""

    spec: Spec
    family: Family
    config: Mapping[str, Any]
    dtype: torch.dtype
    beside: Mapping[str, bytes]
    dtypes: Mapping[str, torch.dtype]
    layout: Sequence[File] | None
    index: bytes | None
    notes: tuple[Diagnostic, ...] = ()

    @property
    def names(self) -> Mapping[str, torch.dtype] | None:
        """The tensors' names in the folder that it is like, which say how experts are spelt."""
        return self.dtypes or None


def _origin(source: Path, like: Path | None, plan: Plan | None, model_type: str | None) -> Origin:
    """Where the config comes from. Raises `DiagnosticError` MOE0908 where it comes from nowhere."""
    files: tuple[Mapping[str, bytes], Layout] | None
    if like is not None:
        imported = read_config(like)
        stored_in(like)  # its diagnostics of damaged files
        files = carried(like), layout_of(like)
    else:
        files = kept_in(source)
        if files is None or model_type is not None:
            return _of_plan(source, plan, model_type)
        imported = read_config(parsed_config(files[0].get(CONFIG, b""), f"{source}/huggingface/{CONFIG}"))
    notes: tuple[Diagnostic, ...] = ()
    if plan is not None and (remark := remark_of(imported, plan.spec.model, shapes_of(plan), str(like or source))):
        notes = (_warning("MOE0904", remark),)
    beside, layout = files
    if imported.inside:
        return _of_decoder(imported, beside, layout, notes)
    dtypes, laid = dict[str, torch.dtype](), list[File]()
    for name, header in layout.headers.items():
        places = parse_header(name, header)
        dtypes |= {each: DTYPES[place.dtype] for each, place in places.items()}
        offsets = {each: place.offset - len(header) for each, place in places.items()}
        laid.append(File(name, header, offsets, sum(place.num_bytes for place in places.values())))
    dtype = next(iter(dtypes.values()), torch.float32)
    return Origin(imported.spec, imported.family, imported.config, dtype, beside, dtypes, laid, layout.index, notes)


def _of_decoder(
    imported: Imported, beside: Mapping[str, bytes], layout: Layout, notes: tuple[Diagnostic, ...]
) -> Origin:
    """The decoder of a model of images and text by itself, with the tokenizer's files, in the dtype of most tensors."""
    config, family = config_for(imported.spec)
    found = Counter(
        place.dtype for name, header in layout.headers.items() for place in parse_header(name, header).values()
    )
    dtype = DTYPES[found.most_common(1)[0][0]] if found else torch.float32
    without = {name: content for name, content in beside.items() if name != CONFIG}
    said = f"only the decoder is exported, as `{family.model_type}`; the other parts of the original model are left out"
    return Origin(imported.spec, family, config, dtype, without, {}, None, None, (*notes, _warning("MOE0904", said)))


def _of_plan(source: Path, plan: Plan | None, model_type: str | None) -> Origin:
    if plan is None:
        raise JobError(
            "MOE0908",
            f"{source} was not imported from a folder, and does not name its architecture",
            "give `--like DIR`, a folder of the architecture with its tokenizer, or `--plan PLAN`",
        )
    config, family = config_for(plan.spec, model_type)
    return Origin(plan.spec, family, config, COMPUTED[str(plan.spec.model.dtype)], {}, {}, None, None)


def _other_mathematics(checkpoint: Checkpoint, spec: Spec) -> list[Diagnostic]:
    """A warning where the checkpoint's model computes otherwise than the one that is exported."""
    found = differences(checkpoint.index.model, spec)
    if not found:
        return []
    return [_warning("MOE0805", f"{checkpoint.path} computes something else: {first_of(found)}")]


def _require_tensors(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], origin: Origin) -> None:
    """Raises `JobError` MOE0805 unless the checkpoint has the model's tensors."""
    there = {n.removeprefix(MODEL): e for n, e in checkpoint.index.tensors.items() if n.startswith(MODEL)}
    for name in sorted(shapes.keys() | there.keys()):
        here, stored = shapes.get(name), there.get(name)
        said = None if stored is None else tuple(stored.shape)
        if here != said:
            raise JobError(
                "MOE0805",
                f"{checkpoint.path} is not the {origin.family.model_type} of this config: {name} is "
                f"{'missing' if said is None else list(said)} in the checkpoint, "
                f"{'missing' if here is None else list(here)} in the config's model",
                "export with the folder or the plan of the model that was trained",
            )
