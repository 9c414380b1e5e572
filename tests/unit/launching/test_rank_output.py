"""What `moec launch --run` shows of the files that ranks write, without ranks."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from moec.commands.console import last_words
from moec.commands.console.rank_output import RankOutput

TRACEBACK = "Traceback (most recent call last):\n  File 'a.py'\nValueError: {}\n"


def written(folder: Path, run: str, rank: int, data: bytes, attempt: int = 0) -> Path:
    log = folder / run / f"attempt_{attempt}" / str(rank) / "stderr.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        file.write(data)
    return log


def test_a_traceback_that_the_script_caught_is_shown_with_what_follows(tmp_path: Path):
    shown = io.StringIO()
    output = RankOutput(tmp_path, "run", shown)
    output.start()
    text = TRACEBACK.format("caught") + "and on\n"
    written(tmp_path, "run_x", 0, text.encode())
    output.finish(None, succeeded=True)
    assert shown.getvalue() == text


def test_another_run_in_the_same_folder_is_not_shown(tmp_path: Path):
    written(tmp_path, "old_x", 0, TRACEBACK.format("old").encode(), attempt=1)
    shown = io.StringIO()
    output = RankOutput(tmp_path, "run", shown)
    output.start()
    written(tmp_path, "later_x", 1, TRACEBACK.format("later").encode(), attempt=2)
    log = written(tmp_path, "run_x", 1, TRACEBACK.format("new").encode())
    output.finish(1)
    assert shown.getvalue() == "rank 1 has raised an exception:\n" + TRACEBACK.format("new")
    assert output.logs() == [log]


def test_letters_that_come_in_two_pieces_stay_whole(tmp_path: Path):
    shown = io.StringIO()
    output = RankOutput(tmp_path, "run", shown)
    for byte in "schön — 東京\n".encode():
        written(tmp_path, "run_x", 0, bytes([byte]))
        output._poll()
    assert shown.getvalue() == "schön — 東京\n"


def test_a_progress_bar_is_shown_before_its_line_ends(tmp_path: Path):
    shown = io.StringIO()
    output = RankOutput(tmp_path, "run", shown)
    written(tmp_path, "run_x", 0, b"\r 10%\r 20%")
    output._poll()
    assert shown.getvalue() == "\r 10%\r"
    written(tmp_path, "run_x", 0, b"\r100%\r\nnext\n")
    output._poll()
    assert shown.getvalue() == "\r 10%\r 20%\r100%\r\nnext\n"


def ended(folder: Path, texts: dict[int, str], failed: int, status: int, **options: set[int]) -> tuple[str, bool, str]:
    """What is shown of ranks that wrote `texts`, whether that explains rank `failed`, and its last line."""
    shown = io.StringIO()
    output = RankOutput(folder, "run", shown)
    output.start()
    for rank, text in texts.items():
        written(folder, "run_x", rank, text.encode())
    explained = output.finish(failed, status, **options)
    return shown.getvalue(), explained, output.last_line(failed)


CAUGHT = TRACEBACK.format("caught")
MINE = TRACEBACK.format("mine")
MARKED = "".join(f"[rank0]: {line}\n" for line in TRACEBACK.format("two\nlines").splitlines())
CHAIN = CAUGHT + "\nDuring handling of the above exception, another exception occurred:\n\n" + MINE
GROUP = "  + Exception Group Traceback (most recent call last):\n  | ExceptionGroup: both (1 sub-exception)\n"
GROUP += "  +-+---------------- 1 ----------------\n    | Traceback (most recent call last):\n    | KeyError: 1\n"
GROUP += "    +------------------------------------\n"
HANDLED = "error[MOE0600]: no such plan\n  no folder x\nhelp: compile it\n"
VERDICT = "error[MOE0705]: a rank has died or stalled\n  rank 1 no longer answers\n"
RAISED = "rank {} has raised an exception:\n"


@pytest.mark.parametrize("status", [-9, 5, 1])
def test_a_caught_traceback_explains_no_other_end(tmp_path: Path, status: int):
    text = CAUGHT + ("going on\n" if status == 1 else "")
    shown, explained, last = ended(tmp_path, {1: text}, 1, status)
    assert not explained
    assert shown == "rank 1 wrote, before it ended:\n" + text
    assert last == ("going on" if status == 1 else "ValueError: caught")


@pytest.mark.parametrize("status", [-9, 5, 1])
def test_a_diagnostic_that_was_handled_explains_no_other_end(tmp_path: Path, status: int):
    text = HANDLED + ("going on\n" if status == 1 else "")
    assert ended(tmp_path, {0: "", 1: text}, 1, status)[:2] == (text, False)


@pytest.mark.parametrize(("seconds", "explains"), [(0.0, True), (60.0, False)])
def test_a_diagnostic_of_another_rank_explains_nothing_that_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, explains: bool
):
    output, now = RankOutput(tmp_path, "run", io.StringIO()), 1000.0
    monkeypatch.setattr(last_words.time, "monotonic", lambda: now)
    written(tmp_path, "run_x", 0, HANDLED.encode())
    output._poll()
    now += seconds
    written(tmp_path, "run_x", 1, b"going on\n")
    output.start()
    assert output.finish(1, 1) == explains


@pytest.mark.parametrize("status", [5, 1])
def test_a_caught_traceback_of_another_rank_explains_nothing(tmp_path: Path, status: int):
    assert ended(tmp_path, {0: CAUGHT, 1: "bad config\n"}, 1, status) == ("bad config\n", False, "bad config")


@pytest.mark.parametrize("text", [MINE, CHAIN, GROUP, MINE + "[W1125 10:00:00.1 a.cpp:3] Warning: at exit\n"])
def test_an_uncaught_exception_is_shown_whole(tmp_path: Path, text: str):
    assert ended(tmp_path, {1: text}, 1, 1)[:2] == (RAISED.format(1) + text, True)


def test_what_came_before_an_exception_stands_before_its_rank(tmp_path: Path):
    shown, explained, _ = ended(tmp_path, {1: CAUGHT + "going on\n" + MINE}, 1, 1)
    assert explained
    assert shown == CAUGHT + "going on\n" + RAISED.format(1) + MINE


@pytest.mark.parametrize("bar", [" 66%|###", "\rep: 66%|###"])
def test_an_exception_behind_an_unfinished_line_is_found(tmp_path: Path, bar: str):
    shown, explained, _ = ended(tmp_path, {1: f"{bar}{MINE}\rep: 66%|###\n"}, 1, 1)
    assert explained
    assert shown == f"{bar}\n{RAISED.format(1)}{MINE}\rep: 66%|###\n"


def test_an_exception_that_torch_has_marked_explains_the_end_of_another_rank(tmp_path: Path):
    shown, explained, _ = ended(tmp_path, {0: MARKED + "at exit\n", 1: "step 1\n"}, 1, 1)
    assert explained
    assert RAISED.format(0) + TRACEBACK.format("two\nlines") in shown


def test_an_exception_of_a_rank_that_ended_with_1_explains_the_end_of_another(tmp_path: Path):
    assert ended(tmp_path, {0: MINE, 1: ""}, 1, 1, raised={0, 1})[:2] == (RAISED.format(0) + MINE, True)


@pytest.mark.parametrize(("status", "explained"), [(1, True), (-9, False)])
def test_a_verdict_is_shown_and_explains_no_signal(tmp_path: Path, status: int, explained: bool):
    assert ended(tmp_path, {0: " 66%|##" + VERDICT, 1: ""}, 1, status)[:2] == (" 66%|##\n" + VERDICT, explained)


def test_a_diagnostic_of_rank_0_explains_ranks_that_leave_it_to_rank_0(tmp_path: Path):
    assert ended(tmp_path, {0: HANDLED, 1: ""}, 1, 1)[:2] == (HANDLED, True)


def test_the_newest_line_on_the_screen_is_known_by_its_rank(tmp_path: Path):
    shown = io.StringIO()
    output = RankOutput(tmp_path, "run", shown)
    written(tmp_path, "run_x", 1, b"bad config\n")
    output._poll()
    assert (output.shows_last_line(1), output.shows_last_line(0)) == (True, False)
    written(tmp_path, "run_x", 0, b"on and on\n")
    output._poll()
    assert (output.shows_last_line(1), output.shows_last_line(0)) == (False, True)


UNREACHED = "[E1126 07:57:23.892614679 ProcessGroupGloo.cpp:67] Gloo connectFullMesh failed with [1]\n"


@pytest.mark.parametrize("prefix", ["", "[rank0]:"])
def test_an_exception_explains_what_torch_logs_of_the_rank_that_is_gone(tmp_path: Path, prefix: str):
    shown, explained, _ = ended(tmp_path, {0: "on\n" + prefix + UNREACHED, 1: MINE}, 1, 1)
    assert (shown, explained) == ("on\nrank 1 has raised an exception:\n" + MINE, True)


def test_torchs_errors_are_shown_where_nothing_else_explains_the_end(tmp_path: Path):
    shown, explained, last = ended(tmp_path, {0: UNREACHED, 1: "on\n"}, 1, -9)
    assert (shown, explained, last) == ("on\n" + UNREACHED, False, "on")


def test_torchs_errors_are_shown_at_the_end_of_a_run_that_goes_on(tmp_path: Path):
    shown = io.StringIO()
    output = RankOutput(tmp_path, "run", shown)
    written(tmp_path, "run_x", 0, UNREACHED.encode())
    output._poll()
    assert shown.getvalue() == ""
    output._poll()
    next(iter(output._logs.values())).torch_since -= 31
    output._poll()
    assert shown.getvalue() == UNREACHED
    output.start()
    output.finish(None, succeeded=True)
    assert shown.getvalue() == UNREACHED
