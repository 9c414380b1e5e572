"""`job.progress`: the display of training, on one rank."""

import io
import os
import pty
import time

import pytest
import torch
from rich.console import Console
from support.one_rank_jobs import TOKENS
from support.plans import moe_plan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import moec
from moec.runtime.job import progress_display
from moec.runtime.job.progress_display import LiveDisplay, PlainDisplay, StepFigures

SHOWN = StepFigures(
    step=3, total=4, done=0.5, figures={"loss": 1.25}, tokens_per_second=10.0, steps_per_second=1.0, mfu=0.4,
    seconds_left=125.0, loads={1: torch.tensor([1, 3])},
)  # fmt: skip


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_display, "SECONDS_BETWEEN_LINES", 0.0)


def steps_of(printed: str) -> list[int]:
    return [int(line.split("step")[1].split()[0].replace(",", "")) for line in printed.splitlines()]


@pytest.mark.usefixtures("every_step")
def test_a_loop_shows_fraction_step_loss_norm_tokens_and_time_left(job, capsys):
    model = job.build()
    optimizer = job.optimizer(model)
    progress = job.progress(4)
    for step in progress:
        loss = job.step(model, TOKENS, TOKENS)
        norm = job.clip_grad_norm_(model, 1.0)
        progress.step(loss, grad_norm=norm, optimizer=optimizer, bits=2.0)
        assert step < 4
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith(" 25%   step     1 of 4   loss ")
    assert "grad_norm " in first
    assert "bits 2   lr 0.001   " in first
    assert first.endswith(" left")
    assert "tokens/s" in first
    assert last.startswith("100%   step     4 of 4   loss ")
    assert "left" not in last


def test_without_a_terminal_a_line_comes_every_ten_seconds_and_one_at_the_end(job, capsys, monkeypatch):
    assert progress_display.SECONDS_BETWEEN_LINES == 10.0
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for step in job.progress(25):
        now += 1 if step < 24 else 0
    assert steps_of(capsys.readouterr().out) == [1, 11, 21, 25]


def test_a_block_counts_its_steps_and_ends_once(job, capsys):
    with job.progress(total=8) as progress:
        progress.step(1.0)
        progress.step(0.5, done=0.75)
    progress.close()
    printed = capsys.readouterr().out
    assert steps_of(printed) == [1, 2]
    assert printed.startswith(" 12%")
    assert "\n 75%" in printed


def test_a_range_goes_on_from_its_start(job, capsys):
    for _ in job.progress(range(6, 8)):
        pass
    assert steps_of(capsys.readouterr().out) == [7, 8]


@pytest.mark.usefixtures("every_step")
def test_a_resumed_run_shows_its_own_steps_with_the_range_that_the_guide_has(job, capsys, tmp_path):
    model = job.build()
    optimizer = job.optimizer(model)
    for _ in range(3):
        job.step(model, TOKENS, TOKENS)
    job.save(tmp_path / "3", model, optimizer).wait()
    first = job.resume(tmp_path, model, optimizer)
    assert list(job.progress(range(first, 5))) == [3, 4]
    first_line, last_line = capsys.readouterr().out.splitlines()
    assert "step     4 of 5 " in first_line
    assert "step     5 of 5 " in last_line


@pytest.mark.usefixtures("every_step")
def test_batches_of_any_kind_are_given_through_and_a_second_loop_begins_anew(job, capsys):
    assert list(job.progress(iter("ab"))) == ["a", "b"]
    assert "%" not in capsys.readouterr().out
    progress = job.progress(["x", "y"])
    assert [*progress, *progress] == ["x", "y", "x", "y"]
    assert steps_of(capsys.readouterr().out) == [1, 2, 1, 2]


def test_a_loader_without_a_length_has_no_bar(job, capsys):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(2))

    assert len(list(job.progress(torch.utils.data.DataLoader(Stream(), batch_size=1)))) == 2
    assert "%" not in capsys.readouterr().out


