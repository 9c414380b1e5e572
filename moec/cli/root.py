"""`moec` itself: the table of commands, each imported when it is asked for."""

from __future__ import annotations

from importlib import import_module

import click

from moec.cli.command import SETTINGS, Command, Group
from moec.grammar.diagnostics import DiagnosticError, diagnose

COMMANDS = {
    "check": "moec.cli.files",
    "fmt": "moec.cli.files",
    "explain": "moec.cli.files",
    "init": "moec.cli.files",
    "import": "moec.cli.files:imports",
    "compile": "moec.cli.plans:compile_",
    "inspect": "moec.cli.inspect",
    "verify": "moec.cli.plans",
    "load": "moec.cli.plans",
    "tune": "moec.cli.plans",
    "checkpoint": "moec.cli.checkpoint",
    "weights": "moec.cli.weights",
}
"""Each command's module, and its name there if that differs; in the order of `moec --help`."""

NOT_YET = {
    "plan": "choosing degrees by predicted time and memory",
    "simulate": "predicting time on the described cluster",
    "calibrate": "measuring a cluster",
    "lsp": "a language server",
}
"""Commands that are not built yet, and what they will do."""


class Root(Group):
    """The group of all commands. Importing every signature would triple the time of one command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands that work today."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, imported now."""
        if cmd_name in NOT_YET:
            return _not_yet(cmd_name)
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command = getattr(import_module(module), attribute or cmd_name)
        assert isinstance(command, click.Command)
        return command


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from moec import __version__

        print(f"moec {__version__}")
        context.exit()


@click.group("moec", cls=Root, context_settings=SETTINGS)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Print the version."
)
def app() -> None:
    """The compiler for Mixture-of-Experts models."""


def _not_yet(name: str) -> click.Command:
    @click.command(name, cls=Command, hidden=True, context_settings={"ignore_unknown_options": True})
    @click.argument("arguments", nargs=-1)
    def command(arguments: tuple[str, ...]) -> None:
        message = f"`moec {name}`: {NOT_YET[name]}"
        raise DiagnosticError([diagnose("MOE0202", None, message, help="docs/status.md says what works today")])

    return command
