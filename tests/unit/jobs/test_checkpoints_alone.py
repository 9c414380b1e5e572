"""Checkpoints of one rank: what loads, what is refused, and that a refused load changes nothing."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.one_rank_jobs import take_steps
from support.plans import moe_plan
from torch import Tensor
from torch.utils.data import DataLoader

import moec
from moec.runtime.checkpoint.format.index import HEAD, INDEX, canonical, digest, head_bytes
from moec.runtime.errors import JobError
from moec.runtime.job.job import Job
from moec.runtime.model.module import PlanModule


def values_of(model: PlanModule, optimizer: Any) -> dict[str, Tensor]:
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}|{key}": value.clone() for key, value in optimizer.state.get(parameter, {}).items()}
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_second_resume_does_not_restore_the_first(job: Job, tmp_path: Path) -> None:
    """tt#647: a second resumption restored the first checkpoint."""
    model = job.build(seed=1)
    optimizer = job.optimizer(model)
    wanted = []
    for name in ("first", "second"):
        take_steps(job, model, optimizer)
        wanted.append(values_of(model, optimizer))
        job.save(tmp_path / name, model, optimizer).wait()
    for name, values in zip(("first", "second"), wanted, strict=True):
        job.load(tmp_path / name, model, optimizer)
        assert same(values_of(model, optimizer), values)
    assert not same(*wanted)


def test_what_is_saved_is_what_was_when_save_returned(job: Job, tmp_path: Path) -> None:
    model = job.build(seed=1)
    optimizer = job.optimizer(model)
    take_steps(job, model, optimizer)
    values, extra = values_of(model, optimizer), torch.ones(3)
    saving = job.save(tmp_path / "a", model, optimizer, extra=extra)
    extra.zero_()
    with torch.no_grad():
        for tensor in [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]:
            tensor.zero_()
    assert saving.wait() == tmp_path / "a"
    assert saving.done
    assert torch.equal(job.load(tmp_path / "a", model, optimizer)["extra"], torch.ones(3))
    assert same(values_of(model, optimizer), values)


def test_inference_mode_around_build_and_load_does_not_stop_training(tmp_path: Path) -> None:
    plan = moe_plan(ranks=1, ep=1, optimizer="adamw(lr = 1e-3); state = bf16")
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        take_steps(job, model, optimizer)
        with torch.inference_mode():
            job.save(tmp_path / "a", model, optimizer).wait()
        wanted = take_steps(job, model, optimizer)
        with torch.inference_mode():
            model = job.build(seed=2)
            optimizer = job.optimizer(model)
            job.load(tmp_path / "a", model, optimizer)
        assert take_steps(job, model, optimizer) == wanted


def test_load_fills_no_copy(job: Job, tmp_path: Path) -> None:
    """am#2682, am#2722: a copy was filled, and the experts that trained stayed random."""
    model = job.build(seed=1)
    optimizer = job.optimizer(model)
    take_steps(job, model, optimizer)
    values = values_of(model, optimizer)
    job.save(tmp_path / "a", model, optimizer)
    take_steps(job, model, optimizer)
    before = [p.data_ptr() for p in model.parameters()], [s["exp_avg"].data_ptr() for s in optimizer.state.values()]
    job.load(tmp_path / "a", model, optimizer)
    after = [p.data_ptr() for p in model.parameters()], [s["exp_avg"].data_ptr() for s in optimizer.state.values()]
    assert before == after
    assert same(values_of(model, optimizer), values)


def test_states_that_the_checkpoint_does_not_have_are_dropped(job: Job, tmp_path: Path) -> None:
    model = job.build(seed=1)
    optimizer = job.optimizer(model)
    job.save(tmp_path / "a", model, optimizer)
    losses = take_steps(job, model, optimizer)
    job.load(tmp_path / "a", model, optimizer)
    assert not optimizer.state
    assert take_steps(job, model, optimizer) == losses


