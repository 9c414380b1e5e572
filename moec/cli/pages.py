"""A page of docs/commands for each command, made from its signature. A golden test writes them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import click

from moec.cli.command import Argument
from moec.cli.root import app
from moec.commands.schemas import DOCUMENTS

STATUS = {0: "done", 1: "diagnostics", 2: "wrong usage", 3: "a bug in moec, with what to report"}
"""What every command's exit codes mean."""


class Extra(NamedTuple):
    """What a signature does not say: example command lines with a comment each, and when the command exits with 1."""

    examples: Mapping[str, str]
    fails: str = "a file, plan or option has errors: they are on stderr"


EXTRAS = {
    "check": Extra(
        {
            "moec check first.moe": "every error and warning; nothing for a good file where stderr is no terminal",
            "moec check --fix first.moe": "typos with one correction are corrected in the file",
            "moec check --let experts=16 first.moe": "with another value of a `let`",
            "moec check - --stdin-name first.moe --json < draft": "for an editor: a text that is not saved",
        },
        "a file has errors; warnings alone exit with 0",
    ),
    "fmt": Extra(
        {
            "moec fmt first.moe": "in place, only if something changes",
            "moec fmt --check --diff first.moe": "for CI: what would change, and exit code 1",
            "moec fmt - < first.moe": "to stdout",
        },
        "a file does not parse, or with --check or --diff would change",
    ),
    "explain": Extra(
        {
            "moec explain topk": "a word of the language",
            "moec explain MOE0311": "an error",
            "moec explain num_experts_per_tok": "another system's word",
        },
        "there is no such word or code",
    ),
    "init": Extra(
        {
            "moec init": "writes model.moe, with comments",
            "moec init --from qwen3_30b_a3b": "starts from a model of the library",
            "moec init --list": "the library",
        },
        "there is a file already, or no such model",
    ),
    "import hf": Extra(
        {"moec import hf Mixtral-8x7B-v0.1 -o mixtral.moe": "the file of a folder with config.json"},
        "moec cannot express the model, or the file exists",
    ),
    "compile": Extra(
        {
            "moec compile first.moe": "writes first.plan, prints a summary",
            "moec compile first.moe --emit ir": "the Program before placement; writes no plan",
            "moec compile first.moe --json": "the summary as numbers",
        },
        "the file has errors, a step does not fit the devices, or the plan cannot be written",
    ),
    "inspect": Extra(
        {
            "moec inspect first.moe": "what is set, and where",
            "moec inspect first.moe --all": "the defaults too",
            "moec inspect --params first.moe": "parameters by part",
            "moec inspect first.plan": "meshes, groups and shards",
            "moec inspect --memory first.plan": "the memory of a step",
        },
    ),
    "verify": Extra(
        {
            "moec verify first.plan": "all ranks in one process, against the unsharded model",
            "moec verify --scale large.plan": "at toy widths",
        },
        "the plan does not equal the unsharded model (the report is on stdout), or cannot be loaded",
    ),
    "load": Extra({"moec load --trust-nothing first.plan": "also compiles the plan's Spec again"}),
    "launch": Extra(
        {
            "moec launch first.plan train.py": "the torchrun command of the plan's cluster",
            "moec launch first.plan train.py --slurm > job.sh": "a script for sbatch",
            "moec launch first.plan train.py --run": "starts the ranks on this machine",
        },
        "the plan cannot be loaded, or its ranks do not fit the nodes; with --run the exit code is the script's",
    ),
    "doctor": Extra({"moec doctor": "on every node, before a first run"}, "training cannot work here"),
    "tune": Extra({"moec tune first.plan -o tuned.plan": "measures on this machine's GPU"}),
    "checkpoint inspect": Extra(
        {
            "moec checkpoint inspect checkpoints/100": "its tensors, step and ranks",
            "moec checkpoint inspect checkpoints": "a folder of checkpoints, newest first",
        },
        "it is no checkpoint, or is not complete",
    ),
    "checkpoint verify": Extra({"moec checkpoint verify checkpoints/100": "reads every byte"}, "a tensor is damaged"),
    "checkpoint convert": Extra(
        {
            "moec checkpoint convert checkpoints/100 -o model.safetensors": "one file",
            "moec checkpoint convert model.safetensors --plan first.plan -o checkpoints/0": "and back",
        },
        "the source is damaged, or the output exists",
    ),
    "weights import": Extra({"moec weights import Mixtral-8x7B-v0.1 checkpoints/0": "any plan of the model loads it"}),
    "weights export": Extra(
        {"moec weights export checkpoints/100 trained --like Mixtral-8x7B-v0.1": "a folder that transformers loads"},
    ),
    "weights upcycle": Extra(
        {"moec weights upcycle Llama-3.1-8B mixture.moe -o checkpoints/0": "every expert begins as the feed-forward"},
    ),
}
"""By command."""


def commands(group: click.Group = app, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command that is not a group, with its path: `checkpoint verify`."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")
        elif command is not None:
            yield f"{path}{name}", command


def file_of(path: str) -> str:
    """The name of a command's page."""
    return path.replace(" ", "-") + ".md"


def page(path: str, command: click.Command) -> str:
    """The Markdown page of a command."""
    extra = EXTRAS[path]
    context = click.Context(command, info_name=f"moec {path}", **command.context_settings)
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    examples = [f"{line}  # {comment}" for line, comment in extra.examples.items()]
    parts = [
        f"# moec {path}",
        inspect.cleandoc(command.help or ""),
        f"```sh\n{usage}\n```",
        *_table("Argument", [(p.make_metavar(context), p.about) for p in _arguments(command)]),
        *_table("Option", list(_options(command, context))),
        "## Examples",
        "```sh\n" + "\n".join(examples) + "\n```",
        "## Output and exit codes",
        _documents(path),
        f"It exits with 0 when done, with 1 if {extra.fails}, with 2 for wrong usage "
        "([all exit codes](README.md#exit-codes)).",
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

Every command has `--format json`, in short `--json`. stdout then holds one JSON document, indented, of the schema that
the command's page names ([docs/schemas](../schemas), JSON Schema 2020-12). Lists are `[]` where there is nothing.
Sizes are bytes, times are seconds unless the name says `ms`, and numbers that are not finite are `null`.

Errors that stop a command are a list of [diagnostics](../schemas/diagnostics.json) on stderr; stdout is empty then.
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


def documents_of(path: str) -> list[str]:
    """The schemas of a command's documents: `compile` has `compile` and `compile-emit`."""
    name = path.replace(" ", "-")
    return ["diagnostics"] if path == "check" else [d for d in DOCUMENTS if d == name or d.startswith(f"{name}-")]


def _documents(path: str) -> str:
    links = [f"[{name}](../schemas/{name}.json)" for name in documents_of(path)]
    return f"With `--json`, one document of the schema {' or '.join(links)}."
