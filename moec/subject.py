"""Tells `.moe` files, their texts, Specs and plans apart, and raises the error where a call needs another of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from moec.codegen.unknown_names import UnknownNameError, unknown_name
from moec.grammar.diagnostics import DiagnosticError, diagnose
from moec.grammar.folder_kinds import PLAN, PLAN_TEXT, command_for, in_words, kind_of, listed
from moec.grammar.spec import Spec
from moec.grammar.suggest import nearest
from moec.runtime.errors import CallError
from moec.runtime.uncaught import show_uncaught

if TYPE_CHECKING:
    from moec.codegen.plan import Plan


def is_text(source: str) -> bool:
    """Whether this is the text of a `.moe` file, and not a path."""
    return "\n" in source or "{" in source


def is_plan(path: Path) -> bool:
    """Whether this is the folder of a plan."""
    return kind_of(path) == "plan"


# ---- names of Python -----------------------------------------------------------------------------

OTHER_NAMES = {
    "initialize": "`moec.launch(plan)` makes a job, and `job.build()` its model",
    "init": "`moec.launch(plan)` makes a job, and `job.build()` its model",
    "from_pretrained": "`moec import hf FOLDER` makes a `.moe` file, and `moec.load_hf` reads the weights",
    "save": "a plan is saved by `plan.save(path)`, a model by `job.save(path, model)`",
    "Trainer": "your script trains: `moec.launch(plan)` makes a job, and `job.step` is a step",
    "train": "your script trains: `moec.launch(plan)` makes a job, and `job.step` is a step",
}
"""The calls of moec in place of functions that other libraries have."""


def no_function(name: str, known: Iterable[str]) -> UnknownNameError:
    """The error for the attribute `name`, which `moec` does not have; it has those of `known`."""
    show_uncaught()
    return unknown_name("moec", name, known, OTHER_NAMES)


# ---- calls of Python -----------------------------------------------------------------------------


def require_source(source: object, call: str) -> str | Path | Spec:
    """The source, which `call` can compile: a path or text of a `.moe` file, or a Spec. Raises `CallError`."""
    if isinstance(source, Spec):
        return source
    if not isinstance(source, str | Path):
        if _is_loaded(source):
            raise _wrong(f"this is a plan already, and `{call}` compiles a file or a Spec", "use the plan as it is")
        ways = "give it a path or the text of a `.moe` file, or a Spec"
        if isinstance(source, Mapping) or hasattr(source, "to_dict"):
            ways = f"a config of Hugging Face: `{call}(moec.from_hf(config))`"
        raise _wrong(f"`{call}` got {_named(source)}", ways)
    if isinstance(source, str) and is_text(source):
        return source
    path = Path(source)
    kind = kind_of(path)
    if kind is None:
        return source
    way_of = {
        "plan": f"`moec.load({str(path)!r})` reads it; its file is {path / PLAN_TEXT}",
        "hugging face": f"`{call}(moec.from_hf({str(path)!r}))` compiles its model",
        "checkpoint": "compile the file of its model",
    }
    reason = ": it is compiled already" if kind == "plan" else ", not a `.moe` file"
    raise _wrong(f"`{path}` is {in_words(kind)}{reason}", way_of[kind])


def require_plan(source: object, call: str) -> None:
    """Raises `CallError` unless this is a path of a plan's folder, or a Plan (which `moec.load` refuses)."""
    if isinstance(source, Spec):
        raise _wrong(f"this is a Spec, and `{call}` wants a plan", _compiled(call, "spec"))
    if _is_loaded(source):
        if call == "moec.load":
            raise _wrong("this is a plan already, and `moec.load` reads one from a folder", "use the plan as it is")
        return
    if not isinstance(source, str | Path):
        ways = "give it the path of a plan's folder" + ("" if call == "moec.load" else ", or a Plan")
        raise _wrong(f"`{call}` got {_named(source)}", ways)
    if isinstance(source, str) and is_text(source):
        raise _wrong(f"this is the text of a `.moe` file, and `{call}` wants a plan", _compiled(call, "text"))
    path = Path(source)
    if is_plan(path):
        return
    if path.suffix == ".moe" and path.is_file():
        raise _wrong(f"`{path}` is a `.moe` file, and `{call}` wants a plan", _compiled(call, repr(str(path))))
    raise _no_plan(path)


