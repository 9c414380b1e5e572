"""`moec check --fix` and `moec fmt` replace the text of a file, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moec.commands.check import run
from moec.commands.console.replace_file import replace_file
from moec.commands.fixes import apply_fixes
from moec.driver import check
from moec.grammar.diagnostics import DiagnosticError

WRONG = 'model "m" {\n  vocab = 64; dim = 32; depth = 1; contxt = 8\n}\n'
RIGHT = WRONG.replace("contxt", "context")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "m.moe"
    path.write_text(WRONG)
    return path


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_a_link_stays_one_and_its_file_is_fixed(file: Path, link) -> None:
    link(file.with_name("link.moe"), file)
    run([file.with_name("link.moe")], {}, fix=True)
    assert file.read_text() == RIGHT
    assert file.with_name("link.moe").samefile(file)
    assert file.with_name("link.moe").is_symlink() == (link is Path.symlink_to)


def test_files_beside_are_left_alone(file: Path) -> None:
    other = file.with_name(".m.moe.fresh")
    other.write_text("mine")
    file.chmod(0o640)
    run([file], {}, fix=True)
    assert (file.read_text(), file.stat().st_mode & 0o777) == (RIGHT, 0o640)
    assert other.read_text() == "mine"
    assert sorted(path.name for path in file.parent.iterdir()) == [".m.moe.fresh", "m.moe"]


def test_a_read_only_file_is_refused(file: Path) -> None:
    file.chmod(0o444)
    with pytest.raises(DiagnosticError, match=r"MOE0014.*read-only"):
        run([file], {}, fix=True)
    assert file.read_text() == WRONG


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.moe")
    with pytest.raises(DiagnosticError, match=r"MOE0014.*no regular file"):
        replace_file(tmp_path / "p.moe", "", "text")


def test_a_file_that_somebody_else_has_changed_is_refused(file: Path) -> None:
    found = check(file)
    file.write_text(WRONG + "# more\n")
    with pytest.raises(DiagnosticError, match=r"MOE0014.*has changed"):
        apply_fixes(file, found)
    assert file.read_text() == WRONG + "# more\n"


def test_the_longest_name_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / ("m" * 250 + ".moe")
    file.write_text(WRONG)
    run([file], {}, fix=True)
    assert file.read_text() == RIGHT


@pytest.mark.parametrize("betas", ["[0.9, # momentum\n 0.95]", "[0.9, 0.95 # of squares\n]"])
def test_a_fix_takes_no_comment_away(file: Path, betas: str) -> None:
    text = f"{RIGHT}train {{ batch = 1; sequence = 8; optimizer = adamw(lr = 1e-3, betas = {betas}) }}\n"
    file.write_text(text)
    run([file], {}, fix=True)
    assert betas in file.read_text()


@pytest.mark.parametrize(
    "statement",
    [
        "optimizer = adamw(lr = 3e-3, beta1 = 0.8, betas = [0.9, 0.95])",
        "optimizer = {type: adamw, lr: 3e-3, lr: 1e-3}",
        "optimizer = {type: adamw, 3e-3}",
    ],
)
def test_a_fix_after_which_a_file_parses_worse_is_left_out(file: Path, statement: str) -> None:
    text = f"{RIGHT}train {{ batch = 1; sequence = 8; {statement} }}\n"
    file.write_text(text)
    before = [found.code for found in check(file)]
    run([file], {}, fix=True)
    after = [found.code for found in check(file)]
    grave = {code for code in after if code.startswith("MOE01") or code == "MOE0204"}
    assert all(after.count(code) <= before.count(code) for code in grave)


def test_a_name_for_two_words_is_no_fix_for_one_number(file: Path) -> None:
    text = f"{RIGHT}train {{ batch = 1; sequence = 8; optimizer = adamw(lr = 3e-3, betas = 0.95) }}\n"
    file.write_text(text)
    run([file], {}, fix=True)
    assert file.read_text() == text
    assert any("beta1 = 0.9, beta2 = 0.95" in found.help for found in check(file))
