"""Guests on gloo ranks: with others in every step a plan trains as the unsharded model does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.plans import moe_plan
from support.ranks.gloo_pool import GlooPool
from support.ranks.guests import bytes_of_guests, train_with_choices, train_with_guests, train_with_slow_moves
from support.ranks.training import STEPS, require_same_training, unsharded
from support.tables import each_row
from torch import Tensor
from torch.library import opcheck

import moec
from moec.runtime.ops.assign_slots import assign_slots
from moec.runtime.placement.choices import PlacementChoices
from moec.runtime.ranks import groups
from moec.runtime.weights.slots import table_of

MODEL = {"batch": 8, "optimizer": "adamw(lr = 3e-3)"}

CASES: dict[str, dict[str, Any]] = {
    "ep 2, edp 2, zero 1, micro-batches": {"ranks": 4, "ep": 2, "zero": 1, "microbatches": 2, "adapt": "replicate(4)"},
    "ep 4, homes that move": {
        "ranks": 4,
        "ep": 4,
        "expert": "swiglu(16, bias = true)",
        "adapt": "[greedy(), replicate(8)]; clock = false",
    },
    "ep 4, tp 2, recomputed": {"ranks": 4, "ep": 4, "tp": 2, "recompute": "layer", "adapt": "shadow(2)"},
    "zero 2": {"ranks": 4, "ep": 2, "zero": 2, "microbatches": 2, "adapt": "[replicate(2), shadow(1)]"},
    "zero 3": {"ranks": 4, "ep": 2, "zero": 3, "recompute": "experts", "adapt": "replicate(6)"},
    "biases, micro-batches": {
        "ranks": 2,
        "ep": 2,
        "expert": "swiglu(16, bias = true)",
        "microbatches": 2,
        "adapt": "replicate(2)",
    },
    "two degrees": {"ranks": 4, "ep": 4, "mixtures": ((8, 2), (8, 4)), "adapt": "replicate(4)"},
}
FAST = "biases, micro-batches", "ep 4, homes that move"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in CASES]
)
def test_with_other_guests_in_every_step_ranks_train_as_one(gloo: GlooPool, name: str) -> None:
    options = {**MODEL, **CASES[name]}
    same = {key: value for key, value in options.items() if key in (*MODEL, "expert", "mixtures")}
    plan = moe_plan(**options)
    results = gloo.run(plan.world_size, train_with_guests, plan, STEPS)
    require_same_training(results, unsharded(STEPS, **same), plan)


@pytest.mark.slow
def test_other_guests_need_no_compilation(gloo: GlooPool) -> None:
    options = {**MODEL, "ranks": 4, "ep": 4, "adapt": "replicate(4)"}
    plan = moe_plan(**options)
    results = gloo.run(plan.world_size, train_with_guests, plan, 8, "aot_eager")
    require_same_training(results, unsharded(8, **MODEL), plan)
    bodies, scalars = 2, 4  # of a dense layer, and of one with guests
    assert {result["graphs"] for result in results} == {bodies + scalars}


def test_guests_travel_once_per_step_in_the_compute_dtype_and_home_in_fp32(gloo: GlooPool) -> None:
    plan = moe_plan(**MODEL, ranks=4, ep=4, dtype="bf16", adapt="replicate(8)")
    once, again = (gloo.run(4, bytes_of_guests, plan, number) for number in (1, 2))
    assert any(passed_on for _, _, passed_on in once)
    assert sum(sent for sent, _, _ in once) == 6 * sum(elements for _, elements, _ in once)  # 2 bytes there, 4 back
    assert once == again


def placed_rows(experts: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
    rank = dist.get_rank()
    with groups.use({"ep": dist.group.WORLD}):
        opcheck(assign_slots, (experts[rank], slots, 4, "ep"))
        return assign_slots(experts[rank], slots, 4, "ep")


def test_ranks_agree_on_which_rows_go_to_which_slot(gloo: GlooPool) -> None:
    experts = torch.randint(-1, 4, (2, 3, 5, 2), generator=torch.Generator().manual_seed(0))
    with_guests, moved = torch.tensor([[0, 1, 3, -1], [2, 3, 1, 0]]), torch.tensor([[3, 1], [0, 2]])
    for slots in (with_guests, moved):
        require_agreement(gloo, experts, slots)


def require_agreement(gloo: GlooPool, experts: Tensor, slots: Tensor) -> None:
    found = gloo.run(2, placed_rows, experts, table_of(slots))
    for rank, (placed, counts, received, splits) in enumerate(found):
        chosen = torch.cat([slots.flatten(), torch.tensor([-1])])[placed]
        assert torch.equal(chosen, experts[rank])
        assert counts.tolist() == [torch.bincount(experts[rank].flatten() + 1, minlength=5)[1:].tolist()]
        of_slots = [torch.bincount(other[0].flatten() + 1, minlength=slots.numel() + 1)[1:] for other in found]
        rows = torch.stack([counted.view(slots.shape) for counted in of_slots])
        assert torch.equal(received, rows[:, rank])
        assert splits.tolist() == [rows[rank].sum(1).tolist(), rows[:, rank].sum(1).tolist()]
    busiest = [int(result[2].sum()) for result in found]
    assert slots.numel() == 4 or max(busiest) - min(busiest) <= 1


def test_a_run_chooses_guests_and_another_one_repeats_its_choices(gloo: GlooPool, tmp_path: Path) -> None:
    words = "[greedy(every = 2, threshold = 1.0), replicate(2, every = 2)]; horizon = 1e12; clock = false"
    plan = moe_plan(**MODEL, ranks=2, ep=2, adapt=words)
    path = tmp_path / "choices.jsonl"
    first = gloo.run(2, train_with_choices, plan, str(path), 6)
    content = path.read_text()
    steps = [json.loads(line).get("step") for line in content.splitlines()]
    assert steps == [None, 4, 6]
    assert first[0] == first[1]
    in_order, last = range(8), first[0]["tables"].values()
    assert any([*slots[0][:4], *slots[1][:4]] != [*in_order] for slots, _ in last)
    assert any(slots[rank][4] >= 0 for slots, _ in last for rank in (0, 1))
    path.write_text(content + '{"step": 8, "slo')  # a line that was not finished
    assert gloo.run(2, train_with_choices, plan, str(path), 6) == first
    assert path.read_text() == content
    head, line, *_ = content.splitlines()
    record = json.loads(line)
    record["slots"]["1"][0][0][0] = record["slots"]["1"][0][0][1]
    path.write_text(f"{head}\n{json.dumps(record)}\n")
    with pytest.raises(moec.JobError, match="slots of layer 1 do not begin with the homes of all 8 experts"):
        gloo.run(2, train_with_choices, plan, str(path), 6)


def test_moves_after_which_steps_take_longer_are_undone(gloo: GlooPool) -> None:
    words = "greedy(every = 10, threshold = 1.0); horizon = 1e12"
    plan = moe_plan(**MODEL, ranks=2, ep=2, adapt=words)
    (first, said), (second, nothing) = gloo.run(2, train_with_slow_moves, plan, 23)
    moved = [step for step, (has_moved, *_) in enumerate(first, 1) if has_moved]
    assert moved == [*range(12, 22)]  # after the loads of ten steps, one step for the choice; ten steps are watched
    assert {horizon for _, horizon, _ in first[21:]} == {0.5e12}
    assert [
        words for words in said if "layers 1..2 are back" in words and "1 s before they moved and 2 s since" in words
    ]
    assert not [words for words in nothing if "are back" in words]
    assert [(has_moved, loss) for has_moved, _, loss in first] == [(m, loss) for m, _, loss in second]


def test_after_moves_that_are_repeated_others_are_watched(gloo: GlooPool, tmp_path: Path) -> None:
    plan, path = (
        moe_plan(**MODEL, ranks=2, ep=2, adapt="greedy(every = 11, threshold = 1.0)"),
        str(tmp_path / "c.jsonl"),
    )
    moved = []
    for steps in (23, 46):  # the first run undoes its moves at the end; loads are gathered one step before
        (found, _), _ = gloo.run(2, train_with_slow_moves, plan, steps, path)
        moved.append([step for step, (has_moved, *_) in enumerate(found, 1) if has_moved])
    assert moved == [[*range(13, 23)], [*range(13, 23), *range(35, 45)]]


@each_row(
    ("content", "words"),
    [
        ('{"lr": 0.1}', "not a file of choices"),
        ('{"lr": 0.1}\nnotes', "line 1"),
        ('HEAD\n{"step": 1e999, "slots": {}}\n', "line 2"),
        ('HEAD\n{"step": 2.5, "slots": {}}\n', "not the number of a step"),
        ('HEAD\n{"step": 99999999999999999999999, "slots": {}}\n', "not the number of a step"),
    ],
)
def test_other_files_are_refused_and_left_as_they_are(tmp_path: Path, content: str, words: str) -> None:
    path, plan = tmp_path / "choices.jsonl", moe_plan(ep=2, adapt="replicate(4)")
    choices = PlacementChoices(path, plan)
    given = content.replace("HEAD", choices._head)
    path.write_text(given)
    complaint = choices.read()
    assert complaint is not None
    assert words in complaint.message
    assert path.read_text() == given


def test_choices_in_a_folder_that_is_not_there_are_refused(tmp_path: Path) -> None:
    complaint = PlacementChoices(tmp_path / "absent" / "choices.jsonl", moe_plan(ep=2, adapt="replicate(4)")).read()
    assert complaint is not None
    assert f"there is no folder {tmp_path}/absent" in complaint.message
