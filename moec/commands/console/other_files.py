"""Recognises files that are neither plans nor `.moe` files, and names the command that takes them."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from moec.grammar.diagnostics import Diagnostic, DiagnosticError, diagnose
from moec.grammar.folder_kinds import kind_of, listed
from moec.grammar.source import Source, Span

LARGEST_CONFIG = 1 << 22
DEEPSPEED = frozenset(("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"))
"""Keys by which a config of DeepSpeed is known."""


def other_file(path: Path) -> tuple[str, str] | None:
    """The kind of a script or config, and a help that names the command for it. None for others and missing files."""
    if path.suffix not in (".py", ".json") or not path.is_file():
        return None
    if path.suffix == ".py":
        return "a Python script", f"`{launch_of(path)}` starts it on this machine"
    keys = _keys(path)
    if "model_type" in keys or "architectures" in keys:
        return "a config of Hugging Face", f"`moec import hf {quote(str(path))} -o model.moe` makes a `.moe` file of it"
    if DEEPSPEED & keys:
        help = "`moec init` writes a file to start from; docs/from/deepspeed.md has the words for the config's keys"
        return "a config of DeepSpeed", help
    return None


def _keys(path: Path) -> frozenset[str]:
    """The keys of a JSON object; none for anything else."""
    import json

    try:
        with path.open("rb") as file:
            content = json.loads(file.read(LARGEST_CONFIG))
    except (OSError, ValueError, RecursionError):
        return frozenset()
    return frozenset(content) if isinstance(content, dict) else frozenset()


def plan_here() -> str:
    """The name of the only plan in this folder, or `PLAN`."""
    plans = listed(Path(), lambda path: kind_of(path) == "plan")
    return plans[0] if len(plans) == 1 else "PLAN"


def launch_of(script: Path | str, plan: str = "") -> str:
    """The command that starts a script here."""
    return f"moec launch {quote(plan or plan_here())} {quote(str(script))} --run"


def not_moe(path: Path, command: str) -> Diagnostic | None:
    """The diagnostic if `command` got another kind of file than a `.moe` file; None if it may be one."""
    known_file = other_file(path)
    if known_file is None:
        return None
    kind, help = known_file
    message = f"this is {kind}, and `{command}` wants a `.moe` file"
    return diagnose("MOE0751", Span(Source(path.name, ""), 0, 0), message, help=help)


def require_moe_file(path: Path, command: str) -> None:
    """Raises `DiagnosticError` for a file that is known to be something else than a `.moe` file."""
    if diagnostic := not_moe(path, command):
        raise DiagnosticError([diagnostic])


def require_plan(path: Path, command: str, then: str = "") -> None:
    """Raises `DiagnosticError` for anything but a plan's folder. `then`: the command to run on the plan, with `{}`."""
    from moec.subject import require_plan_folder

    if known_file := other_file(path):
        kind, help = known_file
        if path.suffix == ".py":
            help = f"name the plan that the script loads: `{(then or f'{command} {{}}').format(plan_here())}`"
        message = f"`{path}` is {kind}, and `{command}` wants a plan"
        raise DiagnosticError([diagnose("MOE0751", None, message, help=help)])
    require_plan_folder(path, command, then)
