"""A new `.moe` file of `moec init` and `moec import hf`."""

from __future__ import annotations

from pathlib import Path

from moec.commands.console.replace_file import not_written
from moec.grammar.diagnostics import DiagnosticError, diagnose


def write_new(file: Path, text: str) -> None:
    """Writes `text` to the new file `file`, or leaves nothing there.

    Raises `DiagnosticError` MOE0013 if there is a file already, MOE0014 if it cannot be written.
    """
    try:
        with file.open("x", encoding="utf-8") as stream:
            try:
                stream.write(text)
                stream.flush()
            except OSError:
                file.unlink()
                raise
    except FileExistsError:
        message = f"{file} is unchanged"
        raise DiagnosticError([diagnose("MOE0013", None, message, help="choose another name")]) from None
    except OSError as error:
        raise not_written(file, error.strerror) from error
