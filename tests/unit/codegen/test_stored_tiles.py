"""Tiles by device and shape: shipped ones, a plan's, and which of them are used."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.tables import each_row

from moec.codegen.folder import PlanError, canonical, digest
from moec.codegen.kernels import stored_tiles
from moec.codegen.kernels.fitting import buffer_bytes, fitted
from moec.codegen.kernels.plan_kernels import kernel_sources, products_of
from moec.codegen.kernels.stored_tiles import Entry, Measured, StoredTiles, TileKey, choose, key_of, shipped
from moec.codegen.kernels.tile_candidates import around, heights
from moec.codegen.kernels.tile_rule import HALF, extents, tiles_for
from moec.codegen.kernels.tiles import KERNELS, Tile, Ways, num_stages
from moec.codegen.plan import Plan
from moec.driver import compile as compile_source
from moec.driver import load

ROOT = Path(__file__).parents[3]
OTHER = Ways.parse(
    "up=32x64x32w4s3 down=32x128x32w4s3 down_backward=32x32x32w4s3 "
    "down_weights=64x256x32w4s3 up_backward=32x256x32w8s3 up_weights=64x128x16w4s5"
)
"""Tiles of no rule, and not shipped."""

SHIPPED = OTHER.with_way("up", "grouped_mm")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return compile_source(ROOT / "examples" / "mixtral_8x7b.moe")


def tuned(plan: Plan, ways: Ways = OTHER) -> Plan:
    """The plan as `moec tune` would write it."""
    measured = Measured(rows=4096, default_ms=2.0, ms=1.5)
    entries = tuple(Entry.of(one.key, ways, measured) for one in products_of(plan))
    return replace(plan, tiles=StoredTiles(device="h100", triton="3.6.0", entries=entries))


# ---- choosing ----------------------------------------------------------------------------------------


@pytest.fixture
def ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has moec ship tiles of one layer for an H100 and an H200, for any number of experts."""
    monkeypatch.setattr(stored_tiles, "FOLDER", tmp_path)
    entries = tuple(
        Entry.of(TileKey("bf16", load, None, 4096, 14336, True), SHIPPED, None) for load in ("few", "some", "many")
    )
    for device in ("h100", "h200"):
        stored = StoredTiles(device=device, triton=None, entries=entries)
        (tmp_path / f"{device}.json").write_text(stored.model_dump_json())
    shipped.cache_clear()
    yield
    shipped.cache_clear()


def choice(tuned: dict[TileKey, Ways], device: str = "h100", rows: int = 8192, dim: int = 4096) -> tuple[Ways, str]:
    found = choose("bf16", rows, 8, (dim, 14336), True, device=device, family="hopper", tuned=tuned)
    return found.ways, found.source


@pytest.mark.usefixtures("ships")
def test_a_plans_own_tiles_come_before_those_that_are_shipped_and_these_before_the_rule() -> None:
    own = {key_of("bf16", 8192, 8, (4096, 14336), True): OTHER}
    assert choice(own) == (OTHER, "tuned")
    assert choice({}) == (SHIPPED, "shipped")
    assert choice({}, device="b200") == (tiles_for("bf16", 8192, 8, (4096, 14336), True, "hopper"), "rule")
    assert choice({}, dim=4095)[1] == "rule"
    # Tuned for many rows per expert; few rows are another entry.
    assert choice(own, rows=64)[1] == "shipped"


@pytest.mark.usefixtures("ships")
def test_what_is_shipped_counts_for_any_number_of_experts_and_a_plans_own_for_one() -> None:
    own = {key_of("bf16", 8192, 8, (4096, 14336), True): OTHER}
    for experts, source in ((8, "tuned"), (4, "shipped")):
        found = choose("bf16", 8192, experts, (4096, 14336), True, device="h200", family="hopper", tuned=own)
        assert found.source == source


