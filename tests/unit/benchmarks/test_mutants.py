"""`benchmarks/mutants.py`: which mutants there are, which are drawn, on which tests they are tried, what is kept."""

from __future__ import annotations

import difflib
from collections import Counter
from pathlib import Path

import pytest
from mutation.coverage_database import CoverageDatabase, named_in
from mutation.drawing import draw, room_of, sources
from mutation.mutant import Mutant
from mutation.python_mutants import python_mutants
from mutation.results import Results, diff, report, untried
from mutation.selection import Selector
from mutation.template_mutants import template_mutants
from mutation.trial import Outcome

PYTHON = '''"""A module of 1 < 2."""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from somewhere import Other

__all__ = ["first", "second"]
Sizes = Literal[1, 2]
LIMITS = {"few": 10, "many": 20}


def first(x: Literal[3, 4], rows: int = 5) -> int:
    """Whether 6 < 7."""
    if x < rows and not (x is None):
        return sum([x, rows]) - 1
    total = swap(x, rows)
    total += 1
    assert total > 0, f"{total + 8} is not 9"
    return total * 2
'''

TEMPLATE = '''"""A kernel of 1 + 2."""
{% if wide %}
    total += tl.sum(tl.load(x_ptr + 3 * D, mask=columns < D, other=0.0) * row, axis=1)  # 4 < 5
    tl.store(out_ptr + {{ at + 6 }}, total, mask=columns < D)
{% endif %}
'''


def texts(mutants: list[Mutant]) -> set[tuple[str, str, str]]:
    return {(mutant.kind, mutant.before, mutant.after) for mutant in mutants}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout of 200 lines of passes, 100 of runtime and 100 of templates."""
    names = {"passes/a.py": 100, "passes/b.py": 100, "runtime/c.py": 100, "codegen/kernels/templates/d.py.j2": 100}
    for name, lines in names.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"    value_{i} = x < {i}\n" for i in range(lines)))
        if path.suffix == ".py":
            path.write_text("def function(x):\n" + "".join(path.read_text().splitlines(keepends=True)[1:]))
    return tmp_path


def test_every_kind_of_change_to_python_is_found() -> None:
    found = texts(python_mutants("passes/a.py", PYTHON.encode()))
    assert found >= {
        ("row", '"few": 10, ', ""),
        ("row", ', "many": 20', ""),
        ("constant", "10", "11"),
        ("constant", "5", "6"),
        ("comparison", "<", "<="),
        ("comparison", "and", "or"),
        ("comparison", "not (x is None)", "x is None"),
        ("comparison", "is", "is not"),
        ("statement", "return sum([x, rows]) - 1", "pass"),
        ("reduction", "sum([x, rows])", "([x, rows])"),
        ("sign", "-", "+"),
        ("sign", "*", "//"),
        ("arguments", "x, rows", "rows, x"),
        ("statement", "total += 1", "pass"),
        ("comparison", ">", ">="),
    }


def test_what_readers_and_type_checkers_look_at_is_left_alone() -> None:
    lines = PYTHON.splitlines()
    alone = {n for n, line in enumerate(lines, 1) if '"""' in line or line.startswith(("if T", "__all__", "Sizes"))}
    mutants = python_mutants("passes/a.py", PYTHON.encode())
    assert not alone & {mutant.line for mutant in mutants}
    untouched = {mutant.before for mutant in mutants} & {"3", "4", "8", "9", "total + 8", "from somewhere import Other"}
    assert not untouched


def test_every_kind_of_change_to_a_template_is_found_outside_of_what_jinja_writes() -> None:
    mutants = template_mutants("codegen/kernels/templates/a.py.j2", TEMPLATE.encode())
    load = "tl.load(x_ptr + 3 * D, mask=columns < D, other=0.0) * row"
    assert texts(mutants) >= {
        ("comparison", "<", "<="),
        ("sign", "+", "-"),
        ("sign", "+=", "-="),
        ("constant", "3", "4"),
        ("mask", ", mask=columns < D, other=0.0", ""),
        ("mask", ", mask=columns < D", ""),
        ("reduction", f"tl.sum({load}, axis=1)", f"({load})"),
        ("statement", "tl.store(out_ptr + {{ at + 6 }}, total, mask=columns < D)", "pass"),
    }
    assert not {mutant.before for mutant in mutants} & {"2", "4", "5", "6"}