def test_optimizer_states_do_not_follow_the_order_of_parameters_or_groups(job: Job, tmp_path: Path) -> None:
    """tt#3356: states were loaded in another order than that of the parameters."""
    model = job.build(seed=1)
    named = dict(model.named_parameters())
    names = sorted(named)
    groups = [{"params": [named[n] for n in names[:9]], "lr": 1e-3}, {"params": [named[n] for n in names[9:]]}]
    optimizer = torch.optim.Adam(groups, lr=1e-2)
    take_steps(job, model, optimizer)
    values = values_of(model, optimizer)
    job.save(tmp_path / "a", model, optimizer)
    backward = [
        {"params": [named[n] for n in reversed(names[9:])]},
        {"params": [named[n] for n in reversed(names[:9])], "lr": 5.0},
    ]
    other = torch.optim.Adam(backward, lr=7.0)
    with pytest.warns(UserWarning, match=r"made with other options: lr 0.01, here 7.0"):
        job.load(tmp_path / "a", model, other)
    assert same(values_of(model, other), values)
    assert [group["lr"] for group in other.param_groups] == [1e-2, 1e-3]


def test_groups_without_parameters_keep_their_own_options(job: Job, tmp_path: Path) -> None:
    model = job.build(seed=1)

    def optimizer_of(*rates: float) -> torch.optim.Optimizer:
        empty = [{"params": [], "lr": lr} for lr in rates[1:]]
        return torch.optim.Adam([*empty[:1], {"params": list(model.parameters()), "lr": rates[0]}, *empty[1:]])

    job.save(tmp_path / "a", model, optimizer_of(1e-3, 7.0, 9.0)).wait()
    other = optimizer_of(1e-2, 1.0, 2.0)
    job.load(tmp_path / "a", model, other)
    assert [group["lr"] for group in other.param_groups] == [7.0, 1e-3, 9.0]


def test_settings_steps_and_random_numbers_come_back(tmp_path: Path) -> None:
    plan = moe_plan(ranks=1, ep=1, gate="topk(2, normalize = true, jitter = 0.3)")
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=5)
        optimizer = job.optimizer(model)
        take_steps(job, model, optimizer)
        job.save(tmp_path / "a", model, optimizer)
        expected = take_steps(job, model, optimizer), torch.rand(4)
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=6)
        optimizer = job.optimizer(model)
        job.load(tmp_path / "a", model, optimizer)
        assert job.steps == 2
        assert model.settings == {"seed": 5, "step": 2}
        losses, drawn = take_steps(job, model, optimizer), torch.rand(4)
    assert losses == expected[0]
    assert torch.equal(drawn, expected[1])


def test_schedulers_and_plain_extras_come_back(job: Job, tmp_path: Path) -> None:
    model = job.build(seed=1)
    optimizer = job.optimizer(model)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.5)
    take_steps(job, model, optimizer)
    for _ in range(3):
        scheduler.step()
    plain = {
        "nested": {1: (1.5, float("inf"), None), "b": [True, b"\0x", 2**70], None: "ü"},
        "counter": Counter({3: 1}),
        "ordered": OrderedDict(b=1, a=2),
    }
    progress = {"epoch": 3, "seen": torch.arange(3)}
    job.save(tmp_path / "a", model, optimizer, scheduler=scheduler, plain=plain, progress=progress)
    other = job.optimizer(model)
    anew = torch.optim.lr_scheduler.MultiStepLR(other, [1], gamma=0.1)
    own: dict[str, Any] = {"stale": 1}
    found = job.load(tmp_path / "a", model, other, scheduler=anew, progress=own)
    assert found["plain"] == plain
    assert [type(value) for value in found["plain"].values()] == [dict, Counter, OrderedDict]
    assert anew.state_dict() == scheduler.state_dict()
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 5e-4
    assert own.keys() == {"epoch", "seen"}
    assert own["epoch"] == 3


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).T.bfloat16(),
        torch.arange(10)[::3],
        torch.tensor(True),
        torch.zeros(0, 3),
        torch.ones(2, 1, requires_grad=True).expand(2, 3),
    ],
    ids=["transposed", "strided", "0-d", "empty", "expanded"],
)
def test_extras_in_any_memory_layout_come_back(job: Job, tmp_path: Path, tensor: torch.Tensor) -> None:
    job.save(tmp_path / "a", job.build(), odd=torch.ones(3, dtype=torch.uint8), pair=[tensor, tensor])
    found = job.load(tmp_path / "a", job.build())["pair"]
    for copy in found:
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)