@pytest.mark.parametrize("file", sorted((ROOT / "codegen/kernels/tuned").glob("[a-z0-9_]*.json")))
def test_what_is_shipped_names_a_device_of_the_library_and_what_it_was_measured_with(file: Path) -> None:
    stored = StoredTiles.model_validate_json(file.read_bytes())
    assert stored.device == file.stem
    assert (ROOT / "grammar" / "library" / "devices" / f"{stored.device}.moe").exists()
    assert all(entry.measured is None for entry in stored.entries) or stored.triton is not None


def test_a_choice_says_why_in_a_few_words() -> None:
    own = {key_of("bf16", 8192, 8, (4096, 1024), True): OTHER}
    for tuned, why in ((own, "tuned on h100 for many rows per expert"), ({}, "many rows per expert (1,024) on hopper")):
        found = choose("bf16", 8192, 8, (4096, 1024), True, device="h100", family="hopper", tuned=tuned)
        assert found.reason == why


def test_a_tile_reads_back_as_it_is_written() -> None:
    assert all(Tile.parse(str(tile)) == tile for tile in map(OTHER.tile, KERNELS) if tile)


def test_ways_read_back_as_they_are_written() -> None:
    for ways in (OTHER, SHIPPED, Ways(*["quack"] * 6), OTHER.with_way("down_weights", "grouped_mm")):
        assert Ways.parse(str(ways)) == ways
    assert str(SHIPPED).startswith("up=grouped_mm down=32x128x32w4s3 ")


WRONG: dict[str, tuple[str, str]] = {
    "a product is missing": (str(OTHER).replace("down=32x128x32w4s3 ", ""), "does not name each product once"),
    "a product twice": (f"{OTHER} up=32x64x32w4s3", "does not name each product once"),
    "a word that is no library": (str(SHIPPED).replace("grouped_mm", "cublas"), "`cublas` is not a tile"),
    "a size that no kernel has": (str(OTHER).replace("32x64x32w4s3", "32x48x32w4s3"), "`32x48x32w4s3` is not a tile"),
    "no stages": (str(OTHER).replace("32x64x32w4s3", "32x64x32w4s0"), "is not a tile"),
    "row products of several heights": (str(OTHER).replace("32x64x32w4s3", "64x64x32w4s3"), "share one table of tiles"),
}


@each_row("name", WRONG)
def test_text_that_is_no_ways_is_refused_with_what_is_wrong(name: str) -> None:
    text, complaint = WRONG[name]
    with pytest.raises(ValueError, match=complaint):
        Ways.parse(text)


def test_a_library_for_a_product_leaves_the_others_heights_free() -> None:
    tall = Tile(128, 64, 32, 4, 3)
    ways = Ways("quack", "quack", tall, OTHER.down_weights, "quack", "quack")
    assert ways.rows == 128
    assert ways.tile("up") is None
    assert Ways(*["grouped_mm"] * 6).rows > 0


@each_row("family", HALF)
def test_the_rule_is_tall_where_an_expert_has_many_rows_and_no_wider_than_the_matrices(family: str) -> None:
    heights = [
        tiles_for("bf16", each * 64, 64, (2048, 1024), True, family).rows for each in (1, 24, 25, 64, 65, 10_000)
    ]
    assert heights == [16, 16, 64, 64, 128, 128]
    small = tiles_for("bf16", 100_000, 64, (40, 24), True, family)
    for kernel in KERNELS:
        tile = small.tile(kernel)
        assert tile is not None
        for size, extent in zip((tile.rows, tile.columns, tile.depth), extents(kernel, (40, 24), True), strict=True):
            assert extent is None or size < 2 * max(extent, 16)


def test_a_tile_is_narrower_where_that_pads_the_columns_less() -> None:
    wide, narrow = (
        tiles_for("bf16", 65536, 64, (2048, hidden), True, "hopper").tile("down_backward") for hidden in (768, 320)
    )
    assert wide == Tile(128, 256, 64, 8, 4)
    # 320 columns are 512 in tiles of 256, 384 in tiles of 128, and no padding in tiles of 64.
    assert narrow == Tile(128, 64, 64, 8, 3)


