"""The example files compile, and the example script trains one of them, shows it, and measures it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import demo
import pytest
import train

import moec
from moec.runtime.job import progress_display

EXAMPLES = Path(demo.__file__).parent


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.moe")), ids=lambda file: file.stem)
def test_every_example_compiles(file: Path) -> None:
    plan = moec.compile(file)
    assert plan.name == file.stem


def test_the_demo_is_for_as_many_ranks_as_it_starts() -> None:
    assert moec.compile(EXAMPLES / "tiny.moe").world_size == demo.RANKS


@pytest.fixture
def small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Arguments for `train.main` that train a small plan for a few steps; returns the result file."""
    plan, data, result = tmp_path / "first.plan", tmp_path / "data.txt", tmp_path / "result.json"
    moec.compile(EXAMPLES / "first.moe").save(plan)
    data.write_text("the cat sat on the mat and the dog sat on the log\n" * 200)
    monkeypatch.setattr(train, "SAMPLE_BYTES", 20)
    monkeypatch.setattr(train, "REPORT_EVERY", 2)
    monkeypatch.setattr(progress_display, "SECONDS_BETWEEN_LINES", 0.0)
    arguments = [str(plan), "--data", str(data), "--steps", "60", "--result", str(result)]
    arguments += ["--metrics", str(tmp_path / "run.jsonl")]
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    return result


def test_the_script_trains_and_reports(small_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train.main()
    result = json.loads(small_run.read_text())
    assert result["steps"] == 60
    assert result["bits_per_byte"] < 0.9 * result["unigram_bits_per_byte"]
    out = capsys.readouterr().out
    assert "data.txt: 1 file, 9,500 bytes to train on and 500 held out" in out
    assert "experts by layer  0: " in out
    assert "bits_per_byte" in out
    lines = [json.loads(line) for line in (small_run.parent / "run.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(2, 61, 2))
    assert lines[-1]["bits_per_byte"] < lines[0]["bits_per_byte"]
    assert "a sample" in out


def test_the_script_says_in_one_line_that_there_is_no_text(small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [word.replace("data.txt", "nothing.txt") for word in sys.argv])
    with pytest.raises(SystemExit) as exit_:
        train.main()
    assert str(exit_.value).startswith("--data: cannot read ")


def test_the_demo_looks_at_the_data_before_it_does_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo.py", "--data", "/nowhere"])
    with pytest.raises(SystemExit, match="--data: cannot read /nowhere: No such file or directory"):
        demo.main()
    assert capsys.readouterr().out == ""


def test_the_demo_fails_where_the_model_has_not_learnt(capsys: pytest.CaptureFixture[str]) -> None:
    demo.conclude({"bits_per_byte": 3.0, "unigram_bits_per_byte": 4.8}, 100)
    assert "0.62 × the unigram entropy" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="too little training"):
        demo.conclude({"bits_per_byte": 4.0, "unigram_bits_per_byte": 4.8}, 100)


def test_the_learning_rate_rises_then_falls() -> None:
    rates = [train.learning_rate(step / 100) for step in range(101)]
    peak = rates.index(max(rates))
    assert 0 < rates[0] < 0.1
    assert rates[peak] == pytest.approx(1, abs=0.05)
    assert 4 <= peak <= 6
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(train.FINAL_LR)


def test_a_sample_never_disturbs_the_terminal() -> None:
    assert train.printable(b"ok\n\ty\x1b[2J\xff") == "ok\n    y·[2J�"
