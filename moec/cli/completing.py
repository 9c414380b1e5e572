"""Completion in shells, by click's scripts: of `.moe` files, plans, words and codes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class, get_completion_class

from moec.grammar.folder_kinds import PLAN

SHELLS = ("bash", "zsh", "fish")

BASH = """\
%(complete_func)s() {
    local IFS=$'\\n' line
    COMPREPLY=()
    for line in $(COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD %(complete_var)s=bash_complete "$1"); do
        case "$line" in
            dir,*) compopt -o filenames -o plusdirs ;;
            file,*) compopt -o filenames -o default ;;
            plain,*) COMPREPLY+=("${line#plain,}") ;;
        esac
    done
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""
"""click's script shows either names or folders; this one shows `.moe` files and the folders beside them."""


@add_completion_class
class Bash(BashComplete):
    """Completion in bash from 4.4."""

    source_template = BASH

    def source(self) -> str:
        """The script. Does not start bash to ask for its version."""
        return self.source_template % self.source_vars()


def _beside(incomplete: str) -> Iterator[os.DirEntry[str]]:
    """The entries of the folder of `incomplete` whose names begin like it."""
    folder, start = os.path.split(incomplete)
    try:
        with os.scandir(folder or ".") as entries:
            yield from sorted((e for e in entries if e.name.startswith(start)), key=lambda e: e.name)
    except OSError:
        return


class FileOrPlan(click.Path):
    """A path of a `.moe` file, of a plan, or of either."""

    def __init__(self, *, files: bool = False, plans: bool = False) -> None:
        super().__init__(path_type=Path)
        self.files, self.plans = files, plans

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The files and plans that begin with `incomplete`, and the folders to look further in."""
        folder = os.path.split(incomplete)[0]
        items = [
            CompletionItem(os.path.join(folder, entry.name))
            for entry in _beside(incomplete)
            if (self.files and entry.name.endswith(".moe") and entry.is_file())
            or (self.plans and os.path.isfile(os.path.join(entry.path, PLAN)))
        ]
        return [*items, CompletionItem(incomplete, type="dir")]


class Subject(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 only
    """A code of a diagnostic, or a word of the language."""

    name = "subject"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The codes and words that begin with `incomplete`."""
        from moec.grammar.diagnostics import CODES
        from moec.grammar.schema_in_words import vocabulary

        if incomplete[:3].upper() == "MOE":
            return [CompletionItem(code, help=CODES[code]) for code in CODES if code.startswith(incomplete.upper())]
        return [CompletionItem(word) for word in sorted(vocabulary()) if word.startswith(incomplete)]


class LibraryModel(click.ParamType):  # type: ignore[type-arg]
    """The name of a model of the library."""

    name = "name"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The models that begin with `incomplete`."""
        from moec.grammar.resolve.library import library_names

        return [CompletionItem(name) for name in library_names("models") if name.startswith(incomplete)]


def script_of(shell: str) -> str:
    """The script that makes `shell` complete the command line of moec."""
    from moec.cli import app

    completion = get_completion_class(shell)
    assert completion is not None
    return completion(app, {}, "moec", "_MOEC_COMPLETE").source()
