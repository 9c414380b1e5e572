"""The wheel contains the tree: pyproject.toml's lists of packages and data files against the folders."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
FOLDERS = SETUPTOOLS["package-dir"]


def folder_of(package: str) -> Path:
    """The folder of a package, by the longest mapped package that contains it."""
    parts = package.split(".")
    mapped = max(length for length in range(len(parts) + 1) if ".".join(parts[:length]) in FOLDERS)
    return ROOT.joinpath(FOLDERS[".".join(parts[:mapped])], *parts[mapped:])


def test_every_folder_with_an_init_is_listed_as_a_package():
    found = {
        ".".join((package, *init.parent.relative_to(ROOT / folder).parts))
        for package, folder in FOLDERS.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert found == set(SETUPTOOLS["packages"])
    assert len(found) == len(SETUPTOOLS["packages"])


def test_every_python_file_lies_in_a_package():
    for folder in FOLDERS.values():
        for file in (ROOT / folder).rglob("*.py"):
            assert (file.parent / "__init__.py").exists(), file


def test_every_data_file_is_package_data():
    covered = {
        file
        for package, patterns in SETUPTOOLS["package-data"].items()
        for pattern in patterns
        for file in folder_of(package).glob(pattern)
    }
    for folder in FOLDERS.values():
        for file in (ROOT / folder).rglob("*"):
            if file.is_file() and file.suffix not in (".py", ".pyc"):
                assert file in covered, f"{file.relative_to(ROOT)} would not be in the wheel"


def test_no_two_test_files_share_a_name():
    """pytest imports them by name; those of the package `support` have its name before their own."""
    files = (file for file in (ROOT / "tests").rglob("*.py") if "support" not in file.parts)
    names = Counter(file.name for file in files if file.name not in ("conftest.py", "__init__.py"))
    assert [name for name, times in names.items() if times > 1] == []
