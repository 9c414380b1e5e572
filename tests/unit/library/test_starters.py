"""`moec init --from` and `--list`: every model of the library as a file that compiles on its cluster."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.combinations import some
from support.tables import each_row

from moec.cli import app
from moec.commands.library import starter_from, title
from moec.driver import check, run_passes, to_spec
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.format import formatted
from moec.grammar.resolve.library import library_names, library_text
from moec.grammar.source import Source
from moec.passes.cost.memory import memory_of

NAMES = library_names("models")
ON_MANY_NODES = (
    "deepseek_v2", "deepseek_v3", "glm_4_5", "gshard_600b_decoder", "kimi_k2", "minimax_m2", "mixtral_8x22b",
    "qwen3_235b_a22b", "switch_c_decoder",
)  # fmt: skip
"""Models of which one number of nodes after the other is compiled until a step fits: the longest searches are slow."""


def init(*arguments: str, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["init", *arguments], catch_exceptions=True)
    assert done.exit_code == status, done.output
    return done.output


@pytest.mark.parametrize("name", some(NAMES, [name for name in NAMES if name not in ON_MANY_NODES]))
def test_every_starter_is_laid_out_compiles_and_fits(name: str) -> None:
    text = starter_from(name)
    assert formatted(Source(name, text)) == text
    spec = to_spec(text)
    assert spec.cluster.name == "mine"
    run_passes(spec)  # raises MOE0501 for a step that does not fit
    original = to_spec(f'use "models/{name}"\n')
    assert spec.subject == original.subject
    for moe in filter(None, spec.subject.mixtures):
        assert math.gcd(spec.parallel.ep, *moe.counts) == spec.parallel.ep


def test_half_of_the_nodes_would_not_fit() -> None:
    text = starter_from("mixtral_8x7b")
    assert "nodes = 2 " in text
    for zero in (1, 2, 3):
        smaller = text.replace("nodes = 2 ", "nodes = 1 ").replace("batch     = 16", "batch     = 8")
        spec = to_spec(smaller.replace("zero      = 1", f"zero      = {zero}"))
        # Up to the budget, which would look for a remedy.
        program = run_passes(spec, "schedule").program
        assert memory_of(program, spec).peak.bytes.total > spec.cluster.device.memory


def test_init_from_writes_the_models_text_and_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    init("--from", "models/olmoe_1b_7b")
    text = Path("olmoe_1b_7b.moe").read_text(encoding="utf-8")
    assert library_text("models/olmoe_1b_7b") in text
    assert check("olmoe_1b_7b.moe") == ()
    init("--from", "olmoe_1b_7b", "mine.moe")
    assert Path("mine.moe").read_text(encoding="utf-8") == text


def test_init_from_replaces_nothing(tmp_path: Path) -> None:
    file = tmp_path / "mine.moe"
    file.write_text("# mine\n")
    done = CliRunner().invoke(app, ["init", "--from", "dbrx", str(file)])
    assert isinstance(done.exception, DiagnosticError)
    assert done.exception.diagnostics[0].code == "MOE0013"
    assert file.read_text() == "# mine\n"


@each_row(
    ("written", "meant"),
    [
        ("mixtral_8x7", ["mixtral_8x7b"]),
        ("qwen3-30b", ["qwen3_30b_a3b"]),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", ["qwen3_30b_a3b"]),
        ("mixtral", ["mixtral_8x22b", "mixtral_8x7b"]),
        ("mixtrl_8x7b", ["mixtral_8x7b"]),
        ("../models/dbrx", ["dbrx"]),
        ("", []),
        ("nonsense", []),
    ],
)
def test_an_unknown_model_is_refused_with_those_that_are_near(written: str, meant: list[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.moe"
    done = CliRunner().invoke(app, ["init", "--from", written, str(file)])
    assert isinstance(done.exception, DiagnosticError)
    (found,) = done.exception.diagnostics
    assert found.code == "MOE0016"
    near = " or ".join(f"`moec init --from {name}`" for name in meant)
    assert found.help.startswith(f"did you mean {near}?" if meant else "`moec init --list` lists the models")
    assert not file.exists()


def test_the_list_has_every_model_with_its_counts() -> None:
    head, *lines = init("--list").splitlines()
    assert head.split() == ["name", "total", "active", "experts", "model"]
    assert [line.split()[0] for line in lines] == NAMES
    (line,) = (line for line in lines if line.split()[0] == "mixtral_8x7b")
    assert line.split() == ["mixtral_8x7b", "46.7B", "12.9B", "8E-2K-0S", "Mixtral", "8x7B"]


def test_the_list_writes_nothing(tmp_path: Path) -> None:
    init("--list", str(tmp_path / "mine.moe"), status=2)
    init("--list", "--from", "dbrx", status=2)


def test_titles_are_distinct() -> None:
    assert len({title(name) for name in NAMES}) == len(NAMES)
