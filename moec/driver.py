"""The functions of `import moec` and of the command line: text → Spec → Program → Plan → job.

Each function imports only the packages that it needs, so that `moec check` is as fast as a linter.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from moec import __version__
from moec.grammar import Loaded, load_file, load_text
from moec.grammar.diagnostics import Diagnostic, DiagnosticError
from moec.grammar.spec import Spec, Train
from moec.runtime import other_names
from moec.runtime.calls import called
from moec.runtime.script import warn
from moec.subject import is_plan, is_text, named, require_plan, require_source, require_world_size

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from moec.codegen.plan import Plan
    from moec.passes.pipeline import Compilation
    from moec.runtime.host.layer import MoeLayer
    from moec.runtime.host.layer_home import Reduction
    from moec.runtime.job.job import Job
    from moec.runtime.model.module import PlanModule
    from moec.runtime.verify.verify_progress import Progress
    from moec.runtime.verify.verify_report import Report


@runtime_checkable
class ConfigObject(Protocol):
    """A config of transformers."""

    def to_dict(self) -> dict[str, Any]:
        """Its keys."""
        ...


Source = str | Path | Spec
"""A path of a `.moe` file, its text (anything with a newline or a brace), or a Spec."""


@called("moec.compile")
def compile(source: Source, *, world_size: int | None = None, **lets: float | str) -> Plan:
    """The plan of a model or a layer; `lets` override the file's `let` constants. A search chooses its open words.

    `world_size` compiles for so many of the cluster's devices instead of all. Raises `DiagnosticError` with every error
    in the file, MOE0750 for a `world_size` below 1, and MOE0751 for a plan.
    """
    from moec.codegen.plan import make_plan
    from moec.codegen.search_report import report_of
    from moec.measured_loads import with_loads
    from moec.open_words import choice_of, compile_chosen
    from moec.passes.place.ranks import for_ranks

    require_source(source, "moec.compile")
    if world_size is not None:
        require_world_size(world_size)
    spec = _overridden(source, lets) if lets else to_spec(source)
    if world_size is not None:
        spec = for_ranks(spec, world_size)
    spec = with_loads(spec, source)
    choice = choice_of(spec)
    program = compile_chosen(spec, choice).program
    return make_plan(choice.chosen.spec if choice else spec, program, __version__, report_of(spec, choice))


@called("moec.load", **other_names.LOAD)
def load(path: str | Path, *, trust_nothing: bool = False) -> Plan:
    """Reads a plan folder; executes nothing of it. `trust_nothing` compiles its Spec again and compares.

    Warns on rank 0 where the `.moe` file beside it has changed since. Raises MOE0751 for a `.moe` file, and `PlanError`
    for an invalid plan and, with `trust_nothing`, for one that differs from its compiled Spec.
    """
    from moec.runtime.script import warn
    from moec.stale import stale

    require_plan(path, "moec.load")
    plan = valid_plan(path, trust_nothing=trust_nothing)
    if os.environ.get("RANK", "0") == "0" and (warning := stale(Path(path), plan)):
        warn(f"{warning.code}: {warning.message}; {warning.help}")
    return plan


def valid_plan(path: str | Path, *, trust_nothing: bool = False) -> Plan:
    """`load` without its warning."""
    from moec.codegen.reading import read_plan

    plan = read_plan(path)
    if trust_nothing:
        _require_same(plan, Path(path))
    return plan


DEPENDS_ON_RANKS = frozenset(
    ("MOE0310", "MOE0311", "MOE0312", "MOE0313", "MOE0318", "MOE0319", "MOE0329", "MOE0330", "MOE0501")
)
"""Codes of files that compile for other numbers of ranks."""


@called("moec.load_for", world_size="the number of ranks comes first: `int(os.environ['WORLD_SIZE'])`")
def load_for(world_size: int, *plans: Plan | Source) -> Plan:
    """The first of `plans` for `world_size` ranks, for jobs that restart on more or fewer of them. Needs no torch.

    A plan or its folder is for as many ranks as it was compiled for. A `.moe` file, its text or a Spec is compiled for
    `world_size`, if its degrees allow it. Raises `DiagnosticError` MOE0810, with a reason for each, if none fits; a
    mistake that has nothing to do with the number of ranks is raised itself, and so is that of the only one.
    """
    from moec.grammar.diagnostics import diagnose
    from moec.runtime.uncaught import show_uncaught_once

    # `moec.launch` installs the hook later: this call comes first.
    show_uncaught_once(int(os.environ.get("RANK") or "0"))
    require_world_size(world_size)
    reasons = []
    for source in plans:
        try:
            plan = _plan_or_none(source) or compile(require_source(source, "moec.load_for"), world_size=world_size)
        except DiagnosticError as error:
            diagnostic = error.diagnostics[0]
            if len(plans) == 1 or diagnostic.code not in DEPENDS_ON_RANKS:
                raise
            reasons.append(f"{named(source)}: {diagnostic.code}, {diagnostic.title}")
            continue
        if plan.world_size == world_size:
            return plan
        reasons.append(f"{named(source)} is for {plan.world_size}")
    reason = "; ".join(reasons) or "none was given"
    message = f"no plan is for {world_size} {'rank' if world_size == 1 else 'ranks'} ({reason})"
    help = f"compile one for a cluster of {world_size}, or start as many processes as a plan has ranks"
    raise DiagnosticError([diagnose("MOE0810", None, message, help=help)])


@called("moec.reference")
def reference(source: Source | Plan, *, seed: int = 0, dtype: torch.dtype | None = None) -> PlanModule | MoeLayer:
    """The unsharded model as a module: `module(tokens).logits`, `module(tokens, labels).loss`. Of a layer: `module(x)`.

    Uses no process group. `source` may also be a plan or its folder: the result is the model that the plan shards.
    `dtype` replaces the file's; with `torch.float64`, parameters and all that is computed are float64.
    """
    from moec.open_words import without_open_words
    from moec.runtime.host.reference import layer_reference, require_dtype
    from moec.runtime.host.reference import reference as build

    require_dtype(dtype)
    plan = _plan_or_none(source)
    spec = plan.spec if plan is not None else without_open_words(to_spec(require_source(source, "moec.reference")))
    make = build if spec.has_model else layer_reference
    return make(spec, seed=seed, dtype=dtype)


@called("moec.layer")
def layer(
    source: Source | Plan,
    group: ProcessGroup | None = None,
    *,
    reduction: Reduction = "mean",
    seed: int = 0,
    device: str | torch.device | None = None,
) -> MoeLayer:
    """The mixture of a `layer` file as an `nn.Module` for a plain PyTorch model: `[…, dim] → […, dim]`, `.aux_loss`.

    `source` is a `.moe` file, its text, a Spec, or a plan for as many ranks as there are. Experts are sharded
    over `group`, by default over all ranks of `torch.distributed`; a single process has all experts. Make the process
    group first: under one of several ranks, the forward pass of a layer made without it is refused (MOE0745).
    `reduction` is how the host reduces gradients over ranks: "mean" (DistributedDataParallel, `fully_shard`) or "sum".
    The host must not reduce `expert_parameters`. Layers with the same `seed` have the same initial values. Parameters
    are made on `device`, by default torch's default device.

    Raises the same `DiagnosticError` on every rank for degrees that do not divide the ranks.
    """
    from moec.runtime.errors import require_one_of
    from moec.runtime.host.layer_home import make_layer, ranks_of, require_layer

    require_one_of("moec.layer", "reduction", reduction, ("mean", "sum"))
    ranks = ranks_of(group)
    plan = _plan_or_none(source)
    if plan is None:
        spec = to_spec(require_source(source, "moec.layer"))
        require_layer(spec)
        # The host chooses batches, sequences and the optimizer; what is frozen stays.
        frozen = spec.train.frozen if spec.train else ()
        train = Train(batch=len(ranks), sequence=1, frozen=frozen) if frozen else None
        plan = compile(spec.replace(train=train), world_size=len(ranks))
    return make_layer(plan, group, reduction, seed=seed, device=device)


@called("moec.verify", **other_names.VERIFY)
def verify(plan: Plan | str | Path, *, scale: bool | None = None, progress: Progress | None = None) -> Report:
    """Compares a plan with the unsharded model or layer on a virtual cluster, in float64 and in the plan's dtype.

    `scale` uses toy widths; the default does so only for a plan too large for this machine. `progress` is called with
    what runs now, the steps done and the steps in all.
    """
    from moec.runtime.verify.verification import verify as run

    return run(_plan(plan, "moec.verify"), scale=scale, progress=progress or (lambda step, done, total: None))


@called("moec.launch", **other_names.LAUNCH)
def launch(
    plan: Plan | str | Path,
    *,
    device: str | None = None,
    check_replicas: int = 0,
    timeout: float = 100.0,
    checks: Literal["all", "first", "none"] = "first",
    on_nonfinite: Literal["raise", "skip", "ignore"] = "raise",
    choices: str | Path | None = None,
) -> Job:
    """This process as one rank of a plan: `with moec.launch(plan) as job`. Reads torchrun's environment.

    `device` is "cuda" or "cpu"; by default "cuda" if torch finds a GPU. `check_replicas=N` compares
    replicated parameters at the start of every N-th step (0: never). `timeout`: seconds that a collective may take
    before the job ends with MOE0705, which names the rank that blocks it.

    `checks`: the forward passes that check values on the device (ids out of range, router logits that are not finite,
    different tokens or losses on ranks that share sequences): all, the first of each kind (training, evaluation, with
    labels or without), or none. Dtypes and shapes are always checked. On CPU "first" means "all".

    `on_nonfinite`: what a loss, gradient or gradient norm that is NaN or infinite does before an optimizer reads it: it
    raises `JobError` on every rank, or the step changes no weight and training goes on, or it is not checked.

    `choices`: a file of JSON lines, of a plan with `adapt`. What is chosen for the first model is added to it; steps
    that it has already repeat what it says.
    """
    from moec.runtime.job.job import Job

    loaded = _plan(plan, "moec.launch")
    if not loaded.spec.has_model:
        from moec.runtime.errors import JobError

        raise JobError(
            "MOE0721",
            f"{loaded.name} is a layer, but `moec.launch` trains models",
            "use `moec.layer`, which makes a module for a plain PyTorch model",
        )
    return Job(loaded, device, check_replicas, timeout, checks, on_nonfinite, choices)


@called("moec.from_hf")
def from_hf(source: str | Path | Mapping[str, Any] | ConfigObject) -> Spec:
    """The Spec of a model of Hugging Face: a folder with a `config.json`, such a file, its dict, or a config object of
    transformers. Needs no torch.

    Its cluster is one CPU process, and it says nothing of training: `spec.replace(cluster=…, train=…)` does, or the
    file that `moec import hf` writes. Warns (`UserWarning`) of keys that are not imported. Nothing of a folder is
    executed. Raises `DiagnosticError`: MOE0900 where there is no config, MOE0901 for an unknown architecture, MOE0902
    and MOE0903 for keys that are wrong, or that moec cannot express.
    """
    from moec.grammar.huggingface.read import read_config

    imported = read_config(source.to_dict() if isinstance(source, ConfigObject) else source)
    for note in imported.notes:
        warn(f"{note.code}: {note.message}")
    return imported.spec


def to_spec(source: Source, **lets: float | str) -> Spec:
    """The Spec of a path, a text or a Spec. Raises `DiagnosticError`."""
    if isinstance(source, Spec):
        return source
    loaded = read(source, **lets)
    if loaded.spec is None:
        raise DiagnosticError(loaded.diagnostics)
    return loaded.spec


def read(source: str | Path, **lets: float | str) -> Loaded:
    """The Spec of a file or text, with every diagnostic, warnings included."""
    if isinstance(source, str) and is_text(source):
        return load_text(source, lets=lets)
    return load_file(source, lets=lets)


def check(path: str | Path, **lets: float | str) -> tuple[Diagnostic, ...]:
    """Every error in a file, including those of its degrees. Needs no torch."""
    return check_loaded(read(Path(path), **lets))


def check_text(data: bytes | str, name: str, folder: Path, lets: Mapping[str, float | str]) -> tuple[Diagnostic, ...]:
    """Every error in the text of the file `name`, which uses files beside `folder`. Needs no torch."""
    from moec.grammar.load import load_bytes

    return check_loaded(load_bytes(data.encode() if isinstance(data, str) else data, name, lets, folder))


def check_loaded(loaded: Loaded) -> tuple[Diagnostic, ...]:
    """Every error in a loaded file, including those of its degrees. Needs no torch."""
    from moec.open_words import problems

    return loaded.diagnostics if loaded.spec is None else (*loaded.diagnostics, *problems(loaded.spec))


def run_passes(spec: Spec, stop_after: str | None = None) -> Compilation:
    """The passes on `spec`, which leaves no word open, with the record of each."""
    from moec.passes.pipeline import compile_program

    return compile_program(spec, stop_after)


def _plan_or_none(source: object) -> Plan | None:
    """The plan, or the plan of a folder; None for everything else, which may be compiled."""
    from moec.codegen.plan import Plan as PlanClass

    if isinstance(source, PlanClass):
        return source
    if not isinstance(source, str | Path) or (isinstance(source, str) and is_text(source)):
        return None
    return load(source) if is_plan(Path(source)) else None


def _plan(plan: Plan | str | Path, call: str) -> Plan:
    """A plan, or the plan of a folder. Raises MOE0751 for what `call` cannot take."""
    require_plan(plan, call)
    return load(plan) if isinstance(plan, str | Path) else plan


def _overridden(source: Source, lets: Mapping[str, object]) -> Spec:
    """The Spec with arguments of `moec.compile` for its `let`s; errors name the arguments."""
    from moec.let_arguments import as_arguments, texts_of

    if isinstance(source, Spec):
        from moec.runtime.errors import wrong_argument

        help = "`spec.replace(…)` changes a Spec; or compile the file with these arguments"
        raise wrong_argument(f"a Spec has no `let` for {', '.join(lets)}: its constants are replaced", help)
    loaded = read(source, **texts_of(lets))
    if loaded.spec is None:
        raise DiagnosticError(as_arguments(loaded.diagnostics))
    return loaded.spec


def _require_same(plan: Plan, path: Path) -> None:
    """Requires that compiling the plan's Spec gives the same plan, but for spans and measured tiles."""
    from moec.codegen.folder import PROGRAM
    from moec.codegen.reading import refuse

    recompiled = compile(plan.spec)
    if recompiled.spec_text != plan.spec_text or recompiled.program != plan.program:
        raise refuse(path / PROGRAM, "compiling the Spec inside the plan gives another Program")
