"""The kinds of folders that users give to commands and calls: what each is called, and the command that takes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Literal

PLAN, PLAN_TEXT = "plan.json", "spec.moe"
CHECKPOINT = "checkpoint.json"
HUGGING_FACE = "config.json"

Kind = Literal["plan", "hugging face", "checkpoint"]
_FILES: dict[Kind, str] = {"plan": PLAN, "hugging face": HUGGING_FACE, "checkpoint": CHECKPOINT}
"""The file by which each kind is known."""

MOST_LISTED = 8


def kind_of(path: Path) -> Kind | None:
    """The kind of the folder `path`; None for any other folder, a file, or nothing."""
    return next((kind for kind, name in _FILES.items() if (path / name).is_file()), None)


def in_words(kind: Kind) -> str:
    """`a checkpoint`."""
    return {"plan": "a plan", "hugging face": "a folder of Hugging Face", "checkpoint": "a checkpoint"}[kind]


def command_for(kind: Kind, path: Path) -> str:
    """A help: the command that takes the folder `path` of this kind."""
    name = quote(str(path))
    if kind == "plan":
        return f"`moec inspect {name}` and `moec verify {name}` take the plan; its file is {path}/{PLAN_TEXT}"
    if kind == "checkpoint":
        return f"`moec checkpoint inspect {name}` shows it"
    return f"`moec import hf {name}` writes a `.moe` file"


def listed(folder: Path, wanted: Callable[[Path], bool]) -> list[str]:
    """The names of the first entries of `folder` that are `wanted`; none of a folder that cannot be read."""
    try:
        return sorted(child.name for child in folder.iterdir() if wanted(child))[:MOST_LISTED]
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return []


def is_file_of_moec(path: Path) -> bool:
    """Whether the name is that of a `.moe` file."""
    return path.name.endswith(".moe")
