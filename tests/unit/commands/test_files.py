"""`moec fmt`, `init`, `inspect` and `explain`."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from running import Run

from moec.grammar.diagnostics import CODES
from moec.grammar.schema_in_words import vocabulary


def test_the_starter_checks_and_is_laid_out_and_compiles(moec: Run) -> None:
    assert moec("init").status == 0
    assert moec("check", "model.moe").status == 0
    assert moec("fmt", "--check", "model.moe").status == 0
    assert moec("compile", "model.moe").status == 0


def test_init_replaces_nothing(moec: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.moe").write_text("# mine\n")
    ran = moec("init", "mine.moe")
    assert ran.status == 1
    assert "MOE0013" in ran.err
    assert (tmp_path / "mine.moe").read_text() == "# mine\n"


def test_fmt_writes_in_place_and_only_where_something_changes(moec: Run, starter: Path) -> None:
    laid_out = starter.read_text()
    before = starter.stat().st_mtime_ns
    assert moec("fmt", "model.moe").status == 0
    assert starter.stat().st_mtime_ns == before
    starter.write_text(laid_out.replace("  ", "    "))
    assert moec("fmt", "model.moe").status == 0
    assert starter.read_text().split() == laid_out.split()


def test_fmt_check_and_diff_write_nothing(moec: Run, starter: Path) -> None:
    text = starter.read_text().replace("depth   = 4", "depth=4")
    starter.write_text(text)
    assert moec("fmt", "--check", "model.moe").status == 1
    ran = moec("fmt", "--diff", "model.moe")
    assert ran.status == 1
    assert "-  depth=4" in ran.out
    assert "+  depth   = 4" in ran.out
    assert starter.read_text() == text


def test_fmt_reads_stdin(moec: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a=1;b=2")))
    ran = moec("fmt", "-")
    assert (ran.status, ran.out) == (0, "a = 1\nb = 2\n")


def test_fmt_leaves_a_file_that_does_not_parse(moec: Run, tmp_path: Path) -> None:
    (tmp_path / "a.moe").write_text("a = = 1\n")
    ran = moec("fmt", "a.moe")
    assert ran.status == 1
    assert "MOE0101" in ran.err
    assert (tmp_path / "a.moe").read_text() == "a = = 1\n"


def test_inspect_says_where_each_value_came_from(moec: Run, starter: Path) -> None:
    text = starter.read_text().replace('device = cpu\n  level "process" { size = 4 }', "from = one_rank; nodes = 4")
    starter.write_text('use "clusters/one_rank"\n' + text)
    out = moec("inspect", "model.moe", "--let", "experts=16").out
    lines = {line.split("#")[0].strip(): line.split("# ")[1] for line in out.splitlines()}
    assert lines["vocab = 256"] == "model.moe:8"
    assert lines["norm.eps = 1e-5"] == "default"
    assert lines["experts.count = 16"].endswith("--let experts=16")
    assert any(place.startswith("library:") for place in lines.values())


def test_inspect_of_a_file_that_does_not_resolve_says_why(moec: Run, tmp_path: Path) -> None:
    (tmp_path / "a.moe").write_text("model")
    assert moec("inspect", "a.moe").status == 1


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_code_is_explained(moec: Run, code: str) -> None:
    assert moec("explain", code.lower()).out.startswith(f"# {code}: {CODES[code]}\n")


def test_every_word_is_explained(moec: Run) -> None:
    for word in (*vocabulary(), "kv_heads", "sigmoid"):
        ran = moec("explain", word)
        assert ran.status == 0, word
        assert f"`{word}`" in ran.out or f"= {word}`" in ran.out


def test_an_unknown_word_gets_a_suggestion(moec: Run) -> None:
    ran = moec("explain", "swigluu")
    assert ran.status == 1
    assert "did you mean `swiglu`?" in ran.err