class Loader:
    """A data loader with `StatefulDataLoader`'s protocol."""

    def __init__(self, length: int) -> None:
        self.length, self.position = length, 7

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["position"] >= self.length:
            raise ValueError(f"position {state['position']} of {self.length} batches")
        self.position = state["position"]


def test_a_data_position_beyond_the_data_is_refused(job: Job, tmp_path: Path) -> None:
    model = job.build(seed=1)
    job.save(tmp_path / "a", model, loader=Loader(10))
    longer = Loader(8)
    longer.position = 0
    job.load(tmp_path / "a", model, loader=longer)
    assert longer.position == 7
    with pytest.raises(JobError, match=r"MOE0809.*loader.*position 7 of 5 batches"):
        job.load(tmp_path / "a", model, loader=Loader(5))


@pytest.mark.parametrize(
    ("extra", "place"),
    [
        ({"a": [1, {"b": {2}}]}, r"extra\['a'\]\[1\]\['b'\] is of type builtins\.set"),
        ({(1, 2): 3}, r"extra has a key of type tuple"),
        (lambda: 0, "extra is of type builtins.function"),
        (DataLoader([1]), "extra is a DataLoader of torch, which has no position"),
        (torch.zeros(2, dtype=torch.complex64), "extra is a tensor of torch.complex64"),
        ("\ud800", "surrogate"),
    ],
)
def test_an_extra_of_another_type_is_refused_with_its_place(job: Job, tmp_path: Path, extra: Any, place: str) -> None:
    with pytest.raises(JobError, match=f"MOE0808.*{place}"):
        job.save(tmp_path / "a", job.build(), extra=extra)
    assert not list(tmp_path.iterdir())


def test_an_extra_that_contains_itself_is_refused(job: Job, tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(JobError, match=r"MOE0808.*contains itself"):
        job.save(tmp_path / "a", job.build(), loop=loop)


def other_group(model: PlanModule) -> Any:
    parameters = list(model.parameters())
    return torch.optim.AdamW([{"params": parameters[:3]}, {"params": parameters[3:]}])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: torch.optim.Adam(m.parameters()), r"torch\.optim\.AdamW, but the optimizer is a torch\.optim\.Adam"),
        (lambda m: torch.optim.AdamW(m.parameters()), "2 groups with 29 parameters, the optimizer here 1 with 29"),
        (lambda m: torch.optim.AdamW([m.get_parameter("norm.weight")]), "only the checkpoint has"),
        (other_group, "no group here has exactly the"),
    ],
)
def test_another_optimizer_is_refused_and_nothing_changes(job: Job, tmp_path: Path, make: Any, message: str) -> None:
    model = job.build(seed=1)
    optimizer = job.optimizer(model)
    take_steps(job, model, optimizer)
    job.save(tmp_path / "a", model, optimizer)
    other = job.build(seed=2)
    wrong = make(other)
    before = values_of(other, wrong)
    with pytest.raises(JobError, match=f"(?s)MOE0806.*{message}"):
        job.load(tmp_path / "a", other, wrong)
    assert same(values_of(other, wrong), before)
    assert other.settings["step"] == 0


