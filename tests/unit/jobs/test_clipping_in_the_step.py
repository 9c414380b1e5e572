"""`job.clip_grad_norm_(model, max_norm, optimizer=…)`: the optimizer scales gradients in its step."""

import copy
import math
from functools import partial

import pytest
import torch
from support.combinations import diagonals
from support.one_rank_jobs import OPTIMIZERS, TOKENS, ending
from support.plans import moe_plan

import moec
from moec.runtime.errors import JobError
from moec.runtime.job import job as job_module
from moec.runtime.optimizers.clipping import HandedOver

WEIGHT = "layers.1.attention.q.weight"


class Run:
    """Two models with equal parameters: `clipped` scales gradients itself, `inside` leaves it to the step."""

    def __init__(
        self, optimizer: str = OPTIMIZERS["adamw"], max_norm: float = 0.1, on_nonfinite: str = "raise"
    ) -> None:
        plan = moe_plan(ranks=1, ep=1, optimizer=optimizer)
        self.job = moec.launch(plan, device="cpu", on_nonfinite=on_nonfinite).__enter__()
        self.models = {"clipped": self.job.build(seed=1), "inside": self.job.build(seed=1)}
        self.optimizers = {name: self.job.optimizer(model) for name, model in self.models.items()}
        self.max_norm = max_norm

    def clip(self, name: str) -> torch.Tensor:
        given = {"optimizer": self.optimizers[name]} if name == "inside" else {}
        return self.job.clip_grad_norm_(self.models[name], self.max_norm, **given)

    def clipped_loss(self, name: str) -> torch.Tensor:
        """For a closure: new gradients, clipped, and their loss."""
        self.optimizers[name].zero_grad()
        loss = self.job.step(self.models[name], TOKENS, TOKENS)
        self.clip(name)
        return loss

    def backward(self, name: str, tokens: torch.Tensor = TOKENS) -> None:
        self.job.step(self.models[name], tokens, tokens)

    def require_equal(self) -> None:
        clipped, inside = self.models.values()
        for (name, one), other in zip(clipped.named_parameters(), inside.parameters(), strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def train(run: Run, do) -> None:
    with ending(run.job):
        for name, optimizer in run.optimizers.items():
            do(name, run.models[name], optimizer)
    run.require_equal()


@pytest.mark.parametrize(("optimizer", "max_norm"), diagonals(list(OPTIMIZERS), [0.1, 0.0, 1e9]))
def test_steps_and_gradients_after_them_are_those_of_gradients_scaled_before(optimizer: str, max_norm: float):
    run = Run(OPTIMIZERS[optimizer], max_norm)
    found = {"clipped": [], "inside": []}

    def three_steps(name, model, update):
        for _ in range(3):
            run.backward(name)
            found[name].append(float(run.clip(name)))
            assert isinstance(model.get_parameter(WEIGHT).grad, HandedOver) == (
                name == "inside" and optimizer not in ("sgd", "lion")
            )
            update.step()
            found[name].append(model.get_parameter(WEIGHT).grad.clone())
            update.zero_grad()

    train(run, three_steps)
    for one, other in zip(found["clipped"], found["inside"], strict=True):
        torch.testing.assert_close(torch.as_tensor(other), torch.as_tensor(one), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_has_the_same_effect(norm: float):
    run = Run(on_nonfinite="ignore")

    def one_step(name, model, update):
        run.backward(name)
        model.get_parameter(WEIGHT).grad[0, 0, 0] = norm
        assert not run.clip(name).isfinite()
        update.step()

    with ending(run.job):
        for name, optimizer in run.optimizers.items():
            one_step(name, run.models[name], optimizer)
    for one, other in zip(*(model.parameters() for model in run.models.values()), strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_factor_without_its_step_does_not_reach_the_next_step(set_to_none: bool):
    run = Run()

    def skip_one(name, model, update):
        run.backward(name)
        run.clip(name)
        update.zero_grad(set_to_none=set_to_none)
        run.backward(name)
        update.step()
        assert getattr(update, "grad_scale", None) is None

    train(run, skip_one)


def test_zeroed_gradients_are_zeros_in_the_step():
    run = Run()

    def zeroed(name, model, update):
        run.backward(name)
        run.clip(name)
        update.zero_grad(set_to_none=False)
        update.step()

    train(run, zeroed)


def test_a_second_clipping_is_of_clipped_gradients():
    run = Run()
    norms = {}

    def twice(name, model, update):
        run.backward(name)
        run.clip(name)
        norms[name] = float(run.clip(name))
        update.step()

    train(run, twice)
    assert norms["inside"] == pytest.approx(0.1, rel=1e-4)


def test_a_step_looks_for_handed_over_gradients_once_after_a_clipping(monkeypatch: pytest.MonkeyPatch):
    looked = []
    monkeypatch.setattr(job_module, "take_back", lambda parameters: looked.append(len(list(parameters))))
    run = Run()
    with ending(run.job):
        run.backward("inside")
        run.clip("inside")
        run.optimizers["inside"].step()
        for _ in range(3):
            run.backward("clipped")
            run.backward("inside")
    assert len(looked) == 1


def test_more_gradients_are_added_to_clipped_ones():
    run = Run()

    def accumulated(name, model, update):
        run.backward(name)
        run.clip(name)
        run.backward(name, TOKENS.roll(1, 0))
        update.step()
        with run.job.accumulate(model, TOKENS):
            model(TOKENS, TOKENS).loss.backward()
        run.clip(name)
        with run.job.accumulate(model, TOKENS):
            model(TOKENS, TOKENS).loss.backward()
        update.step()

    train(run, accumulated)


def test_a_closure_sees_clipped_gradients_and_replaces_them():
    run = Run()

    def with_closure(name, model, update):
        run.backward(name)
        run.clip(name)

        def closure():
            return run.job.step(model, TOKENS, TOKENS)

        update.step(closure)

    train(run, with_closure)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_closure_that_clips_steps_with_clipped_gradients(optimizer: str):
    run = Run(OPTIMIZERS[optimizer])

    def with_closure(name, model, update):
        closure = partial(run.clipped_loss, name)
        for _ in range(2):
            update.step(closure)
        run.backward(name)
        run.clip(name)
        assert isinstance(model.get_parameter(WEIGHT).grad, HandedOver) == (name == "inside")
        update.step()

    train(run, with_closure)


def test_a_closure_that_clips_for_an_optimizer_of_the_script_works_at_its_first_step():
    run = Run()
    run.optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True) for name, model in run.models.items()
    }

    def with_closure(name, model, update):
        closure = partial(run.clipped_loss, name)
        update.step(closure)

    train(run, with_closure)


def test_gradients_of_frozen_and_dropped_parameters_stay_away():
    run = Run()

    def partly(name, model, update):
        model.get_parameter("embedding.weight").requires_grad_(False)
        run.backward(name)
        run.clip(name)
        model.get_parameter(WEIGHT).grad = None
        update.step()

    train(run, partly)


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p.grad.norm(),
        lambda p: p.grad.add_(1),
        lambda p: p.grad[0].zero_(),
        lambda p: p.grad.data.mul_(2),
        lambda p: torch._foreach_mul_([p.grad], 2.0),
        lambda p: torch.nn.utils.clip_grad_norm_([p], 1.0),
        lambda p: p.grad.to_local(),
        lambda p: torch.optim.SGD([p]).step(),
        lambda p: (p * 2).sum().backward(),
    ],
    ids=["norm", "add_", "row", "data", "foreach", "clip", "to_local", "another optimizer", "backward"],
)
def test_a_gradient_between_clipping_and_step_is_neither_read_nor_changed(use):
    run = Run()
    with ending(run.job):
        run.backward("inside")
        run.clip("inside")
        with pytest.raises(JobError, match="MOE0716"):
            use(run.models["inside"].get_parameter(WEIGHT))