def test_the_launch_asks_for_the_stages_that_give_a_tiles_buffers() -> None:
    tall, flat = Tile(128, 256, 64, 8, 4), Tile(16, 128, 64, 4, 4)
    found = {
        (family, indirect): (num_stages(tall, family, indirect), num_stages(flat, family, indirect))
        for family in ("hopper", "ampere", "cdna")
        for indirect in (False, True)
    }
    assert found["hopper", False] == (4, 5)
    assert found["hopper", True] == (7, 9)
    assert found["ampere", False] == (5, 5)
    assert found["ampere", True] == (9, 9)
    assert found["cdna", False] == found["cdna", True] == (4, 4)


def test_tiles_that_need_more_shared_memory_than_a_device_has_give_way_to_the_next_best() -> None:
    ways = tiles_for("bf16", 65536, 64, (2048, 768), True, "hopper")
    assert fitted(ways, "bf16", 227 * 1024) == ways
    fewer, narrower = (fitted(ways, "bf16", size * 1024) for size in (163, 64))
    assert fewer.tile("up") == Tile(128, 256, 64, 8, 3)
    assert narrower.tile("up") == Tile(128, 128, 64, 8, 2)
    assert fewer.rows == narrower.rows == ways.rows
    for size in (227, 163, 99, 64, 48):
        found = fitted(ways.with_way("down", "grouped_mm"), "bf16", size * 1024)
        assert found.down == "grouped_mm"
        assert all(buffer_bytes(tile, "bf16") <= size * 1024 for tile in map(found.tile, KERNELS) if tile)


# ---- candidates --------------------------------------------------------------------------------------


def test_candidates_begin_with_the_default_and_go_outward_and_fit() -> None:
    key = TileKey("bf16", "many", 8, 4096, 14336, True)
    default = Tile(128, 128, 64, 8, 4)
    found = list(around("up", default, 128, key, shared=227 * 1024))
    assert found[0] == default
    assert len(set(found)) == len(found)
    assert {tile.rows for tile in found} == {128}
    # 256 columns of 128 rows take 128 registers of 8 warps, and 256 of 4.
    assert Tile(128, 256, 64, 8, 2) in found
    assert Tile(128, 256, 64, 4, 2) not in found
    # Four stages and one in use: 3 · 128 · (128 + 256) · 2 bytes.
    assert Tile(128, 256, 128, 8, 4) not in found
    assert Tile(128, 256, 128, 8, 3) in found
    assert list(around("up", default, 128, key, shared=227 * 1024)) == found


def test_no_candidate_is_wider_than_the_matrices_and_up_and_down_share_heights() -> None:
    key = TileKey("fp32", "few", 2, 40, 24, True)
    found = list(around("up_backward", Tile(64, 32, 32, 4, 2), 32, key, shared=1 << 20))
    assert max(max(tile.columns, tile.depth) for tile in found) == 64
    # A gradient of weights [40, 24]: its rows are of the matrix, and it sums as many rows at once as it likes.
    found = list(around("down_weights", Tile(64, 32, 32, 4, 2), None, key, shared=1 << 20))
    assert {tile.rows for tile in found} == {16, 32, 64}
    assert {tile.columns for tile in found} == {16, 32}
    assert max(tile.depth for tile in found) == 128
    assert heights(Tile(64, 32, 32, 4, 2)) == (64, 32, 128)
    assert heights(Tile(16, 64, 128, 4, 4)) == (16, 32)


# ---- in a plan ---------------------------------------------------------------------------------------


def test_a_tuned_plan_reads_back_and_its_kernels_are_rendered_with_its_tiles(plan: Plan, tmp_path: Path) -> None:
    folder = tuned(plan).save(tmp_path / "tuned.plan")
    kernels = {name.split("_")[0]: name.removesuffix(".py") for name in kernel_sources(load(folder))}
    of_up, of_down = (
        f"tile{OTHER.of(product)}_backward{OTHER.of(backward)}_weights{OTHER.of(weights)}"
        for product, backward, weights in (
            ("up", "up_backward", "up_weights"),
            ("down", "down_backward", "down_weights"),
        )
    )
    assert of_up in kernels["up"]
    assert of_down in kernels["down"]
    assert kernels["tiles"].endswith("rows32")
    assert load(folder) == tuned(plan)
    # Compiling again cannot give what was measured: tiles are numbers within bounds, for products that the plan has.
    assert load(folder, trust_nothing=True) == tuned(plan)


