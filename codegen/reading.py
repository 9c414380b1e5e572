"""Reads a plan folder and refuses any byte that `folder.py` would not write. It executes and unpickles nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple

from moec.codegen.folder import MANIFEST, PROGRAM, REPORT, SPEC, TILES, PlanError, canonical, digest, plan_files
from moec.codegen.plan import FORMAT, Plan, groups_of, parameters_of
from moec.grammar import to_text
from moec.grammar.diagnostics import DiagnosticError, InternalError
from moec.grammar.stated import OPEN_WORDS, open_words
from moec.passes.ir import IrError, Program
from moec.passes.ir.interface import forwards, result_role
from moec.passes.ir.ops import Capacity
from moec.passes.ir.texts.parse import parse_program
from moec.passes.ir.verifier import check_program
from moec.passes.lower.lower_model import lower

if TYPE_CHECKING:
    from moec.codegen.kernels.stored_tiles import StoredTiles
    from moec.codegen.search_report import SearchReport

MAX_FILE_BYTES = 64 * 1024 * 1024
"""A larger file is refused unread. A Program of 1,000 distinct layers has about 20 MB."""

MAX_VERSION_LENGTH = 100
"""Characters of a version of moec."""


class Manifest(NamedTuple):
    """The content of `plan.json`. Its digests and groups are compared with those of the other files."""

    moec: str
    groups: object
    files: Mapping[str, object]


def read_plan(path: str | Path) -> Plan:
    """Reads a plan folder.

    Raises `PlanError` for anything that is not, byte for byte, what `write_plan` wrote: a truncated or edited file, a
    digest that does not match, a Program that breaks a rule of its ops, a newer format.
    """
    root = Path(path)
    manifest = _manifest(root / MANIFEST)
    program = _program(root / PROGRAM, _listed(root, PROGRAM, manifest.files))
    groups = groups_of(program)
    if manifest.groups != {name: [list(ranks) for ranks in lists] for name, lists in groups.items()}:
        raise refuse(root / MANIFEST, "its groups are not those of the Program's meshes")
    # A file that plan.json does not list is refused: if it were ignored, a user would think that it is in use.
    has = {name: name in manifest.files or (root / name).exists() for name in (TILES, REPORT)}
    tiles = _tiles(root / TILES, _listed(root, TILES, manifest.files)) if has[TILES] else None
    report = _report(root / REPORT, _listed(root, REPORT, manifest.files)) if has[REPORT] else None
    spec = _text(root / SPEC, _listed(root, SPEC, manifest.files))
    plan = Plan(manifest.moec, spec, program, groups, tiles, report)
    _require_consistent(root, plan)
    for name, expected in plan_files(plan).items():
        if _read(root / name) != expected:
            raise refuse(root / name, "it is not what moec writes for this plan")
    return plan


def refuse(path: Path, message: str) -> PlanError:
    """The error for a file that is not as moec writes it."""
    return PlanError("MOE0601", path, message, "compile the .moe file again")


def _program(path: Path, content: bytes) -> Program:
    try:
        program = parse_program(_text(path, content))
    except IrError as error:
        raise refuse(path, str(error)) from error
    try:
        check_program(program)
    except InternalError as error:
        raise refuse(path, str(error)) from error
    return program


def _require_consistent(root: Path, plan: Plan) -> None:
    """Requires a canonical Spec that compiles and has the Program's parameters and states, and tiles of its kernels."""
    try:
        spec = plan.spec
    except DiagnosticError as error:
        raise refuse(root / SPEC, f"it does not compile: {error.diagnostics[0].message}") from error
    if to_text(spec) != plan.spec_text:
        raise refuse(root / SPEC, "it is not the canonical text of a Spec")
    if words := open_words(spec):
        raise refuse(root / SPEC, f"it leaves `{words[0]}` open")
    if spec.subject.name != plan.name:
        raise refuse(root / SPEC, "it is of another model than the Program")
    if result_role(plan.program) != ("logits" if spec.has_model else "residual"):
        raise refuse(root / PROGRAM, "forward does not give what the Spec says")
    declared, stated = _declared(lower(spec)), _declared(plan.program)
    for name in declared | stated:
        if declared.get(name) != stated.get(name):
            raise refuse(root / PROGRAM, f"its {name} is not that of the Spec")
    if plan.tiles is not None:
        _require_known(root / TILES, plan, plan.tiles)


def _tiles(path: Path, content: bytes) -> StoredTiles:
    from pydantic import ValidationError

    from moec.codegen.data import first_fault
    from moec.codegen.kernels.stored_tiles import StoredTiles

    _strict_json(path, content)
    try:
        return StoredTiles.model_validate_json(content)
    except ValidationError as error:
        raise refuse(path, first_fault(error)) from error
    except RecursionError as error:
        raise refuse(path, "it is nested too deeply") from error


