"""Tiles by device and shape: shipped ones, a plan's, and which of them are used."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moec.codegen.folder import PlanError, canonical, digest
from moec.codegen.kernels.of_plan import kernel_sources, products_of
from moec.codegen.kernels.stored_tiles import SHIPPED, Entry, Measured, StoredTiles, TileKey, choose, key_of
from moec.codegen.kernels.tile_candidates import around, heights
from moec.codegen.kernels.tiles import Tile, Tiles, tiles_for
from moec.codegen.plan import Plan
from moec.driver import compile as compile_source
from moec.driver import load

ROOT = Path(__file__).parents[3]
OTHER = Tiles(Tile(32, 64, 32, 4, 3), Tile(32, 128, 32, 4, 3))
"""A tile of no rule, and not shipped."""


@pytest.fixture(scope="module")
def plan() -> Plan:
    return compile_source(ROOT / "examples" / "mixtral_8x7b.moe")


def tuned(plan: Plan, tiles: Tiles = OTHER) -> Plan:
    """The plan as `moec tune` would write it."""
    measured = Measured(rows=4096, default_ms=2.0, ms=1.5)
    entries = tuple(Entry.of(one.key, tiles, measured) for one in products_of(plan))
    return replace(plan, tiles=StoredTiles(device="h100", triton="3.6.0", entries=entries))


# ---- choosing ----------------------------------------------------------------------------------------


def choice(tuned: dict[TileKey, Tiles], device: str = "h100", rows: int = 8192, dim: int = 4096) -> tuple[Tiles, str]:
    found = choose("bf16", rows, 8, (dim, 14336), True, device=device, family="hopper", tuned=tuned)
    return found.tiles, found.source


def test_a_plans_own_tiles_come_before_those_that_are_shipped_and_these_before_the_rule() -> None:
    own = {key_of("bf16", 8192, 8, (4096, 14336), True): OTHER}
    assert choice(own) == (OTHER, "tuned")
    assert choice({})[1] == "shipped"
    assert choice({}, device="b200") == (tiles_for("bf16", 8192, 8, (4096, 14336), "hopper"), "rule")
    assert choice({}, dim=4095)[1] == "rule"
    # Tuned for many rows per expert; few rows are another entry.
    assert choice(own, rows=64)[1] == "shipped"


def test_what_is_shipped_counts_for_any_number_of_experts_and_a_plans_own_for_one() -> None:
    own = {key_of("bf16", 8192, 8, (4096, 14336), True): OTHER}
    for experts, source in ((8, "tuned"), (4, "shipped")):
        found = choose("bf16", 8192, experts, (4096, 14336), True, device="h200", family="hopper", tuned=own)
        assert found.source == source


@pytest.mark.parametrize("device", SHIPPED)
def test_what_is_shipped_names_a_device_of_the_library_and_claims_no_measurement(device: str) -> None:
    assert (ROOT / "grammar" / "library" / "devices" / f"{device}.moe").exists()
    stored = StoredTiles.model_validate_json((ROOT / "codegen" / "kernels" / "tuned" / f"{device}.json").read_bytes())
    assert stored.device == device
    # Measured tiles name their Triton and the default's time.
    assert stored.triton is None
    assert all(entry.measured is None for entry in stored.entries)
    # Mixtral, Qwen3, OLMoE, DeepSeek-V3, gpt-oss, under each load.
    for widths in ((4096, 14336), (2048, 768), (2048, 1024), (7168, 2048), (2880, 2880)):
        for rows in ("few", "some", "many"):
            assert TileKey("bf16", rows, None, *widths, True) in stored.by_key()


def test_a_tile_reads_back_as_it_is_written() -> None:
    assert Tile.parse(str(OTHER.up)) == OTHER.up


# ---- candidates --------------------------------------------------------------------------------------


def test_candidates_begin_with_the_default_and_go_outward_and_fit() -> None:
    key = TileKey("bf16", "many", 8, 4096, 14336, True)
    default = Tile(128, 128, 64, 8, 4)
    found = list(around(default, 128, key, sums=2, shared=227 * 1024))
    assert found[0] == default
    assert len(set(found)) == len(found)
    assert {tile.rows for tile in found} == {128}
    # Two tiles of sums: 256 columns of 128 rows would take 256 registers of 8 warps, 128 of 4 warps as many.
    assert Tile(128, 256, 64, 8, 2) not in found
    assert Tile(128, 128, 64, 4, 2) not in found
    # Four stages and one in use: 3 · 128 · (128 + 256) · 2 bytes.
    assert Tile(128, 128, 128, 8, 4) not in found
    assert Tile(128, 128, 128, 8, 3) in found
    assert list(around(default, 128, key, sums=2, shared=227 * 1024)) == found


def test_no_candidate_is_wider_than_the_matrices_and_up_and_down_share_heights() -> None:
    key = TileKey("fp32", "few", 2, 40, 24, True)
    found = list(around(Tile(64, 32, 32, 4, 2), 32, key, sums=2, shared=1 << 20))
    assert max(max(tile.columns, tile.depth) for tile in found) == 64
    assert heights(Tile(64, 32, 32, 4, 2)) == (64, 32, 128)
    assert heights(Tile(16, 64, 128, 4, 4)) == (16, 32)


# ---- in a plan ---------------------------------------------------------------------------------------


def test_a_tuned_plan_reads_back_and_its_kernels_are_rendered_with_its_tiles(plan: Plan, tmp_path: Path) -> None:
    folder = tuned(plan).save(tmp_path / "tuned.plan")
    kernels = {name.split("_")[0]: name.removesuffix(".py") for name in kernel_sources(load(folder))}
    assert kernels["up"].endswith(f"tile{OTHER.up}")
    assert kernels["down"].endswith(f"tile{OTHER.down}_weightedtrue")
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
    "up and down of other heights": (lambda d: d["entries"][0].update(up="64x64x32w4s3"), "as many rows"),
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