def test_a_change_compiles_and_differs_in_one_place() -> None:
    source = PYTHON.encode()
    changes = [mutant for mutant in python_mutants("passes/a.py", source) if mutant.is_change(source)]
    assert len(changes) >= 20
    for mutant in changes:
        compile(mutant.applied(source), "a.py", "exec")
        before, after = source.splitlines(), mutant.applied(source).splitlines()
        blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
        (place,) = [(first, last) for tag, first, last, _, _ in blocks if tag != "equal"]
        assert place == (mutant.line - 1, mutant.line + mutant.before.count("\n"))


def test_a_change_of_a_file_that_is_another_one_is_refused() -> None:
    mutant = python_mutants("passes/a.py", PYTHON.encode())[0]
    with pytest.raises(ValueError, match=r"passes/a\.py:10 is not"):
        mutant.applied(b"another file, which is long enough" * 20)


def test_what_does_not_compile_or_is_the_same_program_is_no_change() -> None:
    source = b"values = [1, 2]\n"
    of = Mutant("passes/a.py", "row", 1, 10, 11, "1", "", 1, 1, False)
    assert not of.is_change(source)  # [, 2]
    same = Mutant("passes/a.py", "constant", 1, 10, 11, "1", "0x1", 1, 1, False)
    assert not same.is_change(source)


def test_a_seed_draws_the_same_mutants_and_more_of_them_when_asked(tree: Path) -> None:
    drawn = draw(tree, 7, 40)
    assert drawn == draw(tree, 7, 40)
    assert drawn[:20] == draw(tree, 7, 20)
    assert drawn != draw(tree, 8, 40)
    assert len(set(drawn)) == 40


def test_rooms_come_in_proportion_to_their_lines(tree: Path) -> None:
    assert sources(tree)["passes/a.py"] == 100
    counts = Counter(room_of(mutant.file) for mutant in draw(tree, 0, 60))
    assert counts == {"passes": 30, "runtime": 15, "templates": 15}


def test_an_interrupted_run_goes_on_where_it_was(tree: Path, tmp_path: Path) -> None:
    drawn = draw(tree, 0, 5)
    file = tmp_path / "results.jsonl"
    for mutant in drawn[:3]:
        Results(file).add(mutant, (tree / mutant.file).read_bytes(), Outcome("survived"), 0)
    with file.open("a") as cut_off:
        cut_off.write('{"key": "')
    assert list(untried(drawn, Results(file), tree)) == drawn[3:]
    Results(file).add(drawn[3], (tree / drawn[3].file).read_bytes(), Outcome("survived"), 0)
    assert list(untried(drawn, Results(file), tree)) == drawn[4:]
    (tree / drawn[0].file).write_bytes((tree / drawn[0].file).read_bytes() + b"\n")
    assert drawn[0] in list(untried(drawn, Results(file), tree))


