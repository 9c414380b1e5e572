"""A page of docs/commands for each command, made from its signature. A golden test writes them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from moec.cli.command import Argument, Command
from moec.cli.root import app

STATUS = {
    0: "done",
    1: "the command failed, or what it checks is not in order",
    2: "wrong usage",
    3: "a bug in moec; stderr says what to report",
}
"""What every command's exit codes mean."""


def commands(group: click.Group = app, path: str = "") -> Iterator[tuple[str, Command]]:
    """Every command that is not a group, with its path: `checkpoint verify`."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")
        else:
            assert isinstance(command, Command), f"`{path}{name}` is no `moec.cli.command.Command`"
            yield f"{path}{name}", command


def file_of(path: str) -> str:
    """The name of a command's page."""
    return path.replace(" ", "-") + ".md"


def page(path: str, command: Command) -> str:
    """The Markdown page of a command."""
    context = click.Context(command, info_name=f"moec {path}", **command.context_settings)
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    examples = [f"{line}  # {comment}" for line, comment in command.examples.items()]
    parts = [
        f"# moec {path}",
        inspect.cleandoc(command.help or ""),
        f"```sh\n{usage}\n```",
        *_table("Argument", [(p.make_metavar(context), p.about) for p in _arguments(command)]),
        *_table("Option", list(_options(command, context))),
        "## Examples",
        "```sh\n" + "\n".join(examples) + "\n```",
        "## Output and exit codes",
        _documents(command),
        *_table("Exit code", [("0", STATUS[0]), ("1", command.fails), ("2", STATUS[2])]),
        "[All exit codes](README.md#exit-codes)",
    ]
    return "\n\n".join(parts) + "\n"


def index() -> str:
    """The Markdown page that lists all commands and says what they have in common."""
    rows = [(f"[`moec {path}`]({file_of(path)})", c.get_short_help_str(200)) for path, c in commands()]
    codes = [(str(code), meaning) for code, meaning in STATUS.items()]
    options = list(_options(app, click.Context(app, info_name="moec", **app.context_settings)))
    parts = ["# Commands", INTRODUCTION, *_table("Command", rows), "## `moec` alone", *_table("Option", options)]
    return "\n\n".join([*parts, SHARED.strip(), *_table("Code", codes), LAST]) + "\n"


INTRODUCTION = """\
Every command of `moec`; `python -m moec` is the same. A golden test makes these pages from the commands themselves."""

SHARED = """
## JSON

Every command but `launch --run` has `--format json`, in short `--json`. stdout then holds one JSON document, indented,
of the schema that the command's page names ([docs/schemas](../schemas), JSON Schema 2020-12). Lists are `[]` where
there is nothing. Sizes are bytes, times are seconds unless the name says `ms`, and numbers that are not finite are
`null`.

Errors are a list of [diagnostics](../schemas/diagnostics.json) on stderr. A command that an error stops prints nothing
on stdout. `fmt` goes on with the other files: stdout lists those that it formatted, stderr has the errors of the rest.
Warnings of a command that succeeds are such a list on stderr too. For `moec check` the diagnostics are the result: its
list is on stdout.

`--format concise` prints a line for each diagnostic, `--format github` annotations for GitHub's workflows.

## Colours

`NO_COLOR` turns colours off, `FORCE_COLOR` turns them on where there is no terminal; `NO_COLOR` wins. stdout and stderr
are judged separately: what goes to a pipe has no colours.

## Completion

`moec --install-completion` makes bash (from 4.4), zsh or fish complete commands, options, their values, `.moe` files,
plans, and the words and codes of `moec explain`. It writes a script below `~/.local/share` and one line to the shell's
start file; for fish only the script. `moec --show-completion` prints the script.

## Exit codes
"""

LAST = "A command that is stopped with Ctrl-C exits with 130."


def _arguments(command: click.Command) -> list[Argument]:
    return [parameter for parameter in command.params if isinstance(parameter, Argument)]


def _options(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and not isinstance(parameter, Argument):
            yield record


def _table(head: str, rows: list[tuple[str, str]]) -> list[str]:
    if not rows:
        return []
    cells = [(name if name.startswith("[") else f"`{name}`", text) for name, text in rows]
    lines = [f"| {head} | |", "|---|---|", *(f"| {_cell(name)} | {_cell(text)} |" for name, text in cells)]
    return ["\n".join(lines)]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _documents(command: Command) -> str:
    links = [f"[{name}](../schemas/{name}.json)" for name in command.documents]
    return f"With `--json`, one document of the schema {' or '.join(links)}."
