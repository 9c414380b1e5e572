"""Fitting the model's constants: planted ones are found again, through noise, and from lines as they are stored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import product
from math import log
from pathlib import Path

import calibrate_kernels
import numpy as np
import pytest
from kernel_fit import Measurement, calibrate, read_measurements, report, residuals, stored
from pydantic import ValidationError

from moec.codegen.kernels.model import model_calibration
from moec.codegen.kernels.model.model_calibration import StoredModel, device_model
from moec.codegen.kernels.model.model_device import DEVICES, FREE, DeviceModel
from moec.codegen.kernels.tiles import KERNELS

H200 = DEVICES["h200"]
PLANTED = {
    "matrix_efficiency": 0.7,
    "library_efficiency": 0.8,
    "l2_bandwidth": 9e12,
    "memory_bandwidth": 3.8e12,
    "load_latency": 1400.0,
    "tile_clocks": 2000.0,
    "lane_efficiency": 0.35,
}
TRUTH = H200.with_constants(PLANTED, "planted")
LAYERS = ((128, 2048, 768, 8), (8, 4096, 14336, 2))
WAYS = ("128x128x64w8s2", "128x128x64w8s3", "128x256x64w8s3", "64x128x64w4s4", "grouped_mm")


@cache
def measured() -> tuple[Measurement, ...]:
    """Every kernel in several ways, timed by the planted constants."""
    found = []
    for (experts, dim, hidden, k), tokens, kernel, way in product(LAYERS, (512, 8192), KERNELS, WAYS):
        row = Measurement(
            device="h200",
            kernel=kernel,
            way=way,
            experts=experts,
            dim=dim,
            hidden=hidden,
            gated=True,
            dtype="bf16",
            k=k,
            tokens=tokens,
            ms=1,
        )
        found.append(row.model_copy(update={"ms": row.predicted(TRUTH)}))
    return tuple(found)


def mean_error(model: DeviceModel, rows: tuple[Measurement, ...]) -> float:
    found = residuals(model, rows)
    return sum(abs(log(each.ratio)) for each in found) / len(found)


def test_planted_constants_are_found_again() -> None:
    fitted = calibrate(H200, measured())
    assert {name: getattr(fitted, name) for name in FREE} == pytest.approx(PLANTED, rel=0.02)
    assert mean_error(H200, measured()) > 0.1
    assert mean_error(fitted, measured()) < 1e-3
    assert fitted.origin == f"calibrated from {len(measured())} measurements on h200"


def test_noise_moves_constants_by_little() -> None:
    noise = np.random.default_rng(0).normal(1, 0.03, len(measured()))
    rows = tuple(row.model_copy(update={"ms": row.ms * by}) for row, by in zip(measured(), noise, strict=True))
    fitted = calibrate(H200, rows)
    assert {name: getattr(fitted, name) for name in FREE} == pytest.approx(PLANTED, rel=0.1)
    assert mean_error(fitted, rows) < 0.03


def test_constants_that_no_measurement_depends_on_stay() -> None:
    rows = tuple(row for row in measured() if row.way == "grouped_mm" and row.tokens == 8192 and row.kernel == "down")
    fitted = calibrate(H200, rows)
    assert mean_error(fitted, rows) < 0.01
    for name in ("matrix_efficiency", "tile_clocks"):
        assert getattr(fitted, name) == pytest.approx(getattr(H200, name), rel=1e-6)


def test_without_measurements_nothing_changes() -> None:
    assert calibrate(H200, ()) is H200
    assert H200.origin.startswith("not calibrated")
    assert list(report(H200, ())) == [f"h200: {H200.origin}"]


def test_lines_of_other_kinds_and_devices_and_a_cut_off_line_are_skipped() -> None:
    row = measured()[0]
    lines = [
        json.dumps({"ceiling": "copy", "bytes_per_second": 4.3e12}),
        json.dumps({**row.model_dump(), "seed": 3}),
        json.dumps(row.model_copy(update={"device": "h100"}).model_dump()),
        "[1, 2]",
        json.dumps(row.model_dump())[:-7],
    ]
    assert read_measurements("\n".join(lines), "h200") == (row,)


def test_the_report_names_the_worst_measurement_first() -> None:
    odd = measured()[3].model_copy(update={"ms": measured()[3].ms * 4})
    rows = (*measured()[:3], odd)
    lines = list(report(TRUTH, rows))
    assert lines[0] == "h200: planted"
    assert lines[1].startswith("mean error 18.8% over 4")
    worst = next(line for line in lines if "the measured" in line)
    assert worst.startswith("  0.25 x the measured")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of stored models."""
    monkeypatch.setattr(model_calibration, "FOLDER", tmp_path / "tuned")
    device_model.cache_clear()
    yield tmp_path / "tuned"
    device_model.cache_clear()


def test_a_stored_model_is_read_back_and_named(folder: Path) -> None:
    kept = stored(TRUTH, measured())
    folder.mkdir()
    (folder / "h200.model.json").write_text(kept.model_dump_json())
    known, plain = device_model("h200"), device_model("h100")
    assert known is not None
    assert (known, known.origin) == (
        TRUTH, f"calibrated from {len(measured())} measurements on h200, mean error 0%"
    )  # fmt: skip
    assert plain is DEVICES["h100"]
    assert device_model("toy") is None


def test_a_stored_model_is_bounded_numbers(folder: Path) -> None:
    constants = {**PLANTED, "clock": 1e9}
    for wrong in (constants, {**PLANTED, "load_latency": -1}, {**PLANTED, "load_latency": float("inf")}):
        with pytest.raises(ValidationError):
            StoredModel(device="h200", measurements=3, mean_error=0.1, constants=wrong)


def test_measured_lines_become_a_stored_model(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tmp_path / "gpu.jsonl"
    lines.write_text("".join(f"{row.model_dump_json()}\n" for row in measured()))
    assert calibrate_kernels.main([str(lines), "--device", "h100"]) == 1
    assert calibrate_kernels.main([str(lines), "--write"]) == 0
    said = capsys.readouterr().out
    assert "h200: not calibrated" in said
    assert f"h200: calibrated from {len(measured())} measurements on h200" in said
    assert [file.name for file in folder.iterdir()] == ["h200.model.json"]
    fitted = device_model("h200")
    assert fitted is not None
    assert fitted.l2_bandwidth == pytest.approx(PLANTED["l2_bandwidth"], rel=0.02)
