"""What `moec launch --run` shows of the files that ranks write, without ranks."""

from __future__ import annotations

import io
from pathlib import Path

from moec.commands.rank_output import RankOutput

TRACEBACK = "Traceback (most recent call last):\n  File 'a.py'\nValueError: {}\n"


def written(folder: Path, run: str, rank: int, data: bytes, attempt: int = 0) -> Path:
    log = folder / run / f"attempt_{attempt}" / str(rank) / "stderr.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        file.write(data)
    return log


def test_a_traceback_that_the_script_caught_is_shown_with_what_follows(tmp_path: Path):
    shown = io.StringIO()
    output = RankOutput(tmp_path, shown)
    output.start()
    text = TRACEBACK.format("caught") + "and on\n"
    written(tmp_path, "run", 0, text.encode())
    output.finish(None, succeeded=True)
    assert shown.getvalue() == text


def test_an_earlier_run_in_the_same_folder_is_not_shown(tmp_path: Path):
    written(tmp_path, "old", 0, TRACEBACK.format("old").encode(), attempt=1)
    shown = io.StringIO()
    output = RankOutput(tmp_path, shown)
    output.start()
    log = written(tmp_path, "a_new_one", 1, TRACEBACK.format("new").encode())
    output.finish(1)
    assert shown.getvalue() == "rank 1 has raised an exception:\n" + TRACEBACK.format("new")
    assert output.logs() == [log]


def test_letters_that_come_in_two_pieces_stay_whole(tmp_path: Path):
    shown = io.StringIO()
    output = RankOutput(tmp_path, shown)
    for byte in "schön — 東京\n".encode():
        written(tmp_path, "run", 0, bytes([byte]))
        output._poll()
    assert shown.getvalue() == "schön — 東京\n"


def test_a_progress_bar_is_shown_before_its_line_ends(tmp_path: Path):
    shown = io.StringIO()
    output = RankOutput(tmp_path, shown)
    written(tmp_path, "run", 0, b"\r 10%\r 20%")
    output._poll()
    assert shown.getvalue() == "\r 10%\r"
    written(tmp_path, "run", 0, b"\r100%\r\nnext\n")
    output._poll()
    assert shown.getvalue() == "\r 10%\r 20%\r100%\r\nnext\n"
