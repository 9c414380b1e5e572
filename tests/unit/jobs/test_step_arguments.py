"""Arguments of `job.step` and `clip_grad_norm_` that would silently do something else."""

from __future__ import annotations

import copy
import math
import re
import warnings
from typing import Any

import pytest
import torch
from support.plans import layer_text, moe_plan

import moec
from moec.runtime.errors import JobError
from moec.runtime.job.job import Job

TOKENS = torch.arange(16).view(2, 8)


def test_replicas_are_compared_before_every_nth_step_of_either_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    monkeypatch.setattr(Job, "check_replicas", lambda job, _: compared.append(job.steps))
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu", check_replicas=2) as job:
        model = job.build()
        for _ in range(3):
            job.step(model, TOKENS, TOKENS)
            with job.accumulate(model, TOKENS):
                model(TOKENS, TOKENS).loss.backward()
    assert compared == [2, 4, 6]


def test_inputs_that_no_function_takes_are_refused() -> None:
    weights = {"weights": torch.ones(2, 8)}
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build()
        with pytest.raises(JobError, match=r"MOE0713.*got the inputs weights, but no loss, logprob_loss or count"):
            job.step(model, TOKENS, TOKENS, inputs=weights)
        assert all(parameter.grad is None for parameter in model.parameters())
        job.step(model, TOKENS, TOKENS, inputs=weights, count=lambda labels, weights: weights.sum())
        job.step(model, TOKENS, TOKENS, inputs={})


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_a_norm_is_a_number_from_0_on(max_norm: float) -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build()
        job.step(model, TOKENS, TOKENS)
        before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        with pytest.raises(ValueError, match=f"max_norm must be a number, at least 0, not {max_norm}"):
            job.clip_grad_norm_(model, max_norm)
        assert all(torch.equal(model.get_parameter(name).grad, grad) for name, grad in before.items())
        job.clip_grad_norm_(model, 0.0)
        assert not any(parameter.grad.any() for parameter in model.parameters())
    with pytest.raises(ValueError, match="max_norm must be a number"):
        moec.clip_grad_norm_(moec.layer(layer_text(ranks=None)), max_norm)


def test_a_step_in_evaluation_warns_once_per_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build().eval()
        other = copy.deepcopy(model)
        with pytest.warns(UserWarning, match=r"job.step trains a model in eval\(\).*`model.train\(\)`") as caught:
            job.step(model, TOKENS, TOKENS + 1)
        assert [warning.filename for warning in caught] == [__file__]
        job.step(model, TOKENS, TOKENS + 1)
        with warnings.catch_warnings(record=True) as second:
            warnings.simplefilter("always")
            monkeypatch.setenv("RANK", "1")
            job.step(other, TOKENS, TOKENS + 1)
        assert second == []


def test_a_step_in_training_does_not_warn() -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            job.step(model, TOKENS, TOKENS + 1)


def test_numbers_of_micro_batches_are_integers() -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build()
        for number in ("2", 1.5, 0, True):
            with pytest.raises(JobError, match=rf"MOE0713.*microbatches must be an integer .* not {number!r}"):
                job.step(model, TOKENS, TOKENS, microbatches=number)


@pytest.mark.parametrize("name", ["loss", "logprob_loss", "count"])
@pytest.mark.parametrize("given", [0, False, "mean"])
def test_functions_are_callable(name: str, given: Any) -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model, words = job.build(), rf"MOE0713.*{name} must be a function .* not {given!r}"
        with pytest.raises(JobError, match=words):
            job.step(model, TOKENS, TOKENS + 1, **{name: given})


@pytest.mark.parametrize("counted", [torch.tensor(True), True], ids=["tensor", "bool"])
def test_a_count_that_is_a_bool_is_refused(counted: Any) -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        with pytest.raises(JobError, match=r"MOE0713.*the count gave .*True.*must give a number from 0 on") as raised:
            job.step(job.build(), TOKENS, TOKENS, count=lambda labels: counted)
        assert "`(labels != -100).sum()`" in raised.value.diagnostics[0].help