def test_a_state_of_another_dtype_is_never_cast(job: Job, tmp_path: Path) -> None:
    model = job.build(seed=1)
    optimizer = job.optimizer(model)
    take_steps(job, model, optimizer)
    job.save(tmp_path / "a", model, optimizer)
    state = next(iter(optimizer.state.values()))
    state["exp_avg"] = state["exp_avg"].bfloat16()
    with pytest.raises(JobError, match=r"MOE0806.*exp_avg of .* is F32 in the checkpoint, but BF16 here"):
        job.load(tmp_path / "a", model, optimizer)


def test_the_next_save_and_the_end_of_the_job_raise_an_error_that_was_not_seen(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build()
        failed = job.save(tmp_path / "file" / "a", model)
        with pytest.raises(JobError, match="MOE0804"):
            job.save(tmp_path / "b", model)
        job.save(tmp_path / "c", model)
        with pytest.raises(JobError, match="MOE0804"):
            failed.wait()
    with pytest.raises(JobError, match="MOE0804"), moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        job.save(tmp_path / "file" / "a", job.build())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "file"]


def test_a_job_that_has_ended_saves_nothing(tmp_path: Path) -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build()
    with pytest.raises(JobError, match="MOE0709"):
        job.save(tmp_path / "a", model)


def rewritten(path: Path, change: Any) -> None:
    """Changes index.json, and makes the digests match."""
    index = json.loads((path / INDEX).read_bytes())
    change(index)
    content = canonical(index)
    (path / INDEX).write_bytes(content)
    head = json.loads((path / HEAD).read_bytes())
    fields = {key: value for key, value in head.items() if key not in ("format", "digest")}
    (path / HEAD).write_bytes(head_bytes({**fields, "index": digest(content)}))


def options_of(index: dict[str, Any]) -> list[Any]:
    found: list[Any] = index["optimizer"]["groups"][0]["options"]["dict"]
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: options_of(index).append(["params", {"list": []}]), "MOE0801.*options of group 0 are not those"),
        (lambda index: options_of(index).append(["lr", {"tensor": 7}]), "MOE0801.*options/0/7 is missing"),
        (lambda index: options_of(index).append(["lr", {"eval": "1"}]), "MOE0801.*there is no 'eval'"),
        (lambda index: index["optimizer"]["groups"][0].update(options=3), "MOE0801.*options of group 0 are not those"),
        (lambda index: index["extras"]["epoch"].update(copies=[{"dict": [[{"list": []}, 1]]}]), "MOE0801.*extra epoch"),
        (lambda index: index["extras"]["epoch"].update(copies=[{"a": 1, "b": 2}]), "MOE0801.*extra epoch"),
        (lambda index: index["settings"].update(step=-1), "MOE0715.*step"),
        (lambda index: index["settings"].update(training=1), "MOE0715.*training"),
    ],
)
def test_plain_data_that_moec_does_not_write_is_refused_and_nothing_changes(
    job: Job, tmp_path: Path, change: Any, message: str
) -> None:
    """With digests that match: no accident, but intent."""
    model = job.build(seed=1)
    optimizer = job.optimizer(model)
    take_steps(job, model, optimizer)
    job.save(tmp_path / "a", model, optimizer, epoch=1).wait()
    rewritten(tmp_path / "a", change)
    other = job.build(seed=2)
    fresh = job.optimizer(other)
    before, state = values_of(other, fresh), torch.get_rng_state()
    with pytest.raises(JobError, match=f"(?s){message}"):
        job.load(tmp_path / "a", other, fresh)
    assert same(values_of(other, fresh), before)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_optimizer_with_tensors_in_lists_is_refused_when_it_saves(tmp_path: Path) -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build(seed=1)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            return job.step(model, tokens, tokens)

        tokens = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            optimizer.step(closure)
        with pytest.raises(JobError, match=r"MOE0807.*old_dirs of .* tensors inside"):
            job.save(tmp_path / "1", model, optimizer)
        assert not (tmp_path / "1").exists()
