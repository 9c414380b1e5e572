"""`moec inspect PLAN --kernels`: shapes, the compiler's statistics, and the work under a roofline."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from pydantic import TypeAdapter
from support.layer_predictions import predict_layer
from support.plans import moe_plan

from moec.cli import app
from moec.codegen.kernels.model.model_device import DEVICES
from moec.codegen.kernels.model.model_loads import Load
from moec.codegen.kernels.plan_kernels import products_of
from moec.codegen.kernels.product_shapes import DownShape, UpShape
from moec.codegen.kernels.row_shapes import PlacesShape, QueuesShape
from moec.codegen.kernels.stored_tiles import Entry, StoredTiles
from moec.codegen.kernels.tiles import KERNELS, Tile, Ways
from moec.codegen.kernels.work import work_of
from moec.commands.inspecting.inspect_documents import KernelsDocument
from moec.commands.inspecting.inspect_kernels import HEAD, run
from moec.commands.inspecting.kernel_listing import KernelListing
from moec.driver import compile as compile_source
from moec.passes.ir import Value
from moec.passes.ir.work.formulas import experts_work
from moec.passes.ir.work.workload import Workload
from moec.runtime.backends import BackendError

SMALL = """
device "toy" { kind = cuda; memory = 80GB; bandwidth = 1TB/s; peak { fp32 = 1TFLOPS } }
model "small" {
  vocab = 64
  dim   = 64
  depth = 1
  dtype = fp32
  layers {
    attention = mha(heads = 2)
    moe { experts = 4 * gelu(32); gate = topk(2) }
  }
}
cluster "one" { device = "toy"; level "gpu" { size = 1 } }
train { batch = 2; sequence = 64; optimizer = adamw(lr = 1e-2) }
"""
TILE = Tile(16, 16, 16, 4, 2)
WAYS = Ways(*[TILE] * 6)
EXPERTS = experts_work(
    100,
    25,
    [Value(name=name, shape=shape, dtype="fp32") for name, shape in (("up", (4, 2, 32, 64)), ("down", (4, 64, 32)))],
    Workload(batch=1, sequence=50),
    forward=3,
    backward=4,
)
COUNTED = {"experts": 4, "dim": 64, "hidden": 32, "dtype": "fp32", "gathered": False, "k": 0}


def _rows(lines: list[str]) -> list[list[str]]:
    """The rows under the line of headings, with a dash for each column that is left out."""
    split = [re.split(r"  +", line.strip()) for line in lines]
    start = next(index for index, row in enumerate(split) if row[0] == "kernel")
    titles = split[start]
    named = [dict(zip(titles, row, strict=True)) for row in split[start + 1 :] if len(row) == len(titles)]
    return [[row.get(title, "-") for title in HEAD] for row in named]


def _cells(lines: list[str]) -> dict[str, list[str]]:
    """The rows by kernel."""
    return {row[0]: row for row in _rows(lines)}


@pytest.mark.parametrize(
    ("has", "why"),
    [("", "Triton is not installed"), ("3.5.1", "the kernels need Triton 3.6 to 3.9, and 3.5.1 is installed")],
)
def test_a_triton_that_cannot_compile_them_is_a_diagnostic(
    tmp_path: Path, has: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = compile_source(SMALL).save(tmp_path / "small.plan")
    if has:
        monkeypatch.setattr("triton.__version__", has)
    else:
        monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(BackendError, match=f"MOE0707.*`moec inspect --kernels` compiles them, but {why}") as refused:
        run(folder, "full")
    assert refused.value.diagnostics[0].help == "install Triton 3.6 to 3.9"


def test_every_kernel_is_listed_with_what_it_takes_and_what_bounds_it(tmp_path: Path) -> None:
    folder = compile_source(SMALL).save(tmp_path / "small.plan")
    done = CliRunner().invoke(app, ["inspect", str(folder), "--kernels"])
    assert done.exit_code == 0, done.output
    head, model, _, body, ways, titles, *rows = done.stdout.splitlines()
    assert head == "small: kernels of a rank, for 128 tokens, on toy (sm_90)"
    assert model.startswith("moec cannot predict times for the device toy")
    assert body == "layers[0]"
    assert ways == "  tiles and libraries by a rule: fp32 has one class of tiles"
    assert not {"spilled", "predicted", "TFLOP/s", "not padding"} & set(re.split(r"  +", titles.strip())), (
        "nothing stands in them"
    )
    cells = _cells([titles, *rows])
    assert set(cells) == {
        "route", "route_backward", "count", "scan", "rank", "invert", "combine", "add_parts", "add_rows",
        "table", "up", "up_backward", "up_weights", "down", "down_backward", "down_weights",
    }  # fmt: skip
    # 256 rows times 64 times 32, twice: 1.05 MFLOP at 1 TFLOP/s.
    assert cells["down"][1].startswith("64x64x32")
    assert cells["down"][6:] == ["arithmetic", "1.05 µs", "-", "-", "-", "<text>:10"]
    assert int(cells["down"][5]) >= 1
    assert int(cells["down"][2]) > 16
    # 128 tokens of 64 numbers, read twice as rows and written once, and 256 positions.
    assert cells["combine"][6:8] == ["memory", "0.1 µs"]


def test_queues_and_places_of_a_capacity_are_listed(tmp_path: Path) -> None:
    text = SMALL.replace("gate = topk(2)", "gate = topk(2); capacity = factor(1.25)")
    text = text.replace("size = 1", "size = 2").replace("batch = 2;", "batch = 4;") + "parallel { ep = 2 }"
    folder = compile_source(text).save(tmp_path / "padded.plan")
    done = CliRunner().invoke(app, ["inspect", str(folder), "--kernels"])
    assert done.exit_code == 0, done.output
    rows = _rows(done.stdout.splitlines())
    names = [row[0] for row in rows]
    # Queues of first and second choices, and of all choices; rows in places.
    assert [name for name in names if name in ("count", "scan", "start", "keep", "place")] == [
        "count", "scan", "start", "keep", "count", "scan", "place",
    ]  # fmt: skip
    assert names.count("fill") == names.count("add_rows") == 1
    assert not {"rank", "invert", "combine", "combine_backward", "mark"} & {*names}
    # 128 tokens of 64 numbers, read and written twice as rows, and 256 places, at 1 TB/s.
    (fill,) = (row for row in rows if row[0] == "fill")
    assert fill[6:] == ["memory", "0.1 µs", "-", "-", "-", "<text>:10"]


def test_a_tuned_plan_says_where_its_tiles_are_from(tmp_path: Path) -> None:
    plan = compile_source(SMALL)
    entries = tuple(Entry.of(product.key, WAYS, None) for product in products_of(plan))
    stored = StoredTiles(device="nvidia_l40s", triton="3.6.0", entries=entries)
    folder = replace(plan, tiles=stored).save(tmp_path / "small.plan")
    done = CliRunner().invoke(app, ["inspect", str(folder), "--kernels"])
    assert done.exit_code == 0, done.output
    assert "tiles tuned on nvidia_l40s, with Triton 3.6.0\n" in done.stdout
    assert "  tiles and libraries that `moec tune` measured: " in done.stdout
    cells = _cells(done.stdout.splitlines())
    assert cells["up"][1] == cells["down_weights"][1] == "16x16x16w4s2"
    assert cells["combine"][1] == "-"


@pytest.mark.parametrize(("device", "library"), [("a100", "h200"), ("interpreter", "h200"), ("h200", "h200")])
def test_tiles_of_another_device_and_libraries_that_cannot_run_are_not_listed(
    device: str, library: str, tmp_path: Path
) -> None:
    """grouped_mm is one kernel in bf16 only; this plan is in fp32."""
    plan = compile_source(SMALL[SMALL.index("model") :].replace('"toy"', f'"{library}"'))
    ways = replace(WAYS, up="grouped_mm", down_weights="grouped_mm")
    entries = tuple(Entry.of(product.key, ways, None) for product in products_of(plan))
    tiles = StoredTiles(device=device, triton="3.6.0", entries=entries)
    folder = replace(plan, tiles=tiles).save(tmp_path / "small.plan")
    done = CliRunner().invoke(app, ["inspect", str(folder), "--kernels"])
    assert done.exit_code == 0, done.output
    taken = device == library
    assert ("not used on h200" in done.stdout) == (not taken)
    cells = _cells(done.stdout.splitlines())
    assert f"  tiles and libraries {'that `moec tune` measured' if taken else 'by a rule'}: " in done.stdout
    assert "grouped_mm" not in {cells[kernel][1] for kernel in KERNELS}
    assert (cells["down"][1] == "16x16x16w4s2") == taken


def test_times_are_predicted_on_a_device_with_a_model(tmp_path: Path) -> None:
    text = SMALL[SMALL.index("model") :].replace('"toy"', '"h200"').replace("fp32", "bf16")
    folder = compile_source(text).save(tmp_path / "small.plan")
    done = CliRunner().invoke(app, ["inspect", str(folder), "--kernels"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[1] == "predicted times are not calibrated: constants of data sheets, and assumed ones"
    cells = _cells(lines)
    assert float(cells["down"][8].removesuffix(" µs")) > float(cells["down"][7].removesuffix(" µs"))
    assert cells["combine"][9:11] == ["-", "-"]
    done = CliRunner().invoke(app, ["inspect", str(folder), "--kernels", "--json"])
    said = json.loads(done.stdout)
    (layer,) = said["layers"]
    kernels = {each["kernel"]: each for each in layer["kernels"]}
    TypeAdapter(KernelsDocument).validate_json(done.stdout)
    down = kernels["down"]["predicted"]
    # 256 rows of 64 x 32, gelu: 4 · 256 · 64 · 32 forward.
    assert layer["forward"]["flops"] == 4 * 256 * 64 * 32 == down["flops"] + kernels["up"]["predicted"]["flops"]
    assert sum(down["parts"].values()) == pytest.approx(down["seconds"])
    forward = sum(
        each["predicted"]["seconds"]
        for each in kernels.values()
        if each["predicted"] and each["direction"] == "forward"
    )
    assert layer["forward"]["seconds"] == pytest.approx(forward)
    assert any(line.startswith(f"  forward: {forward * 1e3:.3g} ms predicted") for line in lines)
    backward = {each["kernel"] for each in kernels.values() if each["direction"] == "backward"}
    assert backward == {
        "route_backward", "add_parts", "add_rows", "up_backward", "up_weights", "down_backward", "down_weights",
    }  # fmt: skip


def test_a_library_s_products_are_listed_and_not_compiled(tmp_path: Path) -> None:
    text = SMALL[SMALL.index("model") :].replace('"toy"', '"h200"').replace("fp32", "bf16")
    plan = compile_source(text)
    by_rule = next(block.choice.ways for block in KernelListing(plan).blocks if block.choice)
    ways = by_rule.with_way("up", "grouped_mm").with_way("up_weights", "grouped_mm")
    entries = tuple(Entry.of(product.key, ways, None) for product in products_of(plan))
    stored = StoredTiles(device="h200", triton="3.6.0", entries=entries)
    folder = replace(plan, tiles=stored).save(tmp_path / "small.plan")
    done = CliRunner().invoke(app, ["inspect", str(folder), "--kernels"])
    assert done.exit_code == 0, done.output
    cells = _cells(done.stdout.splitlines())
    assert cells["up"][1:6] == cells["up_weights"][1:6] == ["grouped_mm", "-", "-", "-", "-"]
    assert float(cells["up"][8].removesuffix(" µs")) > float(cells["up"][7].removesuffix(" µs"))
    assert cells["gather"][6:11] == cells["activate"][6:11] == ["-"] * 5
    assert cells["down"][1] == str(by_rule.down)


def test_two_products_of_a_library_that_read_one_copy_of_the_gradient_gather_it_once() -> None:
    plan = compile_source(SMALL[SMALL.index("model") :].replace('"toy"', '"h200"').replace("fp32", "bf16"))
    ways = Ways(*["grouped_mm"] * 6)
    entries = tuple(Entry.of(product.key, ways, None) for product in products_of(plan))
    listing = KernelListing(replace(plan, tiles=StoredTiles(device="h200", triton="3.6.0", entries=entries)))
    (block,) = (block for block in listing.blocks if block.layer is not None)
    assert block.layer is not None
    load = Load.uniform(listing.tokens, block.layer.experts, block.layer.k)
    layer = predict_layer(ways, block.layer, load, DEVICES["h200"])
    found = {each.kernel: each.prediction for each in block.kernels}
    assert {each.name: found[each.name] for each in layer.kernels} == {
        each.name: each.prediction for each in layer.kernels
    }


@pytest.mark.slow  # compiles kernels of wide matrices, to which alone such a tile is not cut
def test_the_time_of_a_tile_that_does_not_fit_is_null_as_json_has_no_infinity(tmp_path: Path) -> None:
    text = SMALL[SMALL.index("model") :].replace('"toy"', '"h200"').replace("fp32", "bf16").replace("64", "4096")
    plan = compile_source(text)
    tile, large = Tile(64, 64, 64, 4, 2), Tile(64, 64, 256, 4, 8)
    entries = tuple(Entry.of(product.key, Ways(large, *[tile] * 5), None) for product in products_of(plan))
    folder = replace(plan, tiles=StoredTiles(device="h200", triton=None, entries=entries)).save(tmp_path / "small.plan")
    done = CliRunner().invoke(app, ["inspect", str(folder), "--kernels", "--json"])
    assert "Infinity" not in done.stdout
    (layer,) = json.loads(done.stdout)["layers"]
    (up,) = [each for each in layer["kernels"] if each["kernel"] == "up"]
    predicted = up["predicted"]
    assert (predicted["seconds"], predicted["bound"], layer["forward"]["seconds"]) == (None, "does not fit", None)


def test_on_processors_there_are_none(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["inspect", str(moe_plan().save(tmp_path / "tiny.plan")), "--kernels"])
    assert done.exit_code == 0
    assert "plain torch runs everything" in done.stdout
    done = CliRunner().invoke(app, ["inspect", str(tmp_path / "tiny.plan"), "--kernels", "--json"])
    assert json.loads(done.stdout)["layers"] == []


def test_kernels_need_a_plan(tmp_path: Path) -> None:
    file = tmp_path / "small.moe"
    file.write_text(SMALL)
    done = CliRunner().invoke(app, ["inspect", str(file), "--kernels"])
    assert done.exit_code == 2
    assert "--kernels needs a plan" in done.output


def test_work_is_that_of_the_tensors() -> None:
    up, down = (cls.of(**COUNTED, activation="swiglu", bias=True, ways=WAYS) for cls in (UpShape, DownShape))
    work = work_of(up, "up", EXPERTS, 50, 100)
    assert work is not None
    # Gate and up: 2 · 100 · 64 · 64; rows, hidden, activated and the matrices once each.
    assert (work.flops, work.moved) == (2 * 100 * 64 * 64, 4 * (100 * 64 + 100 * 64 + 100 * 32 + 4 * 64 * 64))
    total = sum(work_of(up, name, EXPERTS, 50, 100).flops for name in ("up", "up_backward", "up_weights"))
    total += sum(work_of(down, name, EXPERTS, 50, 100).flops for name in ("down", "down_backward", "down_weights"))
    assert total == 18 * 100 * 64 * 32  # 6 forward and 12 backward, gated
    # Sums of what is read once.
    biases = work_of(up, "up_bias", EXPERTS, 50, 100), work_of(down, "down_bias", EXPERTS, 50, 100)
    assert [work and (work.flops, work.moved) for work in biases] == [(0, 4 * 100 * 64), (0, 4 * 100 * 64)]

    combine = work_of(PlacesShape(k=2, dim=64, dtype="bf16", weights="fp32"), "combine", EXPERTS, 50, 100)
    assert combine is not None
    assert (combine.flops, combine.moved) == (0, 50 * 64 * 2 * 3 + 50 * 2 * 8)
    assert combine.bound(1e12, 1e12) == "memory"
    assert combine.seconds(None, 1e9) == combine.moved / 1e9


def test_work_of_queues_and_places_is_that_of_choices_and_rows() -> None:
    queues, places = QueuesShape(experts=8, k=2), PlacesShape(k=2, dim=64, dtype="bf16", weights="fp32")
    moved = {name: work_of(queues, name, EXPERTS, 50, 100) for name in ("count", "keep", "place")}
    assert {name: work and work.moved for name, work in moved.items()} == {"count": 800, "keep": 1600, "place": 1600}
    assert work_of(queues, "scan", EXPERTS, 50, 100) is None
    row = 64 * 2
    for kernel, expected in {
        "fill": 50 * row + 100 * row + 800,
        "add_rows": 50 * row + 100 * row + 800,
        "combine": 50 * row + 100 * row + 800,
        "mark": 800 + 100,
        "combine_backward": 50 * row + 200 * row + 800 + 100,
    }.items():
        work = work_of(places, kernel, EXPERTS, 50, 100)
        assert work is not None
        assert (work.flops, work.moved) == (0, expected), kernel
