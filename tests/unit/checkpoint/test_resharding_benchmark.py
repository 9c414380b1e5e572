"""The resharding that benchmarks/bench_checkpoint.py times: it compares what it loads, here at one layer."""

from __future__ import annotations

from pathlib import Path

from bench_checkpoint import resharding


def test_one_rank_of_other_degrees_loads_what_64_ranks_saved(tmp_path: Path) -> None:
    rows = resharding(tmp_path, depth=1)
    assert rows[0].what.startswith("1 layers × 256 experts")
