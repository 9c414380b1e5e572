"""DeepSpeed's combinations of parallelism as `.moe` files: each has the degrees that it names, and verifies."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.verified import require_equal

import moec
from moec.grammar.spec import Spec
from moec.passes.degrees.degrees import choose_degrees

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "deepspeed"
COMBINATIONS: dict[str, set[str]] = {
    "e": {"E"},
    "e_d": {"E", "D"},
    "e_z": {"E", "Z"},
    "e_d_m": {"E", "D", "M"},
    "e_d_z": {"E", "D", "Z"},
    "e_zoff_m": {"E", "Z-Off", "M"},
}


def letters(spec: Spec) -> set[str]:
    """DeepSpeed's letters for what a file asks for; D are replicas of experts."""
    degrees, parallel = choose_degrees(spec), spec.parallel
    assert isinstance(parallel.zero, int)
    found = {
        "E": any(each.ep > 1 for each in degrees.experts),
        "D": any(each.edp > 1 for each in degrees.experts),
        "M": degrees.tp > 1,
        "Z": parallel.zero > 0 and parallel.offload == "none",
        "Z-Off": parallel.zero > 0 and parallel.offload == "optimizer",
    }
    return {letter for letter, is_used in found.items() if is_used}


def test_there_is_one_file_for_each_combination() -> None:
    assert {file.stem for file in FOLDER.glob("*.moe")} == COMBINATIONS.keys()
    page = (ROOT / "docs" / "zero.md").read_text(encoding="utf-8")
    assert all(f"(../examples/deepspeed/{name}.moe)" in page for name in COMBINATIONS)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_file_has_its_combination_and_its_plan_equals_the_unsharded_model(name: str) -> None:
    plan = moec.compile(FOLDER / f"{name}.moe")
    assert plan.name == name
    assert letters(plan.spec) == COMBINATIONS[name]
    require_equal(plan, scale=True)
