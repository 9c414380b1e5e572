"""`job.metrics`: figures of steps, on one rank."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support.one_rank_jobs import TOKENS
from support.plans import moe_plan, moe_text

import moec
from moec.passes.cost.totals import tally
from moec.runtime.inputs.attended_keys import AttendedKeys
from moec.runtime.job import metrics as metrics_module
from moec.runtime.job.figures import model_flops

CAPACITY = "capacity = factor(0.5)"


def train(job, metrics, steps: int, **figures) -> list:
    model = job.build(seed=1)
    optimizer = job.optimizer(model)
    records = []
    for _ in range(steps):
        loss = job.step(model, TOKENS, TOKENS)
        norm = job.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        records.append(metrics.step(model, loss, grad_norm=norm, optimizer=optimizer, **figures))
    return records


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_measured_step_is_a_line_with_its_figures(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    with moec.launch(moe_plan(ranks=1, ep=1, beside=CAPACITY), device="cpu") as job, job.metrics(path) as metrics:
        train(job, metrics, 2, bits=torch.tensor(1.5))
        model = job.build(seed=1)
        model.train()
        losses = [float(job.step(model, TOKENS, TOKENS))]
        loads, drops = job.expert_loads(model), job.drop_rates(model)
    first, second = lines(path)
    assert [first["step"], second["step"]] == [1, 2]
    assert first["loss"] == losses[0]
    assert first["grad_norm"] > 0
    assert first["lr"] == 1e-3
    assert first["bits"] == 1.5
    assert (first["tokens"], second["tokens"]) == (64, 128)
    skews = {str(layer): float(load.max() / load.float().mean()) for layer, load in loads.items()}
    assert first["load"] == pytest.approx(skews, rel=1e-6)
    assert first["drop_rate"] == {str(layer): rate for layer, rate in drops.items()}
    assert max(first["drop_rate"].values()) > 0
    assert first["memory"] > 2**20
    assert second["seconds"] > first["seconds"]
    assert first["tokens_per_second"] == pytest.approx(64 / first["seconds"], rel=0.2)


def plan_on_a_device(peaks: str, **options: str):
    text = moe_text(ranks=1, ep=1, **options).replace("device = cpu", "device = d")
    return moec.compile(text + f'device "d" {{ kind = cpu; memory = 8GB; bandwidth = 10GB/s; peak {{ {peaks} }} }}\n')


def test_there_is_no_mfu_where_the_device_states_no_peak_in_the_models_dtype():
    with moec.launch(plan_on_a_device("bf16 = 9TFLOPS"), device="cpu") as job, job.metrics("/dev/null") as metrics:
        (record,) = train(job, metrics, 1)
    assert "mfu" not in record


def test_mfu_is_model_flops_over_the_devices_peak_in_the_models_dtype():
    plan = plan_on_a_device("fp32 = 1TFLOPS; bf16 = 9TFLOPS")
    with moec.launch(plan, device="cpu") as job, job.metrics("/dev/null") as metrics:
        (record,) = train(job, metrics, 1)
    flops = tally(plan.program, plan.spec).flops_per_token
    assert record["mfu"] == pytest.approx(record["tokens_per_second"] * flops / 1e12)


@pytest.mark.parametrize("attention", ["mha(heads = 4)", "mha(heads = 4, window = 3)"])
@pytest.mark.parametrize("how", ["short", "segments", "separator", "padding", "padding by id"])
def test_flops_are_those_of_the_lengths_of_the_batchs_texts(attention: str, how: str):
    """Against the cost model for a file whose sequences are as long as the texts: 2, 6 and 8 tokens of 16."""
    words = {"segments": "segments = true", "separator": "separator = 0"}
    words |= {"padding": "segments = true, padding = given", "padding by id": "padding = 0"}
    model = f"context = 16; embedding = tokens({words.get(how, '')})"
    text = moe_text(ranks=1, ep=1, sequence=16, batch=4, model=model, attention=attention)
    plan = moec.compile(text)
    with moec.launch(plan, device="cpu") as job:
        model, tokens = job.build(), torch.arange(64).view(4, 16) % 31 + 1
        if how == "short":
            tokens = tokens[:, :6]
        of_texts = torch.tensor([0] * 2 + [1] * 6 + [2] * 8).expand(4, 16)
        segments, padding = of_texts if how in ("segments", "padding") else None, None
        if how.startswith("padding"):
            tokens[:, :2] = tokens[:, 8:] = 0
            padding = tokens == 0 if how == "padding" else None
        if how == "separator":
            tokens[:, 1] = tokens[:, 7] = 0
        job.step(model, tokens, tokens.roll(1), segments=segments, padding=padding, microbatches=2)
        found = model_flops(plan).of(tokens.numel(), job.attended_keys.totals())
    expected = 0.0
    for length in (2, 6, 8) if how in ("segments", "separator") else (6,):
        same = moec.compile(text.replace("sequence = 16", f"sequence = {length}"))
        expected += tally(same.program, same.spec).flops_per_token * 4 * length
    assert found == pytest.approx(expected, rel=1e-12)


def test_padding_anywhere_is_no_key_and_takes_distance():
    draw = torch.Generator().manual_seed(0)
    tokens, real = torch.ones(3, 32, dtype=torch.int64), torch.rand(3, 32, generator=draw) < 0.6
    segments = (torch.rand(3, 32, generator=draw) < 0.1).cumsum(1)
    plan = moe_plan(ranks=1, ep=1, sequence=32, model="context = 32", attention="mha(heads = 4, window = 5)")
    keys = AttendedKeys(plan.program, plan.spec)
    keys.add(tokens, segments, real.long())
    expected = 0.0
    for row in range(3):
        for i in real[row].nonzero().flatten().tolist():
            seen = [j for j in range(i + 1) if real[row, j] and segments[row, j] == segments[row, i]]
            expected += min(len(seen) - 0.5, sum(i - j < 5 for j in range(i + 1) if real[row, j]))
    assert [reach.window for reach in keys.reaches] == [0, 5]
    counted, _, within = keys.totals()
    assert (counted, within) == (int(real.sum()), expected)


def test_mfu_of_a_loop_by_hand_counts_its_tokens_once():
    """Whatever tokens it tells metrics of: with or without padding, or none."""
    found = []
    for said in (None, 32, 64):
        plan = plan_on_a_device("fp32 = 1TFLOPS", model="embedding = tokens(padding = given)")
        with moec.launch(plan, device="cpu") as job, job.metrics("/dev/null") as metrics:
            model = job.build()
            padding = (torch.arange(8) >= 4).expand(8, 8)
            loss = model(TOKENS, TOKENS.masked_fill(padding, -100), padding=padding).loss
            loss.backward()
            record = metrics.step(model, loss, tokens=said)
        found.append(record["mfu"] * record["seconds"])
    assert found[0] > 0
    assert max(found) < 2 * min(found)  # the clock is read twice


def test_only_every_nth_step_is_measured_and_counts_the_tokens_between(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job, job.metrics(path, every=3) as metrics:
        records = train(job, metrics, 7)
    assert [record is not None for record in records] == [False, False, True, False, False, True, False]
    assert [line["step"] for line in lines(path)] == [3, 6]
    assert [line["tokens"] for line in lines(path)] == [3 * 64, 6 * 64]


def test_without_outputs_nothing_is_measured(monkeypatch: pytest.MonkeyPatch):
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job, job.metrics() as metrics:
        monkeypatch.setattr(metrics_module, "last_pass_loads", None)
        assert train(job, metrics, 2) == [None, None]


def test_a_file_is_appended_to_and_nan_is_null(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    for _ in range(2):
        with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job, job.metrics(path) as metrics:
            model = job.build()
            model(TOKENS)
            metrics.step(model, math.nan, grad_norm=torch.tensor(math.inf), tokens=64)
            assert path.read_text().endswith("}\n"), "a line is flushed at once"
    assert [(line["loss"], line["grad_norm"]) for line in lines(path)] == [(None, None)] * 2


def test_a_resumed_run_goes_on_with_its_steps(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        metrics = job.metrics(path, every=2, start=5)
        train(job, metrics, 3)
        metrics.close()
    assert [line["step"] for line in lines(path)] == [6, 8]


def test_a_run_that_goes_on_says_after_which_step_and_keeps_its_total_of_tokens(tmp_path: Path):
    path = tmp_path / "run.jsonl"

    def run(steps: int) -> None:
        with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
            model = job.build(seed=1)
            job.resume(tmp_path / "saved", model)
            with job.metrics(path) as metrics:
                for _ in range(steps):
                    metrics.step(model, job.step(model, TOKENS, TOKENS))
                    job.checkpoint(tmp_path / "saved", model, every=2)

    run(3)  # the checkpoint is that of step 2
    run(2)
    found = lines(path)
    assert [line["step"] for line in found] == [1, 2, 3, 3, 4]
    assert [line.get("resumed") for line in found] == [None, None, None, 2, None]
    assert [line["tokens"] for line in found] == [64, 128, 192, 64, 128]
    assert [line["total_tokens"] for line in found] == [64, 128, 192, 192, 256]


def accumulated(job, model) -> torch.Tensor:
    with job.accumulate(model, TOKENS):
        loss = model(TOKENS, TOKENS).loss
        loss.backward()
    return loss.detach()


def test_a_loop_of_accumulated_steps_goes_on_with_its_steps(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    for first in (1, 4):
        with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
            model = job.build(seed=1)
            assert job.resume(tmp_path / "saved", model) == first - 1
            with job.metrics(path) as metrics:
                for _ in range(3):
                    metrics.step(model, accumulated(job, model))
            job.checkpoint(tmp_path / "saved", model, every=1)
            assert job.steps == first + 2
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4, 5, 6]
    assert [line["total_tokens"] for line in lines(path)] == [64, 128, 192, 256, 320, 384]
    assert [line.get("resumed") for line in lines(path)] == [None, None, None, 3, None, None]


def test_figures_go_on_where_a_checkpoint_is_loaded_inside_of_the_block(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job, job.metrics(path) as metrics:
        model = job.build(seed=1)
        for step in range(3):
            metrics.step(model, job.step(model, TOKENS, TOKENS))
            if step == 1:
                job.save(tmp_path / "saved" / "2", model).wait()
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job, job.metrics(path) as metrics:
        model = job.build(seed=1)
        job.resume(tmp_path / "saved", model)
        for step in range(2):
            record = metrics.step(model, job.step(model, TOKENS, TOKENS))
            if step == 0:
                assert record["tokens_per_second"] == pytest.approx(64 / record["seconds"], rel=0.2)
        job.load(tmp_path / "saved" / "2", model)
        metrics.step(model, job.step(model, TOKENS, TOKENS), tokens=100)
    found = lines(path)
    assert [line["step"] for line in found] == [1, 2, 3, 3, 4, 3]
    assert [line.get("resumed") for line in found] == [None, None, None, 2, None, 2]
    assert [line["tokens"] for line in found] == [64, 128, 192, 64, 128, 228]
    assert [line["total_tokens"] for line in found] == [64, 128, 192, 192, 256, 228]


def test_steps_that_a_script_gives_are_kept_where_a_checkpoint_is_loaded(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build(seed=1)
        job.step(model, TOKENS, TOKENS)
        job.save(tmp_path / "saved", model).wait()
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job, job.metrics(path, start=1000) as metrics:
        model = job.build(seed=1)
        job.load(tmp_path / "saved", model)
        metrics.step(model, job.step(model, TOKENS, TOKENS))
    assert [line["step"] for line in lines(path)] == [1001]


def test_tokens_that_a_script_counts_are_in_the_total(tmp_path: Path):
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job, job.metrics(tmp_path / "run.jsonl") as metrics:
        model = job.build(seed=1)
        for tokens in (None, 100, None):
            metrics.step(model, job.step(model, TOKENS, TOKENS), tokens=tokens)
        assert job.total_tokens == 64 + 100 + 64


def test_tokens_of_loops_outside_of_job_step_are_given(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job, job.metrics(path, every=2) as metrics:
        model = job.build()
        for _ in range(4):
            model(TOKENS)
            metrics.step(model, 1.0, tokens=1000)
    assert [line["tokens"] for line in lines(path)] == [2000, 4000]


@pytest.mark.parametrize("place", ["no folder", "full disk"])
def test_a_log_that_cannot_be_written_is_named_once_and_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
):
    path = tmp_path / "missing" / "run.jsonl" if place == "no folder" else Path("/dev/full")
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job, job.metrics(path) as metrics:
        records = train(job, metrics, 3)
    written = capsys.readouterr()
    assert written.err.count("MOE0718") == 1
    assert all(records)


def test_tensorboard_has_the_figures_by_name(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job, job.metrics(tensorboard=tmp_path) as metrics:
        records = train(job, metrics, 2)
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert {"loss", "grad_norm", "lr", "tokens_per_second", "load/1", "load/2"} <= set(events.Tags()["scalars"])
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(record["step"], pytest.approx(record["loss"])) for record in records]


def test_tensorboard_keeps_the_curve_before_a_checkpoint_that_is_loaded_inside_of_the_block(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for _ in range(2):
        with (
            moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job,
            job.metrics(tensorboard=tmp_path / "runs") as metrics,
        ):
            model = job.build(seed=1)
            job.resume(tmp_path / "saved", model)
            for _ in range(3):
                metrics.step(model, job.step(model, TOKENS, TOKENS))
                job.checkpoint(tmp_path / "saved", model, every=2)
    events = accumulator.EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("figures", "kind", "words"),
    [
        ({"note": "hello"}, TypeError, "the figure note is 'hello', and must be one number"),
        ({"gates": torch.ones(3)}, TypeError, r"the figure gates is torch.float32 \[3\], and must be one number"),
        ({"gates": [1, 2]}, TypeError, r"the figure gates is \[1, 2\]"),
        ({"perplexity": None}, TypeError, "the figure perplexity is None"),
        ({"grad_norm": "1"}, TypeError, "the figure grad_norm is '1'"),
        ({"load": 1}, ValueError, "the job writes a figure load itself: give yours another name"),
        ({"step": 1}, ValueError, "the job writes a figure step itself"),
    ],
    ids=str,
)
def test_a_figure_that_cannot_be_written_is_named_and_its_step_does_not_count(
    tmp_path: Path, figures: dict, kind: type[Exception], words: str
):
    path = tmp_path / "run.jsonl"
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job, job.metrics(path) as metrics:
        model = job.build()
        loss = job.step(model, TOKENS, TOKENS)
        with pytest.raises(kind, match=words):
            metrics.step(model, loss, **figures)
        record = metrics.step(model, loss, lr=0.5, ratio=np.float32(0.25), flag=True)
    assert [(line["step"], line["lr"], line["ratio"], line["flag"]) for line in lines(path)] == [(1, 0.5, 0.25, 1.0)]
    assert set(record) - {"loss", "lr", "ratio", "flag"} <= metrics_module.OWN_FIGURES


def test_a_record_has_no_name_that_a_script_could_give(tmp_path: Path):
    plan = moe_plan(ranks=1, ep=1, beside=CAPACITY)
    with moec.launch(plan, device="cpu", on_nonfinite="skip") as job, job.metrics("/dev/null") as metrics:
        (record,) = train(job, metrics, 1)
    assert set(record) - {"loss", "grad_norm", "lr"} <= metrics_module.OWN_FIGURES


@pytest.mark.parametrize("start", [-1, "2"])
def test_a_start_that_is_no_number_of_steps_is_refused(start: object):
    with (
        moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job,
        pytest.raises(ValueError, match=f"start must be the number of steps taken before, at least 0, not {start!r}"),
    ):
        job.metrics("/dev/null", start=start)


def test_every_below_one_is_refused():
    with (
        moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job,
        pytest.raises(ValueError, match="a number of steps, at least 1, not 0"),
    ):
        job.metrics(every=0)
