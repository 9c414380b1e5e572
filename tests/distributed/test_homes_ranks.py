"""Homes that move: whatever a script reads, and whatever it trains, is that of a plan whose experts stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.plans import moe_plan
from support.ranks.gloo_pool import GlooPool
from support.ranks.homes import load_and_read, train_and_read, train_in_turns, train_with_unmovable
from support.tables import each_row
from torch import Tensor

import moec
from moec.runtime.ranks import groups
from moec.runtime.weights.homes import exchange_rows

MODEL: dict[str, Any] = {"batch": 8, "ranks": 4, "expert": "swiglu(16, bias = true)"}
MOVING = "greedy(); clock = false"

CASES: dict[str, dict[str, Any]] = {
    "adamw, ep 2, zero 1": {"ep": 2, "zero": 1},
    "adamw, ep 4, bf16": {"ep": 4, "dtype": "bf16"},
    "adafactor": {"ep": 2, "optimizer": "adafactor(lr = 1e-2)"},
    "muon, zero 3": {"ep": 2, "zero": 3, "optimizer": "muon(lr = 1e-2)"},
    "lion, zero 2": {"ep": 2, "zero": 2, "optimizer": "lion(lr = 1e-3)"},
    "torch AdamW": {"ep": 4, "recompute": "layer"},
    "torch SGD": {"ep": 2, "tp": 2},
}
FAST = "adamw, ep 2, zero 1"


def require_equal(moved: dict[str, dict[str, Tensor]], static: dict[str, dict[str, Tensor]]) -> None:
    """Fails unless both have the same names and bits."""
    for read, values in static.items():
        assert values.keys() == moved[read].keys()
        different = [name for name, value in values.items() if not torch.equal(value, moved[read][name])]
        assert not different, f"{read}: {different}"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == FAST else [pytest.mark.slow]) for name in CASES]
)
def test_training_with_homes_that_move_is_that_of_homes_that_stay(gloo: GlooPool, tmp_path: Path, name: str) -> None:
    options = {**MODEL, **CASES[name]}
    static, moving = moe_plan(**options), moe_plan(**options, adapt=MOVING)
    results = [gloo.run(4, train_and_read, plan, name, str(tmp_path / kind))[0]
               for kind, plan in (("static", static), ("moving", moving))]  # fmt: skip
    require_equal(results[1], results[0])
    for saved in ("step-4", "average") if name == FAST else ():
        expected = gloo.run(4, load_and_read, static, str(tmp_path / "static" / saved))[0]
        require_equal(gloo.run(4, load_and_read, static, str(tmp_path / "moving" / saved))[0], expected)
        require_equal(gloo.run(4, load_and_read, moving, str(tmp_path / "moving" / saved))[0], expected)


def test_models_in_turns_and_optimizers_made_in_any_order_are_those_of_homes_that_stay(gloo: GlooPool) -> None:
    options = MODEL | {"ranks": 2, "ep": 2}
    static, moving = (gloo.run(2, train_in_turns, moe_plan(**options, **adapt))[0] for adapt in ({}, {"adapt": MOVING}))
    require_equal(moving, static)


def part_of(rank: int) -> Tensor:
    return (24 * rank + torch.arange(24.0)).view(2, 4, 3).mT  # not in the order of its memory


def rows_of_the_other(_: None) -> Tensor:
    rank = dist.get_rank()
    own, peers = [[0], [1]][rank], [[], []]
    peers[1 - rank] = own
    with groups.use({"ep": dist.group.WORLD}):
        return exchange_rows(part_of(rank), peers, peers, "ep", "layer 1")


def test_rows_arrive_in_order_whatever_their_memory_format(gloo: GlooPool) -> None:
    first, second = gloo.run(2, rows_of_the_other, None)
    assert torch.equal(first, part_of(1)[[1]])
    assert torch.equal(second, part_of(0)[[0]])


@each_row(
    ("kind", "words"),
    [
        ("a parametrization", "moe.experts.up.weight of layer 1 .* is computed from others"),
        ("a copy on one rank", "ranks have other copies, gradients or optimizers"),
        ("a state of its own", r"keeps `blocks`, a Tensor \[3\]"),
        ("an optimizer that comes late", "has states of experts that have moved before it was seen"),
        ("copies of model and optimizer", "has states of experts that have moved before it was seen"),
        ("a copy of a part", "is a copy of a part of a layer"),
        ("one parameter of two layers", "two layers have one parameter of experts"),
        ("a state_dict in a backward pass", "in a backward pass, while experts are in other homes"),
        ("a state without ranks", r"keeps `rows`, a DTensor \[8, 1, 1\]"),
        ("a value that differs", "keeps one value of all experts .* which differs between ranks"),
        ("another parameter", "has been replaced while experts were in other homes"),
        ("another parameter of a copy", "has been replaced while experts were in other homes"),
        ("states of other names", "ranks have other tensors of experts of layer 1"),
        ("optimizers in another order", "which differs between ranks .*the optimizer's settings"),
        ("a state_dict on one rank before clipping", "one is at `job.clip_grad_norm_`, another at `state_dict"),
        ("a state_dict on one rank", "state_dict or load_state_dict, while experts of model 1 are in other homes"),
    ],
)
def test_what_cannot_move_stops_the_job(gloo: GlooPool, kind: str, words: str) -> None:
    plan = moe_plan(**(MODEL | {"ranks": 2}), ep=2, adapt=MOVING)
    with pytest.raises(moec.JobError, match=words) as error:
        gloo.run(2, train_with_unmovable, plan, kind)
    assert ("MOE0702" if "a state_dict on one rank" in kind else "MOE0754") in str(error.value)
