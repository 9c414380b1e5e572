"""The README's model compiles, verifies and trains, and the outputs in docs/first.md are the real ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """An empty folder with the README's model in it, compiled."""
    path = tmp_path_factory.mktemp("readme")
    (path / "first.moe").write_text(block("moe"))
    return path


def moec(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moec", *arguments]
    environment = os.environ | {"COLUMNS": "120"}  # a line of the page is not cut
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, env=environment)


def measured(text: str) -> str:
    """`text` without numbers that differ between machines and runs."""
    text = re.sub(r"in \d+\.\d\d s", "in … s", text)
    text = re.sub(r" +\d\.\de[+-]\d\d +\d\.\de[+-]\d\d ", " … ", text)
    text = re.sub(r" +\d[\d.]* × +\d[\d.]* × ", " … ", text)
    return re.sub(r"largest difference: .*", "largest difference: …", text)


def test_the_model_is_as_short_as_promised():
    assert len(block("moe").splitlines()) <= 15


def test_the_readme_is_a_screen_and_a_half_before_reading_the_code():
    lines = README.partition("## Reading the code")[0].splitlines()
    assert len(lines) <= 88
    assert max(map(len, lines)) <= 140


def test_both_pages_have_the_same_model():
    assert f"```moe\n{block('moe')}```" in FIRST


def test_compile_and_verify_print_what_the_page_shows(folder: Path):
    compiled = moec(folder, "compile", "first.moe")
    assert measured(compiled.stdout) == measured(console("moec compile first.moe"))
    verified = moec(folder, "verify", "first.plan")
    assert measured(verified.stdout) == measured(console("moec verify first.plan"))


def test_the_mistake_is_the_one_shown(folder: Path):
    text = block("moe").replace("8 * swiglu", "6 * swiglu").replace("ep = 2", "ep = 4")
    (folder / "wrong.moe").write_text(text)
    checked = moec(folder, "check", "wrong.moe")
    assert checked.returncode == 1
    assert checked.stderr.rstrip() == console("moec check wrong.moe").rstrip()


def test_the_training_script_learns(folder: Path):
    moec(folder, "compile", "first.moe")
    (folder / "train.py").write_text(block("python"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "train.py"]
    finished = subprocess.run(
        launcher, cwd=folder, capture_output=True, text=True, timeout=200, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert finished.returncode == 0, finished.stderr
    losses = [float(number) for number in re.findall(r"loss ([\d.]+)", finished.stdout)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 2


@pytest.mark.parametrize("page", ["README.md", "docs/first.md", "docs/status.md", "docs/README.md"])
def test_links_lead_to_files(page: str):
    for link in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text(encoding="utf-8")):
        assert "://" in link or (ROOT / page).parent.joinpath(link).exists(), link


def test_the_index_of_pages_is_complete():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages <= set(re.findall(r"\]\(([^)#/]+\.md)", index)), "a page of docs/ is not in docs/README.md"


def test_the_full_table_names_the_commands_there_are():
    from moec.cli.root import COMMANDS, NOT_YET

    row = next(line for line in STATUS.splitlines() if line.startswith("| commands"))
    _, _, today, later, _ = row.split("|")
    assert set(re.findall(r"`(\w+)`", today)) == set(COMMANDS)
    assert set(re.findall(r"`(\w+)`", later)) == set(NOT_YET)
