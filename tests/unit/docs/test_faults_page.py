"""docs/internals/faults.md: no row is empty or stands twice, its tests exist, "not built yet" features are refused."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from support.plans import moe_text
from support.tables import each_row

import moec

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "internals" / "faults.md").read_text(encoding="utf-8")
INDEX = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
LINES = [line for line in PAGE.splitlines() if re.match(r"\| [WHCMS]", line)]
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in LINES]

TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
LATER = re.compile(r"not built yet: `([^`]+)`")

REFUSED: dict[str, tuple[str, str]] = {
    "fp8": ("dtype = fp32", "dtype = fp8"),
}
"""The words that the page calls not built yet, with the change to a file that uses each."""


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_row_has_a_fault_a_source_and_an_answer() -> None:
    assert f"| {len(ROWS)} faults of MoE frameworks" in INDEX
    for row in ROWS:
        assert len(row) == 4, row
        _, fault, source, here = row
        assert fault
        assert source
        answered = TEST.search(here) or LATER.search(here) or re.search(r"cannot happen: \w+ \w+ \w+", here)
        assert answered, f"{fault}: {here}"
        assert "HAS" not in here.split()


def test_no_fault_stands_twice() -> None:
    faults = [row[1] for row in ROWS]
    assert sorted(faults) == sorted(set(faults))


def test_every_source_is_in_the_legend_or_named() -> None:
    legend = set(re.findall(r"`(\w\w)` \w", PAGE.split("Sources:")[1].split("others by name")[0]))
    assert len(legend) == 14
    for row in ROWS:
        for source in row[2].split(", "):
            name = re.split(r"#| ", source)[0]
            assert len(name) > 2 or name in legend, source


def test_every_test_that_is_named_exists() -> None:
    named = [found for row in ROWS for found in TEST.findall(row[3])]
    assert len(named) > 60
    missing = [f"{file}::{name}" for file, name in named if name not in functions_of(file)]
    assert not missing
    assert PAGE.count(".py::") == len(named), "a test is named in another form"


def test_every_word_that_is_not_built_yet_is_tried_here() -> None:
    assert {word for row in ROWS for word in LATER.findall(row[3])} == REFUSED.keys()


@each_row("word", REFUSED)
def test_what_is_not_built_yet_is_refused(word: str) -> None:
    old, new = REFUSED[word]
    assert old in moe_text()
    with pytest.raises(moec.DiagnosticError) as refused:
        moec.compile(moe_text().replace(old, new))
    assert {found.code for found in refused.value.diagnostics} <= {"MOE0201", "MOE0202"}
    assert f"`{word}`" in str(refused.value)
