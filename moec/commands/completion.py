"""`moec --install-completion`: writes the shell's script, and the line that reads it."""

from __future__ import annotations

import os
from pathlib import Path

from moec.commands.console.replace_file import not_written, write_whole

HELP = "`moec --show-completion` prints the script; source it where your shell starts"
ZSH_FIRST = "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }\n"
"""zsh has `compdef` only after `compinit`."""


def install(shell: str, script: str) -> list[str]:
    """Writes `script` where `shell` finds it, for this user; returns the lines that say so.

    Raises `DiagnosticError` MOE0014 if a file cannot be written. Installing again replaces the script and adds no line.
    """
    home = Path.home()
    if shell == "fish":
        config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
        file = config / "fish" / "completions" / "moec.fish"
        _write(file, script)
        return [f"wrote {file}; new shells complete `moec`"]
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    file = data / "moec" / f"completion.{shell}"
    _write(file, (ZSH_FIRST if shell == "zsh" else "") + script)
    start_file = Path(os.environ.get("ZDOTDIR") or home) / ".zshrc" if shell == "zsh" else home / ".bashrc"
    line = f'source "{file}"  # moec --install-completion'
    added = _add_line(start_file, line)
    effect = f"added a line to {start_file} that reads it" if added else f"{start_file} reads it already"
    return [f"wrote {file}; {effect}; new shells complete `moec`"]


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, text.encode())
    except OSError as error:
        raise not_written(file, error.strerror, HELP) from error


def _add_line(file: Path, line: str) -> bool:
    """Appends `line` to the user's `file` unless it has the line; returns whether it did."""
    try:
        text = file.read_text(encoding="utf-8", errors="surrogateescape") if file.exists() else ""
        if line in text.splitlines():
            return False
        with file.open("a", encoding="utf-8") as stream:
            stream.write(("" if text.endswith("\n") or not text else "\n") + line + "\n")
    except OSError as error:
        raise not_written(file, error.strerror, HELP) from error
    return True