@pytest.mark.parametrize(
    ("labels", "tokens", "words", "way_out"),
    [
        ([TOKENS, TOKENS], (), "a list in place of a tensor of labels", "`job.accumulate(model, *labels)`"),
        (TOKENS, TOKENS, "tokens of class Tensor, not a tuple", "`tokens=(…, …)`"),
        (TOKENS, [None], "a NoneType in place of a tensor of tokens", "`tokens=(…, …)`"),
    ],
    ids=["a list of labels", "one tensor of tokens", "no tensor"],
)
def test_accumulate_says_how_to_pass_what_is_no_tensor(labels: Any, tokens: Any, words: str, way_out: str) -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build()
        with pytest.raises(JobError, match=f"MOE0713.*{words}") as raised, job.accumulate(model, labels, tokens=tokens):
            pass
        assert way_out in (raised.value.diagnostics[0].help or "")


# ---- what counts as a step ---------------------------------------------------------------------------------


def counted(job: Job) -> tuple[int, ...]:
    return job.steps, job.new_steps, job.tokens, job.new_tokens, job.total_tokens


def test_steps_and_blocks_that_raise_do_not_count_nor_do_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    monkeypatch.setattr(Job, "check_replicas", lambda job, _: compared.append(job.steps))
    ignored = torch.full_like(TOKENS, -100)
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu", check_replicas=2) as job:
        model = job.build()
        job.step(model, TOKENS, TOKENS)
        before = counted(job)
        assert before == (1, 1, 16, 16, 16)
        for labels, wanted in ((TOKENS + 1000, "MOE0702.*step 2"), (ignored, "MOE0713")):
            with pytest.raises(JobError, match=wanted):
                job.step(model, TOKENS, labels)
            assert counted(job) == before
        with pytest.raises(JobError, match="MOE0713"), job.accumulate(model):
            pass
        with pytest.raises(ZeroDivisionError), job.accumulate(model, TOKENS):
            1 / 0  # noqa: B018
        assert counted(job) == before
        assert model.settings["step"] == 1
        model.zero_grad()
        with job.accumulate(model, TOKENS):
            model(TOKENS, TOKENS).loss.backward()
            with pytest.raises(JobError, match="one step at a time"):
                job.step(model, TOKENS, TOKENS)
            assert job.steps == 2
        assert counted(job) == (2, 2, 32, 32, 32)
    assert compared == [2] * 5  # a step that is taken again is the second again


def test_a_step_inside_a_block_that_fails_counts() -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model, other = job.build(seed=1), job.build(seed=2)

        def fail_after_a_step_of_the_other() -> None:
            with job.accumulate(model, TOKENS):
                job.step(other, TOKENS[:1], TOKENS[:1])
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail_after_a_step_of_the_other()
        assert (job.steps, job.new_steps) == (1, 1)
        assert job.tokens == job.new_tokens == job.total_tokens == TOKENS[:1].numel()


