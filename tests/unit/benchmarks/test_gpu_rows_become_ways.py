"""`benchmarks/gpu_tuned.py` and `gpu_report.py`: from rows to shipped ways and tables."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_report
import pytest
from gpu_rows import RowFile
from gpu_tuned import write

from moec.codegen.kernels.stored_tiles import StoredTiles, key_of
from moec.codegen.kernels.tiles import KERNELS, ROW_KERNELS

LOW, HIGH, OTHER = "64x128x64w8s3", "128x128x64w8s3", "128x64x64w4s3"
LAYER = {"experts": 8, "dim": 4096, "hidden": 14336, "gated": True, "dtype": "bf16", "k": 2, "tokens": 8192}


def row(kernel: str, way: str, ms: float, **more: Any) -> dict[str, Any]:
    given = {"part": "b", "key": f"b {kernel} {way}", "on": "cuda", "device": "h200", "triton": "3.6.0"}
    return given | LAYER | {"kernel": kernel, "way": way, "ms": ms, "usual": way == HIGH} | more


def measured(low: float) -> Iterator[dict[str, Any]]:
    """Every product in three tiles and by the library; 64 rows take `low` ms."""
    for kernel in KERNELS:
        yield row(kernel, HIGH, 1.0)
        yield row(kernel, LOW, low)
        yield row(kernel, OTHER, 0.99)
        yield row(kernel, "grouped_mm", 0.5 if kernel == "up" else 2.0)


def stored(rows: Any, folder: Path) -> StoredTiles:
    (path,) = write(list(rows), folder)
    assert path == folder / "h200.json"
    return StoredTiles.model_validate_json(path.read_bytes())


def test_the_fastest_ways_whose_tiles_share_a_table_are_stored(tmp_path: Path) -> None:
    found = stored(measured(low=0.8), tmp_path)
    (entry,) = found.entries
    assert entry.key == key_of("bf16", 16384, 8, (4096, 14336), True)
    assert entry.up == "grouped_mm"
    assert {getattr(entry, kernel) for kernel in KERNELS if kernel != "up"} == {LOW}
    assert entry.measured is not None
    assert (entry.measured.default_ms, entry.measured.ms) == (6.0, pytest.approx(0.5 + 5 * 0.8))
    assert found.triton == "3.6.0"


def test_a_way_that_is_hardly_faster_leaves_the_default(tmp_path: Path) -> None:
    (entry,) = stored(measured(low=1.5), tmp_path).entries
    assert {getattr(entry, kernel) for kernel in KERNELS if kernel != "up"} == {HIGH}


def test_one_product_alone_does_not_lower_the_tiles_of_all(tmp_path: Path) -> None:
    rows = [row(kernel, HIGH, 1.0) for kernel in KERNELS]
    rows += [row(kernel, LOW, 0.1 if kernel == "up" else 1.5) for kernel in ROW_KERNELS]
    (entry,) = stored(rows, tmp_path).entries
    assert {getattr(entry, kernel) for kernel in KERNELS} == {HIGH}


def test_layers_without_all_products_and_entries_that_nobody_measured_are_not_stored(tmp_path: Path) -> None:
    stored(measured(low=0.8), tmp_path)
    half = [row(kernel, HIGH, 1.0, dim=2048) for kernel in KERNELS[:3]]
    kept = stored([*half, *(row(kernel, HIGH, 1.0, dim=7168) for kernel in KERNELS)], tmp_path)
    assert [entry.dim for entry in kept.entries] == [4096, 7168]
    text = kept.model_copy(update={"entries": (kept.entries[0].model_copy(update={"measured": None}),)})
    (tmp_path / "h200.json").write_text(text.model_dump_json())
    again = stored((row(kernel, HIGH, 1.0, dim=7168) for kernel in KERNELS), tmp_path)
    assert [entry.dim for entry in again.entries] == [7168]


def layer_row(impl: str, ms: float) -> dict[str, Any]:
    times = {"forward_ms": ms, "backward_ms": 2 * ms, "forward_tflops": 300.0, "backward_tflops": 200.0}
    launched = {"launched_forward_ms": 2 * ms, "launched_backward_ms": 4 * ms, "peak_mb": 100.0}
    return {"part": "c", "key": f"c {impl}", "on": "cuda", "shape": "T8", "impl": impl, **times, **launched}


def test_a_report_compares_each_layer_with_the_fastest_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = RowFile(tmp_path / "rows.jsonl")
    for one in (layer_row("moec", 0.9), layer_row("Liger", 1.0), layer_row("ScatterMoE", 2.0), layer_row("dense", 0.1)):
        file.append(one)
    for one in measured(low=0.8):
        file.append({**one, "shape": "T8", "tflops": math.pi})
    file.append({"part": "c", "key": "c transformers", "on": "cuda", "failed": "killed by SIGKILL"})
    gpu_report.main([file.path], [], None)
    said = capsys.readouterr().out
    assert "| T8 | moec | 0.900 / 1.800 | 300 / 200 | 0.90 | 5.400 | 0.90 | 100 |" in said
    assert "| T8 | ScatterMoE | 2.000 / 4.000 | 300 / 200 | 2.00 |" in said
    assert f"| T8 | up | 4 | {HIGH}: 1.000 | 2.00 | grouped_mm | 0.500 | 3 |" in said
    assert "- c transformers: killed by SIGKILL" in said


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no such file"):
        gpu_report.main([tmp_path / "none.jsonl"], [], None)
