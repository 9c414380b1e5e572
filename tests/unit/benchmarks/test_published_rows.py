"""`benchmarks/planning`: rows become files that state what was run, and scores are what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from planning.rows import Published, stages_of
from planning.score import Scored, kendall, predicted, score, winners
from planning.sources import read

from moec.grammar import load_text

TINY = {"model": "mixtral-8x22b", "hardware": "h100", "gpus": 16, "precision": "bf16", "seq": 1024, "mbs": 1}


def rows(folder: Path, *newer: dict[str, Any]) -> tuple[Any, Any]:
    table = [
        {"model": "mixtral-8x22b", "gpus": 16, "method": "fsdp", "layout": {"tp": 8}, "mfu": 4.0},
        {"model": "mixtral-8x22b", "gpus": 16, "method": "mcore", "layout": {"tp": 2, "ep": 2, "pp": 4}, "mfu": 40.0},
    ]
    scaled = {"model": "mixtral-8x22b", "method": "mcore", "gpus": [32], "mfu": [41.0]}
    published = {"moe_parallel_folding": {"table_3": table, "table_4": [scaled]}, "megatron_bridge": []}
    (folder / "published.yaml").write_text(yaml.safe_dump(published))
    (folder / "published_rows.yaml").write_text(yaml.safe_dump({"rows": list(newer)}))
    return read(folder)


def words(row: Published) -> dict[str, Any]:
    parallel = load_text(row.text).unwrap().parallel
    chosen = ("tp", "ep", "etp", "pp", "virtual", "zero", "microbatches", "schedule", "recompute")
    return {word: getattr(parallel, word) for word in chosen}


def test_rows_of_the_folding_paper_are_stated_by_its_conventions(tmp_path: Path) -> None:
    folding, _ = rows(tmp_path)
    sharded, piped, scaled = folding.stated
    assert words(sharded) | {"tp": 8, "ep": 1, "etp": 8, "zero": 3, "microbatches": 128} == words(sharded)
    stated = {"tp": 2, "ep": 2, "etp": 2, "pp": 4, "virtual": 14, "zero": 1, "schedule": "interleaved"}
    assert words(piped) | stated | {"microbatches": 128, "recompute": "none"} == words(piped)
    assert words(scaled) | stated | {"microbatches": 256} == words(scaled)
    found = predicted(sharded)
    flops = 256 * 4096 * 242_184_093_696
    assert found.published == 0.04
    assert found.predicted == pytest.approx(flops / found.seconds / 16 / 989.4e12)


def test_what_a_row_leaves_open_is_assumed_aloud_or_left_out(tmp_path: Path) -> None:
    _, newer = rows(
        tmp_path,
        TINY
        | {"layout": {"pp": 2, "vpp": 30, "ep": 8}, "gbs": 64, "step_s": 1.0, "routing": "real", "note": "x, DeepEP"},
        TINY | {"layout": {"ep": 8, "fsdp": 8}, "gbs": 64, "step_s": 1.0},
        TINY | {"layout": {"ep": 8}, "step_s": 1.0},
        TINY | {"layout": {"ep": 8}, "gbs": 64, "precision": "fp8", "tokens_per_s_per_gpu": 512},
    )
    real, narrow = newer.stated
    assert real.assumed == ("even load; routing: real", "virtual = 28, not 30: no stage without a layer")
    assert (real.once_per_node, narrow.once_per_node) == (True, False)
    assert real.dropless
    assert narrow.ranks_only
    assert narrow.assumed == ("bf16, not fp8",)
    assert narrow.step == 8.0
    assert [why for _, why in newer.left_out] == ["weights over 8 of 16 replicas: zero 3 takes all", "no batch"]


def test_embedding_and_head_count_as_layers_where_they_fill_the_stages() -> None:
    assert stages_of(6, 3) == ["0..1", "2..3", "4..5"]
    assert stages_of(94, 32)[::31] == ["0..1", "92..93"]
    assert stages_of(61, 32) == []


def scored(published: float, predicted: float, text: str) -> Scored:
    same = {"source": "s", "model": "m", "device": "d", "precision": "bf16", "gpus": 8, "batch": 8, "sequence": 8}
    return Scored(row=Published(name=text, text=text, **same), published=published, predicted=predicted, seconds=1.0)


def test_scores_are_of_errors_order_and_winners() -> None:
    found = [scored(0.4, 0.5, "a"), scored(0.3, 0.27, "b"), scored(0.39, 0.2, "c")]
    measured = score(found)
    assert measured.mean == pytest.approx((0.25 + 0.1 + 0.19 / 0.39) / 3)
    assert measured.worst == pytest.approx(-0.19 / 0.39)
    assert measured.signed == pytest.approx((0.25 - 0.1 - 0.19 / 0.39) / 3)
    assert measured.tau == pytest.approx(1 / 3)
    assert kendall([1, 1], [1, 2]) is None
    pairs = [(fast.row.name, slow.row.name, right) for fast, slow, right in winners(found)]
    assert pairs == [("a", "b", True), ("c", "b", False)]
