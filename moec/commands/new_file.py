"""Writes a new file, or replaces one, as a whole or not at all."""

from __future__ import annotations

from pathlib import Path

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
        raise DiagnosticError([diagnose("MOE0014", None, f"{file}: {error.strerror}")]) from error


def replace_file(file: Path, text: str) -> None:
    """Replaces the content of `file` by `text`, atomically; a file that is there keeps its mode. Raises `OSError`."""
    fresh = file.with_name(f".{file.name}.fresh")
    fresh.write_bytes(text.encode())
    if file.exists():
        fresh.chmod(file.stat().st_mode)
    fresh.replace(file)
