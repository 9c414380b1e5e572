"""`moec top` on files as `job.metrics` writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tables import each_row

from moec.commands.top import read, run
from moec.grammar.diagnostics import DiagnosticError

FIRST = {"step": 10, "loss": 4.5}
LAST = {
    "step": 20, "loss": 3.25, "mfu": 0.31, "memory": 2_000_000, "tokens_per_second": 123_456.0, "grad_norm": None,
    "load": {"2": 1.5, "11": 3.0}, "rows": {"2": 1.0}, "home_rows": {"2": 1.25}, "guests": {"2": 3},
    "guest_bytes": {"2": 4096},
}  # fmt: skip


def test_the_last_whole_record_is_shown_by_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(f'{json.dumps(FIRST)}\n{json.dumps(LAST)}\n{{"step": 30, "lo')
    run(path, "full", once=False)
    assert capsys.readouterr().out.splitlines() == [
        "step 20  loss 3.25  mfu 31.0%  memory 2 MB  tokens_per_second 123 k  grad_norm none",
        "",
        "  layer  load  home rows  rows  guests  guest bytes",
        "      2   1.5       1.25     1       3       4.1 kB",
        "     11     3          -     -       -            -",
    ]
    run(path, "json", once=True)
    shown = json.loads(capsys.readouterr().out)
    assert (shown["step"], shown["figures"]["loss"], shown["layers"]["11"]) == (20, 3.25, {"load": 3.0})


@each_row(
    ("content", "words"),
    [
        (None, "No such file"),
        ("", "no record yet"),
        ('{"step": 1', "no record yet"),
        ('{"loss": 1}\n', "no record of"),
        ("[1]\n", "no record of"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "run.jsonl"
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_text(content)
    with pytest.raises(DiagnosticError, match=words):
        read(path)