def _report(path: Path, content: bytes) -> SearchReport:
    from pydantic import TypeAdapter, ValidationError

    from moec.codegen.data import first_fault
    from moec.codegen.search_report import SearchReport

    _strict_json(path, content)
    try:
        report: SearchReport = TypeAdapter(SearchReport).validate_json(content)
    except ValidationError as error:
        raise refuse(path, first_fault(error)) from error
    words = {word for plan in (report.chosen, *report.runners_up) for word in plan.words}
    if unknown := (words | {value.word for value in report.unused}) - {*OPEN_WORDS, "virtual"}:
        raise refuse(path, f"no search chooses `{min(unknown)[:50]}`")
    return report


def _require_known(path: Path, plan: Plan, tiles: StoredTiles) -> None:
    """Requires that the plan has the products whose tiles are stored."""
    from moec.codegen.kernels.plan_kernels import products_of

    foreign = sorted(map(str, tiles.by_key().keys() - {product.key for product in products_of(plan)}))
    if foreign:
        raise refuse(path, f"it has tiles for {foreign[0]}, which the plan does not have")


def _declared(program: Program) -> dict[str, tuple[object, ...]]:
    """The properties that lowered and placed Programs share: parameters and their order, states, capacities.

    `moec verify` runs short sequences, on which two capacities may have the same places.
    """
    parameters = {
        f"parameter {n}": (p.shape, p.dtype, p.init, p.decays, p.frozen, p.matrices)
        for n, p in parameters_of(program).items()
    }
    states = {f"state {n}": (s.shape, s.dtype, s.init) for n, s in program.states.items()}
    stated: dict[str, tuple[object, ...]] = {}
    for block_name, blocks in [
        ("forward", forwards(program)),
        *((f"layer {layer.number}", [program.body(layer)]) for layer in program.layers),
    ]:
        names = dict.fromkeys(p.name for block in blocks for p in block.parameters)
        stated[f"order of the parameters of {block_name}"] = tuple(names)
        capacities = {tuple(op.capacity().items()) for block in blocks for op in block.ops if isinstance(op, Capacity)}
        stated[f"capacity of {block_name}"] = tuple(sorted(capacities))
    return parameters | states | stated


def _manifest(path: Path) -> Manifest:
    content = _read(path)
    data = _strict_json(path, content)
    if not isinstance(data, dict):
        raise refuse(path, "it is not a JSON object")
    if data.get("format") != FORMAT:
        spec, advice = path.parent / SPEC, "compile the .moe file again with this moec"
        if spec.exists():
            advice = f"`moec compile {quote(str(spec))} -o {quote(str(path.parent))}` compiles it again"
        raise PlanError(
            "MOE0602",
            path,
            f"format {str(data.get('format'))[:20]}, this moec reads format {FORMAT}",
            f"{advice}, or use the moec that wrote it",
        )
    stated = data.pop("digest", None)
    if stated != digest(canonical(data)):
        raise refuse(path, "its digest does not match its content")
    if sorted(data) != ["files", "format", "groups", "moec"]:
        raise refuse(path, "it does not have the fields of a plan.json")
    version, files = data["moec"], data["files"]
    if not isinstance(version, str) or len(version) > MAX_VERSION_LENGTH or not isinstance(files, dict):
        raise refuse(path, "its `moec` is no version, or its `files` are no files")
    return Manifest(version, data["groups"], files)


def _listed(root: Path, name: str, digests: Mapping[str, object]) -> bytes:
    """The content of a file, which must match its digest in plan.json."""
    file = root / name
    if not file.exists():
        raise refuse(file, "it is missing")
    content = _read(file)
    if digest(content) != digests.get(name):
        raise refuse(file, "its digest does not match plan.json")
    return content


def _read(path: Path) -> bytes:
    try:
        if path.is_symlink():
            raise refuse(path, "it is a link")
        if path.exists() and not path.is_file():
            raise refuse(path, "it is no file")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise refuse(path, f"it is larger than {MAX_FILE_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise PlanError("MOE0600", path, str(error.strerror), "`moec compile FILE -o DIR` writes one") from error


def _text(path: Path, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise refuse(path, "it is not UTF-8") from error


def _strict_json(path: Path, content: bytes) -> Any:
    from moec.codegen.data import strict_json

    try:
        return strict_json(content)
    except ValueError as error:
        raise refuse(path, f"it is not JSON ({str(error)[:100]})") from error
