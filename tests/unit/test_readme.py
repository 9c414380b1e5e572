"""The README's model compiles, verifies and trains, and the outputs in docs/first.md are the real ones."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import moec
from moec import entry
from moec.cli.root import COMMANDS, NOT_YET
from moec.commands.console.version import TESTED
from moec.grammar.resolve.library import library_names

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST = (ROOT / "docs" / "first.md").read_text(encoding="utf-8")
STATUS = (ROOT / "docs" / "status.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found[1]


def console(command: str) -> str:
    found = re.search(rf"```console\n\$ {re.escape(command)}\n(.*?)```", FIRST, re.DOTALL)
    assert found is not None, command
    return found[1]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs `moec` in a folder with the README's model; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")  # a line of the page is not cut
    Path("first.moe").write_text(block("moe"))

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["moec", *arguments])
        with pytest.raises(SystemExit) as stopped:
            entry.main()
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return command


NUMBERS_OF_VERIFY = re.compile(
    r"  float64 +(\S+) +(\S+)  .*\n  fp32 +(\S+) × +(\S+) × .*\n\n  largest difference: ([^,\s]+)"
)


def measured(text: str) -> str:
    """`text` without numbers that differ between machines and runs; those of `moec verify` must be within bounds."""
    text = re.sub(r"in \d+\.\d\d s", "in … s", text)
    for *float64, logits, gradients, largest in NUMBERS_OF_VERIFY.findall(text):
        assert max(float(number) for number in (*float64, largest)) < 1e-12, text
        assert max(float(logits), float(gradients)) < 16, text
    text = re.sub(r" +\d\.\de[+-]\d\d +\d\.\de[+-]\d\d ", " … ", text)
    text = re.sub(r" +\d[\d.]* × +\d[\d.]* × ", " … ", text)
    return re.sub(r"largest difference: .*", "largest difference: …", text)


def test_the_model_fits_a_screen():
    assert len(block("moe").splitlines()) <= 15


def test_the_readme_is_a_screen_and_a_half_before_reading_the_code():
    lines = README.partition("## Reading the code")[0].splitlines()
    assert len(lines) <= 98
    assert max(map(len, lines)) <= 140


def test_it_names_the_versions_that_moec_is_tested_with():
    versions = {name: tuple(".".join(map(str, bound)) for bound in TESTED[name]) for name in TESTED}
    assert f"Python {versions['Python'][0]} or newer" in README
    assert "torch {} to {}".format(*versions["torch"]) in README
    assert "Triton {} to {}".format(*versions["triton"]) in README


def test_it_counts_the_models_of_the_library():
    assert f"one of [{len(library_names('models'))} models](docs/models.md)" in README


def test_its_commands_are_those_that_the_tests_below_run():
    (commands,) = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    assert [re.sub(r" *#.*", "", line) for line in commands.splitlines()] == [
        "pip install .",
        "moec compile first.moe",
        "moec verify first.plan",
        "torchrun --standalone --nproc-per-node 4 train.py",
    ]


def test_the_first_page_lists_the_functions_of_moec():
    listed = set(re.findall(r"`moec\.(\w+)", FIRST.partition("## In Python")[2]))
    functions = {name for name in moec.__all__ if not isinstance(getattr(moec, name), type)}
    assert functions <= listed <= set(moec.__all__)


def test_both_pages_have_the_same_model():
    assert f"```moe\n{block('moe')}```" in FIRST


def test_compile_and_verify_print_what_the_page_shows(run):
    for command in ("moec compile first.moe", "moec verify first.plan"):
        code, said, _ = run(*command.split()[1:])
        assert (code, measured(said)) == (0, measured(console(command)))


def test_the_lines_of_a_program_are_those_of_the_readmes_plan(run):
    assert run("compile", "first.moe")[0] == 0
    lines = [line.strip() for line in Path("first.plan/program.ir").read_text(encoding="utf-8").splitlines()]
    shown = [lines.index(line) for line in block("text").splitlines()]
    assert len(shown) == 5
    assert shown == sorted(shown)


def test_the_mistake_is_the_one_shown(run):
    text = block("moe").replace("8 * swiglu", "6 * swiglu").replace("ep = 2", "ep = 4")
    Path("wrong.moe").write_text(text)
    code, _, said = run("check", "wrong.moe")
    assert (code, said.rstrip()) == (1, console("moec check wrong.moe").rstrip())


def test_the_index_of_pages_is_complete():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    folders = ROOT / "docs", ROOT / "docs" / "internals"
    pages = {str(path.relative_to(ROOT / "docs")) for folder in folders for path in folder.glob("*.md")}
    assert pages - {"README.md"} <= set(re.findall(r"\]\(([^)#]+\.md)", index)), (
        "a page of docs/ is not in docs/README.md"
    )


def test_the_page_of_what_works_names_the_commands_there_are():
    commands = re.split(r"^## ", STATUS, flags=re.MULTILINE)
    (section,) = [each for each in commands if each.startswith("Commands\n")]
    today, _, later = section.partition("Not yet:")
    assert set(re.findall(r"`(\w+)`", today)) == set(COMMANDS)
    assert set(re.findall(r"`(\w+)`", later)) == set(NOT_YET)


def test_the_page_of_what_works_has_something_of_today_in_every_section():
    sections = re.split(r"^## ", STATUS.partition("## Long tests")[0], flags=re.MULTILINE)[1:]
    assert len(sections) == 11
    assert all(re.match(r"[\w, -]+\n\nToday:\n\n- ", section) for section in sections)