def test_an_edited_file_of_tiles_is_refused(plan: Plan, tmp_path: Path) -> None:
    folder = tuned(plan).save(tmp_path / "tuned.plan")
    file = folder / "tiles.json"
    whole = file.read_bytes()
    for content in (whole.replace(b"32x64x32w4s3", b"32x64x32w8s3"), whole[:-20], b""):
        file.write_bytes(content)
        with pytest.raises(PlanError, match=r"MOE0601.*tiles\.json: its digest does not match"):
            load(folder)
    file.unlink()
    with pytest.raises(PlanError, match=r"MOE0601.*tiles\.json: it is missing"):
        load(folder)


def test_tiles_that_plan_json_does_not_list_are_refused(plan: Plan, tmp_path: Path) -> None:
    folder = plan.save(tmp_path / "plain.plan")
    (folder / "tiles.json").write_bytes((tuned(plan).save(tmp_path / "tuned.plan") / "tiles.json").read_bytes())
    with pytest.raises(PlanError, match=r"MOE0601.*tiles\.json"):
        load(folder)


Change = Callable[[dict[str, Any]], Any]
PLANTED: dict[str, tuple[Change, str]] = {
    "code for a tile": (lambda d: d["entries"][0].update(up="__import__('os')"), r"entries\.0\.up"),
    "a tile that no kernel can have": (lambda d: d["entries"][0].update(up="32x48x32w4s3"), r"entries\.0\.up"),
    "a huge tile": (lambda d: d["entries"][0].update(up="32x4096x32w4s3"), r"entries\.0\.up"),
    "row products of several heights": (
        lambda d: d["entries"][0].update(up="64x64x32w4s3"),
        "share one table of tiles",
    ),
    "a library that moec does not know": (lambda d: d["entries"][0].update(down="cublas"), r"entries\.0\.down"),
    "a product that is left out": (lambda d: d["entries"][0].pop("up_weights"), r"entries\.0\.up_weights"),
    "a shape twice": (lambda d: d["entries"].append(d["entries"][0]), "two entries"),
    "a shape of another plan": (lambda d: d["entries"][0].update(hidden=512), "which the plan does not have"),
    "any number of experts": (lambda d: d["entries"][0].update(experts=None), "which the plan does not have"),
    "a time that is no number": (lambda d: d["entries"][0]["measured"].update(ms=-1.0), r"entries\.0\.measured\.ms"),
    "a device that is no name": (lambda d: d.update(device="../h100"), "device"),
    "something more": (lambda d: d.update(note="hello"), "note"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_in_tiles_is_refused_even_with_digests_that_match(
    plan: Plan, tmp_path: Path, name: str
) -> None:
    change, complaint = PLANTED[name]
    folder = tuned(plan).save(tmp_path / "tuned.plan")
    content = json.loads((folder / "tiles.json").read_bytes())
    change(content)
    (folder / "tiles.json").write_bytes(canonical(content))
    manifest = json.loads((folder / "plan.json").read_bytes())
    del manifest["digest"]
    manifest["files"]["tiles.json"] = digest(canonical(content))
    (folder / "plan.json").write_bytes(canonical(manifest | {"digest": digest(canonical(manifest))}))
    with pytest.raises(PlanError, match=rf"MOE0601.*tiles\.json: .*{complaint}"):
        load(folder)


def test_a_plan_for_processors_has_no_tiles(tmp_path: Path) -> None:
    tiny = compile_source(ROOT / "examples" / "tiny.moe")
    assert products_of(tiny) == ()
    entry = Entry.of(TileKey("fp32", "few", 8, 16, 16, True), OTHER, None)
    stored = StoredTiles(device="cpu", triton=None, entries=(entry,))
    with pytest.raises(PlanError, match="which the plan does not have"):
        load(replace(tiny, tiles=stored).save(tmp_path / "tiny.plan"))
