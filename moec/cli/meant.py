"""Suggests a command where there is no such command, or where a command got too many arguments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import join, quote

import click

from moec.cli.command import Argument
from moec.commands.console.other_files import launch_of, other_file
from moec.grammar.folder_kinds import command_for, kind_of

STARTS = frozenset(("train", "run", "start", "torchrun", "fit"))
OTHER_NAMES = {
    "build": "compile",
    "lint": "check",
    "validate": "check",
    "format": "fmt",
    "show": "inspect",
    "info": "inspect",
    "new": "init",
    "test": "verify",
    "version": "--version",
}
"""Names of commands in other systems."""


def help_for_missing_command(word: str, arguments: Sequence[str]) -> str:
    """A help for `word` where a command is expected: another system's command, or a file. Empty for other words."""
    if word in STARTS:
        return _launch(arguments)
    if word == "help":
        return f"did you mean `{join(('moec', *arguments, '--help'))}`?"
    if word in OTHER_NAMES:
        return f"did you mean `{join(('moec', *OTHER_NAMES[word].split(), *arguments))}`?"
    if word.endswith(".moe"):
        return f"`moec check {quote(word)}` checks the file, `moec compile {quote(word)}` makes a plan of it"
    kind = kind_of(Path(word))
    if kind == "plan":
        word = quote(word)
        return f"`moec inspect {word}` shows the plan, `moec verify {word}` compares it with the unsharded model"
    if kind is not None:
        return command_for(kind, Path(word))
    known_file = other_file(Path(word))
    return known_file[1] if known_file else ""


def _launch(words: Sequence[str]) -> str:
    """The command that starts a script, with the plan and the script that `words` contain."""
    plan = next((word for word in words if word.endswith(".plan") or kind_of(Path(word)) == "plan"), "")
    file = next((word for word in words if word.endswith(".moe")), "")
    script = next((word for word in words if word.endswith(".py")), "train.py")
    if file and not plan:
        plan = f"{Path(file).stem}.plan"
        return (
            f"`moec compile {quote(file)}` makes the plan, and `{launch_of(script, plan)}` starts your script with it"
        )
    return f"your script trains, and `{launch_of(script, plan)}` starts it on this machine"


def help_for_too_many(context: click.Context, extra: Sequence[str], default_help: str) -> tuple[str, str]:
    """The message and help for a command with `extra` arguments."""
    name, arguments = context.command_path, [p for p in context.command.params if isinstance(p, Argument)]
    takes = " and ".join(argument.make_metavar(context) for argument in arguments) or "no argument"
    listed = ", ".join(f"`{word}`" for word in extra)
    message = f"`{name}` takes {takes}, and {listed} {'is' if len(extra) == 1 else 'are'} too much"
    values = [context.params.get(argument.name or "") for argument in arguments]
    if len(values) != 1 or not isinstance(values[0], Path):
        return message, default_help
    if any("-o" in p.opts for p in context.command.params) and Path(extra[0]).suffix != values[0].suffix:
        return message, f"the output is an option: `{name} {values[0]} -o {extra[0]}`"
    return message, f"run it for each: {', '.join(f'`{name} {path}`' for path in (values[0], *extra))}"