def test_an_optimizer_that_lacks_parameters_or_does_not_fuse_finds_gradients_scaled():
    run = Run()
    model = run.models["inside"]
    some = torch.optim.AdamW(list(model.parameters())[:3], fused=True)
    unfused = torch.optim.AdamW(model.parameters(), fused=False)
    for optimizer in (some, unfused, torch.optim.SGD(model.parameters())):
        with ending(run.job):
            run.backward("inside")
            run.job.clip_grad_norm_(model, 0.1, optimizer=optimizer)
            total = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            model.zero_grad()
        assert float(total) == pytest.approx(0.1, rel=1e-4)


def test_a_scale_of_another_owner_is_kept():
    """`GradScaler` sets `grad_scale` itself."""
    run = Run()

    def scaled(name, model, update):
        run.backward(name)
        run.clip(name)
        update.grad_scale = torch.tensor(4.0)
        update.step()
        assert float(update.grad_scale) == 4.0

    train(run, scaled)


def test_an_exception_in_the_step_leaves_no_factor_behind():
    run = Run()
    update = run.optimizers["inside"]
    with ending(run.job):
        run.backward("inside")
        run.clip("inside")
        group = update.param_groups[0]
        broken, group["betas"] = group["betas"], None
        with pytest.raises(TypeError):
            update.step()
        group["betas"] = broken
        update.zero_grad()
        run.backward("inside")
        update.step()
    with ending(run.job):
        run.backward("clipped")
        run.optimizers["clipped"].step()
    run.require_equal()


def test_a_copy_has_clipped_gradients_and_its_original_waits():
    gradient = torch.tensor([3.0, 4.0])
    waiting = HandedOver(gradient, torch.tensor(2.0))
    assert torch.equal(copy.deepcopy(waiting), torch.tensor([1.5, 2.0]))
    assert torch.equal(waiting.unscaled(), torch.tensor([3.0, 4.0]))


@pytest.mark.parametrize("steps_then", [True, False])
def test_zeroed_gradients_stay_zeros_whatever_the_norm_was(steps_then: bool):
    """The factor of a norm that is NaN is NaN."""
    run = Run(on_nonfinite="ignore")

    def do(name, model, optimizer):
        run.backward(name)
        model.get_parameter(WEIGHT).grad[0] = math.nan
        assert run.clip(name).isnan()
        optimizer.zero_grad(set_to_none=False)
        if steps_then:
            optimizer.step()
        run.backward(name)
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        optimizer.step()

    train(run, do)
