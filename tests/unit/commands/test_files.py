"""`moec fmt`, `init`, `inspect` and `explain`."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from running import Run
from support.tables import each_row

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
    out = moec("inspect", "model.moe", "--all", "--let", "experts=16").out
    lines = {line.split("#")[0].strip(): line.split("# ")[1] for line in out.splitlines()}
    assert lines["vocab = 256"] == "model.moe:8"
    assert lines["norm.eps = 1e-5"] == "default"
    assert lines["experts.count = 16"].endswith("--let experts=16")
    assert any(place.startswith("library:") for place in lines.values())


def test_inspect_shows_what_is_set_and_no_default(moec: Run, starter: Path) -> None:
    out = moec("inspect", "model.moe").out
    assert "  vocab = 256  " in out
    assert "default" not in out
    assert "experts.count" not in out, "the line `experts = 8 * swiglu(…)` says it"
    assert "not given" in moec("inspect", "model.moe", "--all").out
    assert all(len(line) <= 100 for line in out.splitlines())


def test_inspect_shows_equal_layers_of_two_blocks_once(moec: Run, tmp_path: Path) -> None:
    layers = "{\n attention = mha(heads = 2)\n moe { experts = 4 * gelu(32); gate = topk(2) } }\n"
    text = 'model "m" {\n vocab = 64; dim = 32; depth = 4\n layers 0..1 ' + layers + " layers 2..3 " + layers + "}\n"
    (tmp_path / "a.moe").write_text(text + "train { batch = 2; sequence = 8; optimizer = adamw(lr = 1e-2) }\n")
    heads = [line for line in moec("inspect", "a.moe").out.splitlines() if line.strip().startswith("layers")]
    assert [line.split() for line in heads] == [["layers", "0..3:", "#", "a.moe:3,", "equal", "at", "a.moe:6"]]


@pytest.mark.parametrize("width", [45, 60])
def test_inspect_fits_a_narrow_terminal(moec: Run, starter: Path, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    out = moec("inspect", "model.moe").out
    assert max(len(line) for line in out.splitlines()) <= width
    assert "  vocab = 256  " in out


def test_inspect_all_needs_a_file_and_its_values(moec: Run, starter: Path) -> None:
    assert moec("inspect", "model.moe", "--all", "--params").status == 2


@pytest.mark.parametrize("options", [(), ("--all",)])
def test_inspect_of_what_is_no_text_is_a_diagnostic(moec: Run, tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "a.moe").write_bytes(bytes(range(256)))
    for name in ("a.moe", "missing.moe"):
        ran = moec("inspect", name, *options)
        assert (ran.status, ran.out) == (1, "")
        assert "error MOE" in ran.err or "error[MOE" in ran.err


def test_inspect_of_a_file_that_does_not_resolve_says_why(moec: Run, tmp_path: Path) -> None:
    (tmp_path / "a.moe").write_text("model")
    assert moec("inspect", "a.moe").status == 1


@each_row("code", sorted(CODES))
def test_every_code_is_explained(moec: Run, code: str) -> None:
    assert moec("explain", code.lower()).out.startswith(f"# {code}: {CODES[code]}\n")


def test_every_word_is_explained(moec: Run) -> None:
    for word in (*vocabulary(), "kv_heads", "sigmoid"):
        ran = moec("explain", word)
        assert ran.status == 0, word
        assert f"`{word}`" in ran.out or f"= {word}`" in ran.out


@each_row(
    ("asked", "shown"),
    [("swigluu", "# `swiglu`"), ("Topk", "# `topk`"), ("hiden_size", "here it is called `dim`")],
)
def test_a_misspelt_word_shows_its_page_and_says_so(moec: Run, asked: str, shown: str) -> None:
    ran = moec("explain", asked)
    assert ran.status == 0
    assert shown in ran.out
    assert (f"there is no word `{asked}`; this is the page of " in ran.err) == (asked != "Topk")


@each_row(
    ("word", "here"),
    [("hidden_size", "dim"), ("capacity_factor", "factor"), ("--moe-router-topk", "k"), ("stage", "zero")],
)
def test_a_word_of_another_system_is_explained_with_the_word_here(moec: Run, word: str, here: str) -> None:
    out = moec("explain", word).out
    assert f"# `{word.lstrip('-').replace('-', '_')}`\n\nA word of " in out
    assert f"\n# `{here}` in `" in out


@each_row("word", ["--lr", "--weight-decay", "--sequence-parallel"])
def test_a_flag_of_the_same_name_is_explained_as_the_word(moec: Run, word: str) -> None:
    ran = moec("explain", "--", word)
    assert ran.out.startswith(f"# `{word.lstrip('-').replace('-', '_')}` in ")
    assert (ran.status, ran.err) == (0, "")


@each_row(
    ("word", "first"),
    [("bf16", "# `dtype = bf16` in "), ("--bf16", "# `dtype = bf16` in "), ("fp16", "# `dtype = fp16` in ")],
)
def test_a_dtype_is_explained_before_what_a_device_does_in_it(moec: Run, word: str, first: str) -> None:
    out = moec("explain", "--", word).out
    assert out.startswith(first)
    assert f"`{word.lstrip('-')}` in `peak`" in out


@each_row("asked", ["moe311", "311", "MOE0311"])
def test_a_code_may_be_written_short(moec: Run, asked: str) -> None:
    assert moec("explain", asked).out.startswith("# MOE0311: ")


def test_what_is_near_to_no_word_is_refused_with_a_way_out(moec: Run) -> None:
    ran = moec("explain", "zzzzzz")
    assert (ran.status, ran.out) == (1, "")
    assert "MOE0015" in ran.err
    assert "docs/language.md lists all words" in ran.err


def test_a_word_that_is_near_and_no_slip_is_named_without_its_page(moec: Run) -> None:
    ran = moec("explain", "fp3")
    assert (ran.status, ran.out) == (1, "")
    assert "did you mean `fp32`?" in ran.err


def test_a_word_here_that_other_systems_have_too_is_explained_for_both(moec: Run) -> None:
    out = moec("explain", "weight_decay").out
    assert out.startswith("# `weight_decay` in ")
    assert "0.01 is their default, 0.1 ours" in out.partition("# `weight_decay` in other systems")[2]


def test_a_page_as_json_says_what_was_asked_and_what_is_shown(moec: Run) -> None:
    ran = moec("explain", "--json", "swigluu")
    page = json.loads(ran.out)
    assert (page["asked"], page["subject"], page["kind"], ran.err) == ("swigluu", "swiglu", "word", "")
    assert page["markdown"].startswith("# `swiglu`\n")