def _compiled(call: str, subject: str) -> str:
    """A help: the call that compiles a file, a text or a Spec for `call`."""
    if call == "moec.load":
        return f"`moec.compile({subject})` makes its plan"
    return f"compile it: `{call}(moec.compile({subject}))`"


# ---- commands ------------------------------------------------------------------------------------


def require_plan_folder(path: Path, command: str, then: str = "") -> None:
    """Raises `DiagnosticError` for anything but a plan's folder. `then`: the command to run on the plan, with `{}`."""
    if is_plan(path):
        return
    if path.suffix == ".moe" and path.is_file():
        after = (then or f"{command} {{}}").format(quote(f"{path.stem}.plan"))
        help = f"compile it first: `moec compile {quote(str(path))}`, then `{after}`"
        raise _refused(f"`{path}` is a `.moe` file, and `{command}` wants a plan", help)
    if (kind := kind_of(path)) is not None:
        raise _refused(f"`{path}` is {in_words(kind)}, and `{command}` wants a plan", command_for(kind, path))
    raise _no_plan(path)


# ---- words ---------------------------------------------------------------------------------------


def _no_plan(path: Path) -> DiagnosticError:
    """The error for a path with something else than a plan, or nothing: names what is there, and plans beside it."""
    from moec.codegen.folder import PlanError

    return PlanError("MOE0600", path, *_instead_of_plan(path))


def _instead_of_plan(path: Path) -> tuple[str, str]:
    """The message and help for a path with no plan."""
    if path.is_file() and is_plan(path.parent):
        return "this is a file inside of a plan", f"give the folder: {path.parent}"
    if path.is_file():
        return "this is a file, and a plan is a folder", "`moec compile FILE.moe` writes one"
    if path.is_dir():
        if kind_of(path) == "checkpoint":
            return "this is a checkpoint", command_for("checkpoint", path)
        inside = listed(path, is_plan)
        if inside:
            return f"this folder has no {PLAN}", f"plans in it: {', '.join(str(path / name) for name in inside)}"
        if listed(path, lambda child: kind_of(child) == "checkpoint"):
            return "this folder has checkpoints", f"`moec checkpoint inspect {quote(str(path))}` lists them"
        return f"this folder has no {PLAN}", "`moec compile FILE.moe` writes a plan"
    beside = listed(path.parent, is_plan)
    file = path.with_suffix(".moe")
    if meant := nearest(path.name, beside):
        return "there is no such folder", f"did you mean `{path.parent / meant}`?"
    if file.is_file():
        return "there is no such folder", f"`moec compile {quote(str(file))}` writes {file.stem}.plan"
    return (
        "there is no such folder",
        f"plans here: {', '.join(beside)}" if beside else "`moec compile FILE.moe` writes one",
    )


def _is_loaded(source: object) -> bool:
    """Whether this is a Plan; without an import of its class, which is slow."""
    return type(source).__name__ == "Plan" and type(source).__module__.startswith("moec.")


def _named(source: object) -> str:
    if source is None:
        return "None"
    name = type(source).__name__
    return f"an object of class {name}"


def _wrong(message: str, help: str) -> CallError:
    return CallError("MOE0751", message, help)


def _refused(message: str, help: str) -> DiagnosticError:
    return DiagnosticError([diagnose("MOE0751", None, message, help=help)])


def require_world_size(world_size: object) -> None:
    """Raises MOE0750 unless it is a number of ranks."""
    from moec.runtime.errors import wrong_argument

    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        help = "give it the number of ranks, such as `int(os.environ['WORLD_SIZE'])` under torchrun"
        raise wrong_argument(f"world_size must be a number, at least 1, not {world_size!r}", help)


def named(source: Plan | Spec | str | Path) -> str:
    """The source's name in messages: its path, or the name of the model."""
    if isinstance(source, str | Path):
        return "a text" if isinstance(source, str) and is_text(source) else str(source)
    return source.subject.name if isinstance(source, Spec) else source.name
