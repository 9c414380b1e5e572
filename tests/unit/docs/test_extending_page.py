"""docs/extending.md: every file and name in it exists, its code is in the tree, and it lists every member of `Op`."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_origin, get_type_hints

from support.tables import each_row

from moec.passes.ir import Op

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
EXCERPTS = [found.partition("\n")[::2] for found in re.findall(r"```python\n# (.*?)```", PAGE, re.DOTALL)]
CODE = re.compile(r"`([^`\n]+)`")
PROSE = CODE.findall(re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL))
PATHS = [name for name in PROSE if "/" in name and not name.startswith(".") and " " not in name]

WORDS = {"expert_choice", "hash_route", "qk_norm", "rms_norm", "sample_experts", "sampled_weights"}
"""Words of the language and of a Program's text, which are no Python names."""


def names_of_the_tree() -> set[str]:
    """Every class, function, argument and variable that a module of moec, its tests or benchmarks defines."""
    found = set()
    for folder in ("grammar", "passes", "codegen", "runtime", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                match node:
                    case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                        found.add(name)
                    case ast.Name(id=name, ctx=ast.Store()):
                        found.add(name)
    return found


def test_every_file_exists() -> None:
    assert len(PATHS) > 60
    assert [path for path in PATHS if not (ROOT / path).exists()] == []
    links = re.findall(r"\]\(([^)]+)\)", PAGE)
    assert len(links) == 5
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_every_name_exists() -> None:
    named = {name for name in PROSE if re.fullmatch(r"_?[A-Za-z]\w*", name) and re.search(r"[A-Z_]", name)}
    assert len(named - WORDS) > 30
    assert named - names_of_the_tree() - WORDS - {name for name in named if name.startswith("MOE0")} == set()


@each_row(("path", "code"), EXCERPTS)
def test_code_is_that_of_its_file(path: str, code: str) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    parts = re.split(r"^\.\.\.\n", code, flags=re.MULTILINE)
    places = [source.find(part) for part in parts]
    assert -1 not in places
    assert places == sorted(places)


def test_every_member_that_an_op_declares_is_in_the_table() -> None:
    rows = re.search(r"\| member of `Op` \|.*?\n\n", PAGE, re.DOTALL)
    assert rows is not None
    listed = {name for row in rows[0].strip().splitlines()[2:] for name in CODE.findall(row.split("|")[1])}
    hints = get_type_hints(Op)
    declared = {name for name in Op.__annotations__ if str(Op.__annotations__[name]).startswith("ClassVar")}
    assert declared == {name for name in hints if str(get_origin(hints[name])) == "typing.ClassVar"}
    assert listed == declared - {"registry"} | {"optional", "infer", "place", "cost", "binds", "other_tokens"}


def test_other_pages_lead_here() -> None:
    assert "(extending.md)" in (ROOT / "docs" / "README.md").read_text(encoding="utf-8")


def test_targets_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"`make ([\w-]+)`", PAGE)
    assert targets
    assert [target for target in targets if f"\n{target}:" not in makefile] == []