def test_the_report_counts_what_make_test_kills_of_all_that_is_killed(tree: Path, tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    outcomes = [
        Outcome("make test", "a", "failed"),
        Outcome("make test", "a", "timeout"),
        Outcome("rest", "b", "failed"),
    ]
    drawn = draw(tree, 0, 4)
    for mutant, outcome in zip(drawn, [*outcomes, Outcome("survived", tests=3, of=9)], strict=True):
        results.add(mutant, (tree / mutant.file).read_bytes(), outcome, 0)
    shown = report(list(results.rows.values()))
    assert "kills 2 of 3 that are killed at all: 66.7%, not kept" in shown
    assert "1 of them by a timeout" in shown
    survivor = diff(drawn[3], (tree / drawn[3].file).read_bytes())
    assert shown.endswith(f"tests\n  {survivor[0]}\n  {survivor[1]}")


@pytest.mark.parametrize(
    ("context", "test"),
    [
        ("import|tests/a.py::b (call)", ("tests/a.py::b", False)),
        ("import|tests/a.py::b[x | (y)] (setup)", ("tests/a.py::b[x | (y)]", True)),
        ("tests/a.py::b (setup)|tests/a.py::c (call)", ("tests/a.py::c", False)),
        ("tests/a.py::b (call)|nested", ("tests/a.py::b", True)),
        ("tests/a.py::b (call)", ("tests/a.py::b", False)),
        ("tests/a.py::b (call)|import", ("", False)),
        ("import", ("", False)),
    ],
)
def test_a_context_of_coverage_names_the_test(context: str, test: tuple[str, bool]) -> None:
    assert named_in(context) == test


TESTS = {
    "tests/a.py::wide": (False, "passed", 1.0),
    "tests/a.py::narrow": (False, "passed", 9.0),
    "tests/a.py::beside": (False, "passed", 1.0),
    "tests/a.py::red": (False, "failed", 1.0),
    "tests/b.py::slow": (True, "passed", 1.0),
}


def selected(tree: Path, mutant: Mutant, covered: dict[str, set[int]]) -> tuple[list[str], list[str], list[str]]:
    """The names of each part of the selection, where tests (`shared: ` before the name: for its file) cover lines."""
    with CoverageDatabase(tree / "coverage.sqlite") as database, database.connection:
        database.add(tree, tree / "nothing", TESTS, [])
        for name, lines in covered.items():
            shared = name.startswith("shared: ")
            number = database.number(name.removeprefix("shared: "), *TESTS[name.removeprefix("shared: ")], keep=True)
            database.cover(database.source(tree, mutant.file), number, shared, lines)
        selection = Selector(tree, database).select(mutant)
    first, rest, beside = ([test.name for test in of] for of in (selection.first, selection.rest, selection.beside))
    return first, rest, beside


def a_mutant(tree: Path, file: str, line: int) -> Mutant:
    return next(each for each in python_mutants(file, (tree / file).read_bytes()) if each.line == line)


def test_the_tests_that_cover_the_line_come_with_the_narrowest_first(tree: Path) -> None:
    covered = {name: {50} for name in TESTS if "beside" not in name} | {"tests/a.py::wide": {50, 51, 52}}
    chosen = selected(tree, a_mutant(tree, "passes/a.py", 50), covered)
    assert chosen == (["tests/a.py::narrow", "tests/a.py::wide"], ["tests/b.py::slow"], ["tests/a.py::beside"])
    assert selected(tree, a_mutant(tree, "passes/b.py", 50), {}) == ([], [], [])


def test_what_a_setup_covers_counts_for_all_tests_of_its_file(tree: Path) -> None:
    first, _, _ = selected(tree, a_mutant(tree, "passes/a.py", 50), {"shared: tests/a.py::red": {50}})
    assert set(first) == {"tests/a.py::narrow", "tests/a.py::wide", "tests/a.py::beside"}


def test_lines_that_run_on_import_have_the_tests_of_the_functions_of_the_file(tree: Path) -> None:
    (tree / "passes/a.py").write_text("LIMIT = 3\n\n\ndef function(x):\n    return x\n")
    first, _, _ = selected(tree, a_mutant(tree, "passes/a.py", 1), {"tests/a.py::wide": {5}})
    assert first == ["tests/a.py::wide"]


def test_tables_without_functions_have_the_tests_of_the_files_that_import_them(tree: Path) -> None:
    (tree / "passes/a.py").write_text("LIMIT = 3\n")
    (tree / "passes/b.py").write_text("from moec.passes.a import LIMIT\n\n\ndef function(x):\n    return LIMIT\n")
    with CoverageDatabase(tree / "coverage.sqlite") as database, database.connection:
        database.add(tree, tree / "nothing", TESTS, [])
        number = database.number("tests/a.py::wide", *TESTS["tests/a.py::wide"])
        database.cover(database.source(tree, "passes/b.py"), number, False, {5})
        selection = Selector(tree, database).select(a_mutant(tree, "passes/a.py", 1))
    assert [test.name for test in selection.first] == ["tests/a.py::wide"]


def test_lines_recorded_in_an_older_text_are_found_in_the_newer(tree: Path) -> None:
    selected(tree, a_mutant(tree, "passes/a.py", 50), {"tests/a.py::wide": {50}, "tests/a.py::narrow": {60}})
    lines = (tree / "passes/a.py").read_text().splitlines(keepends=True)
    (tree / "passes/a.py").write_text("".join([lines[0], "    import one_more\n", *lines[1:]]))
    with CoverageDatabase(tree / "coverage.sqlite") as database:
        chosen = [Selector(tree, database).select(a_mutant(tree, "passes/a.py", line)).first for line in (50, 51)]
    of_no_line, moved = ({test.name for test in tests} for tests in chosen)
    assert moved == {"tests/a.py::wide"}
    assert of_no_line == {"tests/a.py::wide", "tests/a.py::narrow"}, "those of other functions of the file"
