"""The base of all commands: explained arguments, `--help`, and options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from moec.grammar.diagnostics import STYLES

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
Function = TypeVar("Function", bound=Callable[..., Any])


class Argument(click.Argument):
    """A positional argument with a help text, which click has only since 8.5."""

    def __init__(self, param_decls: list[str], *, about: str = "", **attributes: Any) -> None:
        super().__init__(param_decls, **attributes)
        self.about = about


class Command(click.Command):
    """A command whose help lists its arguments before its options, and examples after them.

    `examples`: command lines, each with a comment. `fails`: when the command exits with 1. `documents`: the schemas in
    `moec.commands.schemas` that its JSON has. The pages of docs/commands have all three.
    """

    def __init__(
        self,
        *arguments: Any,
        examples: Mapping[str, str] | None = None,
        fails: str = "the input has errors",
        documents: tuple[str, ...] = (),
        **attributes: Any,
    ) -> None:
        attributes["context_settings"] = {**SETTINGS, **(attributes.get("context_settings") or {})}
        super().__init__(*arguments, **attributes)
        self.examples, self.fails, self.documents = examples or {}, fails, documents

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses arguments and options. Raises `TooManyArguments`."""
        ctx.allow_extra_args = True
        extra = super().parse_args(ctx, args)
        if extra and not ctx.resilient_parsing:
            raise TooManyArguments(extra, ctx)
        return extra

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the sections Arguments and Options."""
        explained = [p for p in self.get_params(ctx) if isinstance(p, Argument)]
        if explained:
            with formatter.section("Arguments"):
                formatter.write_dl([(p.make_metavar(ctx), p.about) for p in explained])
        super().format_options(ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the section Examples."""
        if self.examples:
            with formatter.section("Examples"):
                for line, comment in self.examples.items():
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")
                    formatter.write(f"{'':{formatter.current_indent + 4}}# {comment}\n")


class UnknownCommand(click.UsageError):
    """A group has no command of the name `word`; `arguments` follow it."""

    def __init__(self, word: str, arguments: list[str], ctx: click.Context) -> None:
        super().__init__(f"no such command: {word}", ctx)
        self.word, self.arguments = word, arguments


class TooManyArguments(click.UsageError):
    """A command got more arguments than it takes: `words` are too many."""

    def __init__(self, words: list[str], ctx: click.Context) -> None:
        super().__init__(f"too many arguments: {' '.join(words)}", ctx)
        self.words = words


class Group(click.Group):
    """A group whose commands are `Command`s. Alone, it prints its help."""

    command_class = Command

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        attributes["context_settings"] = {**SETTINGS, **(attributes.get("context_settings") or {})}
        super().__init__(*arguments, **attributes)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the group's options and finds the command."""
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command of the first argument. Raises `UnknownCommand`."""
        if not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise UnknownCommand(args[0], args[1:], ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the section Commands: the first sentence of each, in full."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(200)) for name, command in commands if command])


def argument(name: str, about: str, **attributes: Any) -> Callable[[Function], Function]:
    """A positional argument, explained by `about`."""
    return click.argument(name, cls=Argument, about=about, **attributes)


def path(**attributes: Any) -> click.Path:
    """The type of an argument or option that is a path; the command checks whether it exists."""
    return click.Path(path_type=Path, **attributes)


def output_format(function: Function) -> Function:
    """Adds `--format` and its short form `--json`, as the argument `style`."""
    styles = click.Choice(STYLES)
    formats = click.option(
        "--format",
        "style",
        type=styles,
        metavar="FORMAT",
        default="full",
        help="full, for people; json, for tools; concise or github, for the diagnostics in logs.",
    )
    short = click.option("--json", "style", flag_value="json", help="The same as --format json.")
    return formats(short(function))


def lets(function: Function) -> Function:
    """Adds `--let NAME=VALUE`, as the argument `lets`, a dict."""
    option = click.option(
        "--let", "lets", multiple=True, metavar="NAME=VALUE", callback=_pairs, help="Override a `let` of the file."
    )
    return option(function)


def _pairs(context: click.Context, parameter: click.Parameter, texts: Iterable[str]) -> dict[str, str]:
    pairs = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"expected NAME=VALUE, found {text!r}")
        pairs[name.strip()] = value.strip()
    return pairs