def test_a_step_whose_loss_is_not_finite_counts_only_if_it_is_skipped() -> None:
    for mode, steps in (("raise", 0), ("skip", 1), ("ignore", 1)):
        with moec.launch(moe_plan(ranks=1, ep=1), device="cpu", on_nonfinite=mode) as job:
            model = job.build()

            def infinite(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
                return logits.sum() * math.inf

            if mode == "raise":
                with pytest.raises(JobError, match=r"MOE0723.*step 1: the loss is"):
                    job.step(model, TOKENS, TOKENS, loss=infinite)
            else:
                job.step(model, TOKENS, TOKENS, loss=infinite)
            assert (job.steps, job.tokens) == (steps, 16 * steps)
            assert model.settings["step"] == steps


# ---- a loss of one's own inside of `accumulate` ------------------------------------------------------------


def test_a_block_without_labels_in_its_passes_names_the_way_out_which_trains_the_same() -> None:
    """The gradient of the script's loss, the states' update and the share of the balance terms are those of a step."""
    plan = moe_plan(ranks=1, ep=1, gate="topk(2, bias = online(0.01))")
    tokens = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(3))
    parts = tokens.chunk(2)

    def squares(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return logits.square().sum()

    with moec.launch(plan, device="cpu") as job:
        model, whole = job.build(seed=1), job.build(seed=1)
        with (
            pytest.raises(JobError, match="got 32 labels, its forward passes had 0") as raised,
            job.accumulate(model, *parts),
        ):
            squares(model(tokens).logits, tokens).backward()
        way_out = raised.value.diagnostics[0].help or ""
        assert "call `model(tokens, labels)`" in way_out
        assert "`job.step(…, loss=…)`" in way_out
        assert "`job.update_states(model)`" in way_out
        model.zero_grad()
        loss, shares = 0.0, 0.0
        with job.accumulate(model, *parts):
            for part in parts:
                output = model(part, part)
                own = squares(output.logits, part) / tokens.numel() + output.aux_loss
                own.backward()
                loss, shares = loss + own.item(), shares + output.aux_loss.item()
        wanted = job.step(whole, tokens, tokens, loss=squares, microbatches=2)
        assert loss == pytest.approx(float(wanted), rel=1e-5)
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, msg=name)
        states = dict(whole.named_buffers())
        assert any(state.any() for state in states.values())
        assert all(torch.equal(model.get_buffer(name), state) for name, state in states.items())
        assert shares == pytest.approx(sum(whole(part).aux_loss.item() for part in parts) / 2, rel=0.1)


def test_an_evaluation_between_the_passes_of_a_step_counts_its_own_labels() -> None:
    """Its loss is that of a pass outside of the step, and the step's gradients are those without it."""
    labels = TOKENS.clone()
    labels[0, :5] = -100
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build(seed=1)
        other = copy.deepcopy(model)
        job.step(other, TOKENS, labels)
        with torch.no_grad():
            alone = model.eval()(TOKENS, TOKENS).loss
        model.train()
        with job.accumulate(model, labels[:1], labels[1:]):
            model(TOKENS[:1], labels[:1]).loss.backward()
            with torch.no_grad():
                between = model.eval()(TOKENS, TOKENS)
            model.train()
            model(TOKENS[1:], labels[1:]).loss.backward()
        assert torch.equal(between.loss, alone)
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad)


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        (
            {"loss": torch.nn.functional.cross_entropy},
            r"loss\(logits, labels\)` with logits \[2, 8, 32\], labels \[2, 8\]",
        ),
        ({"logprob_loss": torch.nn.functional.nll_loss}, r"logprob_loss\(logprobs, labels\)` with logprobs \[2, 8\]"),
        (
            {"count": lambda labels, weights: weights.sum()},
            r"count\(labels\)` with labels \[2, 8\]; it must give a number",
        ),
    ],
    ids=["loss", "logprob_loss", "count"],
)
def test_a_function_that_raises_over_its_arguments_is_told_what_it_is_called_with(
    arguments: dict[str, Any], call: str
) -> None:
    (name,) = arguments
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build()
        with pytest.raises(JobError, match=f"MOE0713.*the function `{name}` raised") as raised:
            job.step(model, TOKENS, TOKENS, **arguments)
        assert re.search(call, raised.value.diagnostics[0].help)
        assert type(raised.value.__cause__) in (RuntimeError, TypeError, ValueError)
        assert job.steps == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), ZeroDivisionError(), JobError("MOE0713", "")])
def test_other_errors_of_a_loss_stay_as_they_are(error: Exception) -> None:
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        raise error

    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build()
        with pytest.raises(type(error)) as raised:
            job.step(model, TOKENS, TOKENS, loss=loss)
    assert raised.value is error


def test_a_loss_that_freezes_a_parameter_is_refused() -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build()
        tokens = torch.arange(8).view(2, 4)

        def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            model.get_submodule("layers.0").requires_grad_(False)
            return logits.sum()

        with pytest.raises(JobError, match=r"MOE0713.*`loss` changed `requires_grad` of the model's parameters"):
            job.step(model, tokens, tokens, loss=loss)
        job.step(model, tokens, tokens, loss=lambda logits, labels: logits.sum())  # frozen between steps
