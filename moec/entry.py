"""The entry point of `moec`: selects the command, and maps every outcome to an exit code.

Exit 0: done; 1: the command failed, or its input has errors; 2: wrong usage; 3: a bug in moec. Artifacts go to stdout,
diagnostics to stderr.

The command line is click's (moec.cli), whose import takes half as long as checking a file. `moec check FILE…`, which
editors run at every keystroke, therefore skips it.
"""

from __future__ import annotations

import gc
import io
import os
import sys
from pathlib import Path
from typing import NoReturn


def main() -> NoReturn:
    """The entry point."""
    arguments = sys.argv[1:]
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A pipe or terminal that is not UTF-8 shows `\\u2192` for →; stderr does so by itself.
        sys.stdout.reconfigure(errors="backslashreplace")
    if arguments[:1] in (["check"], ["compile"]):
        gc.disable()  # trees, Specs and Programs have no cycles, and the process ends soon
    try:
        if is_plain_check(arguments):
            sys.exit(check(arguments))
        sys.exit(_parsed(arguments))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of stdout has exited (`moec compile --emit=ir … | head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:  # noqa: BLE001  (any exception that is no diagnostic is a bug, reported below)
        sys.exit(_failed(error, arguments))


def is_plain_check(arguments: list[str]) -> bool:
    """Whether this is `moec check` with files, and no option but `--json`."""
    files = [argument for argument in arguments[1:] if argument != "--json"]
    return bool(files) and arguments[0] == "check" and not any(a.startswith("-") and a != "-" for a in files)


def check(arguments: list[str]) -> int:
    """`moec check FILE…`; returns the exit status."""
    from moec.commands.check import run

    files = [Path(argument) for argument in arguments[1:] if argument != "--json"]
    return run(files, {}, style_of(arguments))


def _parsed(arguments: list[str]) -> int:
    """Any other command; returns the exit status."""
    import click

    from moec.cli import app
    from moec.cli.usage import usage_error

    try:
        status = app.main(prog_name="moec", standalone_mode=False)
    except click.Abort:
        return 130
    except click.ClickException as error:
        return usage_error(error, style_of(arguments))
    return status if isinstance(status, int) else 0


def style_of(arguments: list[str]) -> str:
    """The format that the command line names, read without a parser, because parsing may have failed.

    Words after `--` are no options.
    """
    from moec.grammar.diagnostics import STYLES

    style = "full"
    if "--" in arguments:
        arguments = arguments[: arguments.index("--")]
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument == "--json":
            style = "json"
        elif argument == "--format":
            style = following
        elif argument.startswith("--format="):
            style = argument.partition("=")[2]
    return style if style in STYLES else "full"


def _failed(error: Exception, arguments: list[str]) -> int:
    from moec.commands.console.output import WRONG_USAGE, show
    from moec.grammar.diagnostics import DiagnosticError

    if isinstance(error, DiagnosticError):
        show(error.diagnostics, style_of(arguments))
        return 2 if error.diagnostics[0].code == WRONG_USAGE else 1
    import platform
    import traceback

    from moec import __version__

    print("".join(traceback.format_exception(error)), file=sys.stderr)
    environment = f"moec {__version__}, Python {platform.python_version()}, {platform.platform()}"
    print(f"This is a bug in moec. Please report it with the text above, the file, and: {environment}", file=sys.stderr)
    return 3
