"""Wrong usage of the command line: one line with the mistake and a suggestion, and exit code 2."""

from __future__ import annotations

import click

from moec.cli.command import TooManyArguments, UnknownCommand
from moec.cli.meant import help_for_missing_command, help_for_too_many
from moec.grammar.diagnostics import Diagnostic, diagnose
from moec.grammar.suggest import nearest


def usage_error(error: click.ClickException, style: str) -> int:
    """Prints the mistake to stderr in `style`; returns the exit status."""
    from moec.commands.console.output import show

    show([diagnostic(error)], style)
    return 2


def diagnostic(error: click.ClickException) -> Diagnostic:
    """The diagnostic of an error that click found."""
    context = getattr(error, "ctx", None)
    name = context.command_path if context else "moec"
    message, help = error.format_message().rstrip("."), f"`{name} --help` shows its usage"
    if isinstance(error, click.NoSuchOption):
        message = f"`{name}` has no option {error.option_name}"
        known = [spelling for p in context.command.params for spelling in p.opts] if context else []
        help = _help_for_degree(error.option_name) or _meant(error.option_name, known, help)
    elif isinstance(error, UnknownCommand):
        message, help = f"`{name}` has no command `{error.word}`", _meant_command(name, error)
    elif isinstance(error, TooManyArguments) and context:
        message, help = help_for_too_many(context, error.words, help)
    elif isinstance(error, click.MissingParameter) and error.param is not None and context:
        word = error.param.make_metavar(context) if isinstance(error.param, click.Argument) else error.param.opts[-1]
        message = f"`{name}` needs {word}"
    elif isinstance(error, click.BadParameter) and error.param is not None and context:
        word = error.param.make_metavar(context) if isinstance(error.param, click.Argument) else error.param.opts[0]
        message = f"{word}: {error.message.rstrip('.')}"
    return diagnose("MOE0017", None, _small(message), help=help)


def _help_for_degree(option: str) -> str:
    """A help if the option is a degree or another word of the file's block `parallel`; or empty."""
    from moec.grammar.schema import fields
    from moec.grammar.spec import Parallel

    word = option.lstrip("-")
    return f"`{word}` is the file's: `parallel {{ {word} = … }}`" if word in fields(Parallel) else ""


def _meant_command(group: str, error: UnknownCommand) -> str:
    assert error.ctx is not None
    assert isinstance(error.ctx.command, click.Group)
    known = error.ctx.command.list_commands(error.ctx)
    if error.ctx.parent is None and (instead := help_for_missing_command(error.word, error.arguments)):
        return instead
    meant = nearest(error.word, known)
    return f"did you mean `{group} {meant}`?" if meant else f"the commands are {', '.join(known)}"


def _meant(word: str, known: list[str], default_help: str) -> str:
    meant = next((name for name in known if name.startswith(word)), None) or nearest(word, known)
    return f"did you mean {meant}?" if meant else default_help


def _small(text: str) -> str:
    """`text` with a small first letter, unless it begins with an abbreviation."""
    return text[:1].lower() + text[1:] if text[1:2].islower() else text
