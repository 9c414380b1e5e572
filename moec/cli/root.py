"""`moec` itself: the table of commands, which are imported on use."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from moec.cli.command import SETTINGS, Command, Group, output_format
from moec.grammar.diagnostics import DiagnosticError, diagnose

COMMANDS = {
    "check": "moec.cli.files",
    "fmt": "moec.cli.files",
    "explain": "moec.cli.files",
    "init": "moec.cli.files",
    "import": "moec.cli.files:imports",
    "compile": "moec.cli.plans:compile_",
    "plan": "moec.cli.plans",
    "inspect": "moec.cli.inspect",
    "verify": "moec.cli.plans",
    "load": "moec.cli.plans",
    "tune": "moec.cli.plans",
    "launch": "moec.cli.launching",
    "top": "moec.cli.launching",
    "doctor": "moec.cli.launching",
    "checkpoint": "moec.cli.checkpoint",
    "weights": "moec.cli.weights",
}
"""Each command's module, and its name there if that differs; in the order of `moec --help`."""

NOT_YET = {
    "simulate": "predict time on the described cluster",
    "calibrate": "measure a cluster",
    "lsp": "be a language server",
}
"""Commands that are not built yet, and what they will do."""


class Root(Group):
    """The group of all commands. Importing every signature would triple the time of one command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands that work today."""
        return list(COMMANDS)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses `args` after moving an output format from before the command to behind it."""
        return super().parse_args(ctx, _format_behind(args))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name; imports it."""
        if cmd_name in NOT_YET:
            return _not_yet(cmd_name)
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command = getattr(import_module(module), attribute or cmd_name)
        assert isinstance(command, click.Command)
        return command


def _format_behind(args: list[str]) -> list[str]:
    """Changes `--json check a.moe` to `check --json a.moe`, `--json checkpoint list` to `checkpoint list --json`."""
    word = args[0] if args else ""
    num_format_words = 2 if word == "--format" else 1 if word == "--json" or word.startswith("--format=") else 0
    num_command_words = (
        2 if args[num_format_words : num_format_words + 1] in (["checkpoint"], ["weights"], ["import"]) else 1
    )
    command = args[num_format_words : num_format_words + num_command_words]
    if not num_format_words or not command or any(word.startswith("-") for word in command):
        return args
    return [*command, *args[:num_format_words], *args[num_format_words + num_command_words :]]


def _shell(context: click.Context, _: click.Parameter, shell: str | None) -> str | None:
    """The shell of an option of completion: the named one, or the user's."""
    if shell is None or context.resilient_parsing:
        return None
    from moec.cli.completing import SHELLS

    name = Path(os.environ.get("SHELL", "")).name if shell == "auto" else shell
    if name not in SHELLS:
        reason = f"the shell is {name}" if name else "SHELL is not set"
        raise click.UsageError(f"{reason}; name one that is known: {', '.join(SHELLS)}")
    return name


def _show_completion(context: click.Context, parameter: click.Parameter, shell: str | None) -> None:
    if chosen := _shell(context, parameter, shell):
        from moec.cli.completing import script_of

        print(script_of(chosen), end="")
        context.exit()


def _install_completion(context: click.Context, parameter: click.Parameter, shell: str | None) -> None:
    if chosen := _shell(context, parameter, shell):
        from moec.cli.completing import script_of
        from moec.commands.completion import install

        print("\n".join(install(chosen, script_of(chosen))))
        context.exit()


_COMPLETION_OPTION: dict[str, Any] = {"is_flag": False, "flag_value": "auto", "is_eager": True, "expose_value": False}


@click.group("moec", cls=Root, context_settings=SETTINGS, invoke_without_command=True)
@click.option("--version", is_flag=True, help="Print the versions of moec, Python, torch and triton.")
@output_format
@click.option(
    "--install-completion",
    metavar="[bash|zsh|fish]",
    callback=_install_completion,
    help="Make the shell complete commands, options, files and words.",
    **_COMPLETION_OPTION,
)
@click.option(
    "--show-completion",
    metavar="[bash|zsh|fish]",
    callback=_show_completion,
    help="Print the completion script.",
    **_COMPLETION_OPTION,
)
@click.pass_context
def app(context: click.Context, version: bool, style: str) -> None:
    """The compiler for Mixture-of-Experts models."""
    if version:
        from moec.commands.console.version import run

        run(style)
        context.exit()
    command = context.invoked_subcommand
    if context.get_parameter_source("style") is ParameterSource.COMMANDLINE:
        option = "--json" if style == "json" else f"--format {style}"
        raise click.UsageError(f"{option} comes after the command: `moec {command or 'COMMAND'} {option}`")
    if command is None:
        click.echo(context.get_help())


def _not_yet(name: str) -> click.Command:
    @click.command(name, cls=Command, hidden=True, context_settings={"ignore_unknown_options": True})
    @click.argument("arguments", nargs=-1)
    def command(arguments: tuple[str, ...]) -> None:
        message = f"`moec {name}` will {NOT_YET[name]}"
        raise DiagnosticError([diagnose("MOE0202", None, message, help="docs/status.md says what works today")])

    return command
