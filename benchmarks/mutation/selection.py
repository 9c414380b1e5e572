"""Which tests a mutant is tried on, and in which order.

Lines that run on import (constants, tables, decorators, bodies of classes) have no test of their own: theirs are the
tests that cover any line of a function of the file, or, failing that, of the files that import it. So it is for lines
of functions that are called on import, and for those that no test is known to cover: threads that C starts are not
traced. The lines of a template are covered by the tests that render it.

Functions with a cache run in the first test that calls them. Tests of the same file as a covering test, which may see
what is cached, come last.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mutation.coverage_database import CoverageDatabase, Test
from mutation.drawing import sources
from mutation.mutant import Mutant


@dataclass(frozen=True, slots=True)
class Selection:
    """`first`: covering tests of `make test`, `rest`: slow ones, `beside`: others of `make test`, of the same files."""

    first: tuple[Test, ...]
    rest: tuple[Test, ...]
    beside: tuple[Test, ...]


class Selector:
    """Selects from the tests that passed when they were recorded, of those `named` if any are given."""

    def __init__(self, tree: Path, database: CoverageDatabase, named: Iterable[str] | None = None) -> None:
        self.tree = tree
        self.database = database
        kept = None if named is None else set(named)
        self.tests = {n: test for n, test in database.tests().items() if kept is None or test.name in kept}
        self.by_file: dict[str, set[Test]] = {}
        for test in self.tests.values():
            self.by_file.setdefault(test.file, set()).add(test)

    def select(self, mutant: Mutant) -> Selection:
        """Those that cover the fewest lines first; among equals the fastest."""
        covering = self._covering(mutant)
        beside = {test for file in {test.file for test in covering} for test in self.by_file[file]} - covering
        first = sorted((test for test in covering if not test.slow), key=_rank)
        rest = sorted((test for test in covering if test.slow), key=_rank)
        return Selection(tuple(first), tuple(rest), tuple(sorted((t for t in beside if not t.slow), key=_rank)))

    def _covering(self, mutant: Mutant) -> set[Test]:
        if mutant.file.endswith(".j2"):
            return self._on_lines(mutant.file, {1})[0]
        found: set[Test] = set()
        on_import = not mutant.in_function
        if mutant.in_function:
            found, on_import = self._on_lines(mutant.file, set(range(mutant.first, mutant.last + 1)))
        if on_import or not found:
            found = found | self._of_functions(mutant.file)
            for importer in () if found else importers(self.tree).get(mutant.file, ()):
                found = found | self._of_functions(importer)
        return found

    def _of_functions(self, file: str) -> set[Test]:
        return self._on_lines(file, lines_of_functions(self.tree / file))[0]

    def _on_lines(self, file: str, lines: set[int]) -> tuple[set[Test], bool]:
        numbers, files, imported = self.database.covering(file, (self.tree / file).read_text(), lines)
        found = {self.tests[number] for number in numbers if number in self.tests}
        return found.union(*(self.by_file.get(name, set()) for name in files)), imported


def _rank(test: Test) -> tuple[int, float, str]:
    return test.lines, test.seconds, test.name


def lines_of_functions(path: Path) -> set[int]:
    """The lines of a Python file that run when a function is called."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines |= set(range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1))
    return lines


@cache
def importers(tree: Path) -> dict[str, set[str]]:
    """The files that import each file, directly."""
    files = [file for file in sources(tree) if file.endswith(".py")]
    modules = {module_of(file): file for file in files}
    found: dict[str, set[str]] = {}
    for file in files:
        for node in ast.walk(ast.parse((tree / file).read_bytes())):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                if name in modules:
                    found.setdefault(modules[name], set()).add(file)
    return found


def module_of(file: str) -> str:
    """`moec.passes.fuse` of `passes/fuse.py`."""
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if name.split(".")[0] == "moec" else f"moec.{name}"
