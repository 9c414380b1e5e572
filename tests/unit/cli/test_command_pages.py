"""docs/commands has a page for every command, made from its signature."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
from support.tables import each_row

from moec.cli import app
from moec.cli.pages import commands, file_of, index, page
from moec.commands.schemas import DOCUMENTS

FOLDER = Path(__file__).parents[3] / "docs" / "commands"
COMMANDS = dict(commands())


def current(file: Path, text: str, update_golden: bool) -> None:
    if update_golden:
        file.write_text(text, encoding="utf-8")
    assert file.read_text(encoding="utf-8") == text, "run the tests with --update-golden"


@each_row("path", COMMANDS)
def test_the_page_is_current(path: str, update_golden: bool) -> None:
    current(FOLDER / file_of(path), page(path, COMMANDS[path]), update_golden)


def test_the_index_is_current(update_golden: bool) -> None:
    current(FOLDER / "README.md", index(), update_golden)


def test_there_is_no_page_of_nothing() -> None:
    assert {file.name for file in FOLDER.iterdir()} == {"README.md", *map(file_of, COMMANDS)}


def test_every_document_belongs_to_a_command() -> None:
    assert sorted(
        ["version", "plan-report", *(name for each in COMMANDS.values() for name in each.documents)]
    ) == sorted(DOCUMENTS)


@each_row("path", COMMANDS)
def test_every_command_has_examples_which_its_help_shows(path: str) -> None:
    command = COMMANDS[path]
    assert command.examples
    shown = command.get_help(click.Context(command, info_name=path))
    assert all(f"  {line}\n      # {comment}" in shown for line, comment in command.examples.items())


@each_row("line", [line for each in COMMANDS.values() for line in each.examples])
def test_the_examples_parse(line: str) -> None:
    words = shlex.split(re.split(" [<>] ", line)[0])
    assert words[0] == "moec"
    command: click.Command = app
    rest = words[1:]
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), rest[0])
        assert found is not None
        command, rest = found, rest[1:]
    command.make_context(command.name, rest)  # raises UsageError


@each_row("path", COMMANDS)
def test_every_option_and_argument_is_explained(path: str) -> None:
    for parameter in COMMANDS[path].params:
        assert getattr(parameter, "help", None) or getattr(parameter, "about", None), parameter.name
