"""Which test covers which lines: one SQLite file, to which recordings add.

A source is stored with its text, so that lines recorded in an older text are found again in a newer one. Lines that
ran while modules were imported belong to the test `""`. What the setup or teardown of a test covers, or a pytest that a
test starts, counts for all tests of its file: fixtures of modules and sessions run in the first test alone.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from hashlib import sha256
from pathlib import Path

from coverage.numbits import num_in_numbits, numbits_to_nums, nums_to_numbits

SCHEMA = """
CREATE TABLE IF NOT EXISTS test (id INTEGER PRIMARY KEY, name TEXT UNIQUE, slow INT, outcome TEXT, seconds REAL);
CREATE TABLE IF NOT EXISTS source (id INTEGER PRIMARY KEY, file TEXT, digest TEXT, text TEXT, UNIQUE (file, digest));
CREATE TABLE IF NOT EXISTS covered (
  source INT, test INT, shared INT, numbits BLOB, lines INT, PRIMARY KEY (source, test, shared)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS recorded (file TEXT, digest TEXT, marks TEXT, PRIMARY KEY (file, digest, marks));
CREATE INDEX IF NOT EXISTS covered_by_test ON covered (test);
"""

CONTEXT = re.compile(r" \((setup|call|teardown)\)(?:\||$)")
IMPORT = ""


@dataclass(frozen=True, slots=True)
class Test:
    """A test that passed when it was recorded. `lines`: how many lines of moec it covers."""

    name: str
    slow: bool
    seconds: float
    lines: int

    @property
    def file(self) -> str:
        return self.name.split("::")[0]


def named_in(context: str) -> tuple[str, bool]:
    """The test of one of coverage's contexts, and whether its lines count for all tests of its file.

    `import|NAME (call)` is of pytest's own process; `A (call)|B (setup)` of a worker that A started and B uses;
    `A (call)|import` of the process from which workers are forked; `A (call)|nested` of a pytest that A started;
    `A (call)` of any other process.
    """
    if context.endswith("|nested"):
        return named_in(context.removesuffix("|nested"))[0], True
    if context.endswith("|import"):
        return IMPORT, False
    context = context.removeprefix("import|")
    pieces = CONTEXT.split(context)
    if len(pieces) < 3:
        return IMPORT, False
    return pieces[-3], pieces[-2] != "call"


class CoverageDatabase:
    """The recordings of one file. Also a context manager, which closes it."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.connection = sqlite3.connect(file)
        self.connection.executescript(SCHEMA)

    def __enter__(self) -> CoverageDatabase:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def is_recorded(self, file: str, digest: str, marks: str) -> bool:
        found = self.connection.execute(
            "SELECT 1 FROM recorded WHERE (file, digest, marks) = (?, ?, ?)", (file, digest, marks)
        )
        return found.fetchone() is not None

    def add(
        self,
        tree: Path,
        folder: Path,
        tests: Mapping[str, tuple[bool, str, float]],
        recorded: Iterable[tuple[str, str, str]],
    ) -> None:
        """Adds what coverage wrote to `folder` while the tests of `tree` ran, and replaces what is known of `tests`.

        `tests`: whether each is slow, its outcome and its seconds. `recorded`: test files, their digests and marks.
        """
        with self.connection:
            numbers = {name: self.number(name, *of) for name, of in tests.items()}
            numbers[IMPORT] = self.number(IMPORT, False, "import", 0.0, keep=True)
            lines: dict[tuple[str, int, bool], set[int]] = defaultdict(set)
            for path, context, covered in _measured(folder):
                test, shared = named_in(context)
                if test in numbers and path.is_relative_to(tree):
                    lines[path.relative_to(tree).as_posix(), numbers[test], shared] |= covered
            sources = {file: self.source(tree, file) for file in {file for file, _, _ in lines}}
            for (file, test, shared), covered in lines.items():
                self.cover(sources[file], test, shared, covered)
            self.connection.executemany("INSERT OR REPLACE INTO recorded VALUES (?, ?, ?)", recorded)

    def number(self, name: str, slow: bool, outcome: str, seconds: float, *, keep: bool = False) -> int:
        """The number of a test, with these facts of it; its lines are forgotten unless `keep`."""
        found = self.connection.execute("SELECT id FROM test WHERE name = ?", (name,)).fetchone()
        if found and not keep:
            self.connection.execute("DELETE FROM covered WHERE test = ?", found)
        self.connection.execute(
            "INSERT INTO test (name, slow, outcome, seconds) VALUES (?, ?, ?, ?) ON CONFLICT (name) DO UPDATE "
            "SET slow = excluded.slow, outcome = excluded.outcome, seconds = excluded.seconds",
            (name, slow, outcome, seconds),
        )
        return int(self.connection.execute("SELECT id FROM test WHERE name = ?", (name,)).fetchone()[0])

    def source(self, tree: Path, file: str) -> int:
        """The number of the text that a file has now."""
        text = (tree / file).read_bytes()
        key = (file, sha256(text).hexdigest())
        self.connection.execute(
            "INSERT OR IGNORE INTO source (file, digest, text) VALUES (?, ?, ?)", (*key, text.decode())
        )
        return int(self.connection.execute("SELECT id FROM source WHERE (file, digest) = (?, ?)", key).fetchone()[0])

    def cover(self, source: int, test: int, shared: bool, lines: set[int]) -> None:
        """Adds lines that a test covers in a source."""
        key = (source, test, shared)
        old = self.connection.execute(
            "SELECT numbits FROM covered WHERE (source, test, shared) = (?, ?, ?)", key
        ).fetchone()
        lines = lines | set(numbits_to_nums(old[0])) if old else lines
        row = (*key, nums_to_numbits(lines), len(lines))
        self.connection.execute("INSERT OR REPLACE INTO covered VALUES (?, ?, ?, ?, ?)", row)

    def tests(self) -> dict[int, Test]:
        """The tests that passed, by their numbers."""
        query = (
            "SELECT test.id, name, slow, seconds, COALESCE((SELECT SUM(lines) FROM covered WHERE test = test.id), 0) "
            "FROM test WHERE outcome = 'passed'"
        )
        return {
            number: Test(name, bool(slow), s, lines) for number, name, slow, s, lines in self.connection.execute(query)
        }

    def covering(self, file: str, text: str, wanted: set[int]) -> tuple[set[int], set[str], bool]:
        """Which tests cover one of the lines `wanted` of `text`, and the test files all of whose tests do.

        Third, whether one of the lines ran on import.
        """
        tests: set[int] = set()
        files: set[str] = set()
        imported = False
        for source, old in self.connection.execute("SELECT id, text FROM source WHERE file = ?", (file,)).fetchall():
            lines = wanted if old == text else _lines_before(wanted, old, text)
            query = "SELECT test, name, shared, numbits FROM covered JOIN test ON test.id = test WHERE source = ?"
            for number, name, shared, numbits in self.connection.execute(query, (source,)):
                if not any(num_in_numbits(line, numbits) for line in lines):
                    continue
                if name == IMPORT:
                    imported = True
                elif shared:
                    files.add(name.split("::")[0])
                else:
                    tests.add(number)
        return tests, files, imported


def _lines_before(lines: set[int], old: str, new: str) -> set[int]:
    """Where lines of `new` are in an older text; those that are not there are left out."""
    blocks = SequenceMatcher(a=old.splitlines(), b=new.splitlines(), autojunk=False).get_matching_blocks()
    before = {b + i + 1: a + i + 1 for a, b, size in blocks for i in range(size)}
    return {before[line] for line in lines if line in before}


def _measured(folder: Path) -> Iterator[tuple[Path, str, set[int]]]:
    """File, context and lines of all that coverage wrote; a template that was opened has line 1."""
    for data in sorted(folder.glob("coverage.*")):
        connection = sqlite3.connect(data)
        query = (
            "SELECT path, context, numbits FROM line_bits JOIN file ON file.id = file_id "
            "JOIN context ON context.id = context_id"
        )
        try:
            for path, context, numbits in connection.execute(query):
                yield Path(path), context, set(numbits_to_nums(numbits))
        except sqlite3.DatabaseError as error:  # a process that was killed while it wrote
            print(f"{data.name}: {error}")
        finally:
            connection.close()
    for opened in sorted(folder.glob("templates-*")):
        for line in opened.read_text().splitlines():
            context, path = json.loads(line)
            yield Path(path), context, {1}
