"""Losses and gradients that are NaN or infinite do not reach weights, optimizer states or states of the model."""

from __future__ import annotations

import math

import pytest
import torch
from support.combinations import diagonals
from support.one_rank_jobs import OPTIMIZERS
from support.plans import moe_plan

import moec
from moec.runtime.errors import JobError
from moec.runtime.guards import finite_steps
from moec.runtime.job.job import Job
from moec.runtime.model.module import PlanModule

TOKENS = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(0))
WEIGHT = "layers.1.attention.q.weight"


def launched(optimizer: str = OPTIMIZERS["adamw"], on_nonfinite: str = "raise", **options: object) -> Job:
    return moec.launch(moe_plan(ranks=1, ep=1, optimizer=optimizer, **options), device="cpu", on_nonfinite=on_nonfinite)


def weights(model: PlanModule) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def infinite_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.float().sum() * torch.inf


def require_equal(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_a_loss_that_is_not_finite_is_an_error_of_the_step():
    with launched() as job:
        model = job.build(seed=1)
        job.step(model, TOKENS, TOKENS)
        before = model.settings["step"]
        with pytest.raises(JobError, match=r"MOE0723.*step 2: the loss is (nan|inf)"):
            job.step(model, TOKENS, TOKENS, loss=infinite_loss)
        assert model.settings["step"] == before
        model.zero_grad()
        assert job.step(model, TOKENS, TOKENS).isfinite()


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("hands_over", [True, False])
def test_a_norm_that_is_not_finite_names_a_gradient(number: float, hands_over: bool):
    with launched() as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        job.step(model, TOKENS, TOKENS)
        model.get_parameter(WEIGHT).grad[0, 0, 0] = number
        with pytest.raises(JobError, match=f"MOE0723.*step 1: the gradient of {WEIGHT} is NaN or infinite"):
            job.clip_grad_norm_(model, 1.0, optimizer=optimizer if hands_over else None)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values())
def test_an_optimizer_of_the_job_refuses_gradients_that_no_norm_was_taken_of(optimizer: str):
    with launched(optimizer) as job:
        model = job.build(seed=1)
        update, before = job.optimizer(model), weights(model)
        job.step(model, TOKENS, TOKENS)
        model.get_parameter(WEIGHT).grad[0, 0, 0] = math.nan
        with pytest.raises(JobError, match=f"MOE0723.*{WEIGHT}"):
            update.step()
        require_equal(weights(model), before)
        assert not update.state_dict()["state"]


def test_a_second_pass_after_the_norm_is_looked_at():
    with launched() as job:
        model = job.build(seed=1)
        update = job.optimizer(model)
        job.step(model, TOKENS, TOKENS)
        job.clip_grad_norm_(model, 1.0)
        job.step(model, TOKENS, TOKENS)
        model.get_parameter(WEIGHT).grad[0, 0, 0] = math.nan
        with pytest.raises(JobError, match="MOE0723"):
            update.step()


def test_a_backward_by_hand_after_the_norm_is_looked_at():
    with launched() as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        job.step(model, TOKENS, TOKENS)
        job.clip_grad_norm_(model, 1.0)
        (model(TOKENS).logits.sum() * torch.nan).backward()
        with pytest.raises(JobError, match=r"MOE0723.*the gradient of .* is NaN or infinite"):
            optimizer.step()


def test_gradients_whose_norm_was_taken_are_looked_at_once(monkeypatch: pytest.MonkeyPatch):
    with launched() as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        looks = []
        monkeypatch.setattr(finite_steps, "_have_finite_norms", lambda parameters: bool(looks.append(1)) or True)
        for clipped in (True, False, True):
            job.step(model, TOKENS, TOKENS)
            if clipped:
                job.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert len(looks) == 1


@pytest.mark.parametrize(
    ("where", "optimizer"), diagonals(["loss", "router", "norm", "update", "accumulate"], list(OPTIMIZERS.values()))
)
def test_a_skipped_step_changes_nothing_and_training_goes_on_as_without_it(where: str, optimizer: str):
    # Biases follow the loads of a step whose loss is finite, as job.step has moved them before its gradients are seen.
    gate = "topk(2)" if where in ("norm", "update") else "topk(2, bias = online(0.01))"

    def steps(faulty: bool) -> tuple[dict[str, torch.Tensor], int, int]:
        with launched(optimizer, "skip", gate=gate) as job:
            model = job.build(seed=1)
            update = job.optimizer(model)
            for number in range(3):
                bad = faulty and number == 1
                if number == 1 and not faulty:
                    model.set(step=2)
                    continue
                router = model.get_parameter("layers.1.moe.gate.weight")
                held = router.detach().clone()
                if bad and where in ("router", "accumulate"):
                    router.data[0] = math.inf
                if bad and where == "accumulate":
                    with job.accumulate(model, TOKENS):
                        model(TOKENS, TOKENS).loss.backward()
                else:
                    job.step(model, TOKENS, TOKENS, loss=infinite_loss if bad and where == "loss" else None)
                router.data.copy_(held)
                if bad and where in ("norm", "update"):
                    model.get_parameter(WEIGHT).grad[0, 0, 0] = math.nan
                if where != "update":
                    norm = job.clip_grad_norm_(model, 1.0, optimizer=update)
                    assert norm.isfinite() or (bad and where == "norm")
                update.step()
                update.zero_grad()
            return weights(model), job.finite.skipped, model.settings["step"]

    got, skipped, count = steps(faulty=True)
    wanted, none, wanted_count = steps(faulty=False)
    require_equal(got, wanted)
    assert (skipped, none) == (1, 0)
    assert count == wanted_count == 3


def test_ignored_numbers_go_through():
    with launched(on_nonfinite="ignore") as job:
        model = job.build(seed=1)
        update = job.optimizer(model)
        assert not job.step(model, TOKENS, TOKENS, loss=infinite_loss).isfinite()
        assert not job.clip_grad_norm_(model, 1.0).isfinite()
        update.step()
        assert not model.get_parameter(WEIGHT).isfinite().all()


def test_another_word_is_refused():
    with pytest.raises(ValueError, match="on_nonfinite must be 'raise', 'skip' or 'ignore', not 'warn'"):
        launched(on_nonfinite="warn")


def test_a_skipped_step_leaves_parameters_of_the_script_alone_and_counts_once():
    with launched(on_nonfinite="skip") as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        own = torch.nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [own]})
        for loss in (infinite_loss, None):
            job.step(model, TOKENS, TOKENS, loss=loss)
            own.grad = torch.full((3,), math.nan)
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(own.detach(), torch.ones(3))
        assert job.finite.skipped == 2