def test_an_error_in_the_loop_ends_the_display_with_the_job(capsys):
    def fail_in_step_1() -> None:
        with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
            progress = job.progress(9)
            for step in progress:
                progress.step(0.25 / (1 - step))
                progress.step(0.25)

    with pytest.raises(ZeroDivisionError):
        fail_in_step_1()
    assert "loss 0.25" in capsys.readouterr().out


@pytest.mark.usefixtures("every_step")
def test_loads_are_shown_until_the_next(job, capsys):
    model = job.build()
    with job.progress() as progress:
        loss = job.step(model, TOKENS, TOKENS)
        progress.step(loss, loads=job.expert_loads(model))
        progress.step(loss)
    assert capsys.readouterr().out.count("experts by layer  1: ") == 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: p.step("low"), "the figure loss is 'low', and must be one number"),
        (lambda p: p.step(torch.ones(2)), r"the figure loss is torch.float32 \[2\]"),
        (lambda p: p.step(1.0, done=7), "done must be the fraction of the training, 0 to 1, not 7"),
        (lambda p: p.step(1.0, done=float("nan")), "done must be the fraction"),
        (lambda p: iter(p).__next__(), "nothing to iterate over"),
    ],
    ids=["text", "vector", "seven", "nan", "loop"],
)
def test_what_cannot_be_shown_is_refused(job, call, words):
    with pytest.raises(ValueError, match=words):
        call(job.progress())


@pytest.mark.parametrize("steps", ["-1", -1, 1.5, True])
def test_steps_are_a_number_or_something_to_iterate_over(job, steps):
    with pytest.raises(ValueError, match="steps must be a number of steps or something to iterate over"):
        job.progress(steps)


def test_a_dtensor_is_refused_for_one_rank_alone_would_read_it(job):
    value = DTensor.from_local(torch.ones(()), init_device_mesh("cpu", (1,)), run_check=False)
    with pytest.raises(ValueError, match="loss is a DTensor"):
        job.progress().step(value)


def test_bars_and_spread_are_relative_to_a_fair_share():
    counts = torch.tensor([0, 10, 20, 10])
    assert progress_display.bars(counts) == " ▄█▄"
    assert progress_display.spread(counts) == "0.0–2.0×"
    assert progress_display.spread(torch.zeros(4, dtype=torch.int64)) == "0.0–0.0×"


@pytest.mark.parametrize(("seconds", "text"), [(7, "0:07"), (750, "12:30"), (11_109, "3:05:09"), (183_900, "2 d 3:05")])
def test_a_clock_has_the_units_that_matter(seconds, text):
    assert progress_display.clock(seconds) == text


def test_a_terminal_shows_a_bar_and_a_row_per_layer():
    display, shown = LiveDisplay(), io.StringIO()
    display.write(SHOWN)
    Console(file=shown, width=120).print(display._live.renderable)
    display.close()
    assert "50%  step     3 of 4   loss 1.25        10 tokens/s   MFU 40.0%   2:05 left" in shown.getvalue()
    assert "experts of layer 1" in shown.getvalue()


def test_a_second_display_on_a_terminal_has_lines_and_a_dumb_terminal_too(monkeypatch):
    primary, secondary = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(secondary, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        first, second = progress_display.make_display(), progress_display.make_display()
        assert (type(first), type(second)) == (LiveDisplay, PlainDisplay)
        first.close()
        monkeypatch.setenv("TERM", "dumb")
        assert type(progress_display.make_display()) is PlainDisplay
    os.close(primary)


def test_a_display_that_cannot_be_written_is_named_once_and_training_goes_on(job, capsys, monkeypatch):
    def write(display: PlainDisplay, shown: StepFigures) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(PlainDisplay, "write", write)
    assert list(job.progress(3)) == [0, 1, 2]
    assert capsys.readouterr().err.count("MOE0718") == 1
