"""A job's model behaves like any PyTorch module: on one, two and four ranks, in fp32 and bf16, with ZeRO."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from support.ranks import claims, contract, contract_jobs, own_losses, refusals
from support.ranks.contract import FOUR, MIXED, ONE, TWO, plain
from support.ranks.gloo_pool import GlooPool
from support.session import extent

BOUNDS = {"fp32": 2e-5, "bf16": 4e-2}
"""Bounds of errors over the largest gradient. bf16 has 8 bits; its unsharded model has the same error."""


def cases_in(folder: str = "", ranks: int = 1) -> dict[str, tuple[contract.Run, contract.Score]]:
    """Ways to gradients, and the loss of the unsharded model. One saves in `folder`; `ranks`: data-parallel ones."""
    return {
        "a plain backward pass": (contract.forward_backward, plain),
        "a step after an exception in backward": (claims.after_an_exception, plain),
        "a step after an exception in forward": (claims.after_an_exception_in_forward, plain),
        "torch.autograd.grad, which leaves .grad alone": (claims.by_autograd_grad, plain),
        "a deep copy, whatever became of the original": (claims.of_a_deep_copy, plain),
        "micro-batches, however labels are masked": (claims.in_micro_batches, plain),
        "accumulation by hand": (claims.accumulated_by_hand, plain),
        "one backward pass of several forward passes": (claims.one_backward_of_many_forwards, plain),
        "two backward passes of one forward pass": (claims.retained, plain),
        "activation checkpointing by torch": (claims.checkpointed, plain),
        "a checkpoint of the whole model": (claims.wholly_checkpointed, plain),
        "a replaced parameter": (claims.replaced, plain),
        "weights loaded after the optimizer was made": (claims.loaded_after_the_optimizer, plain),
        "an unsharded model's state_dict": (claims.whole_state_loaded, plain),
        "a loss by hand, with the balance terms": (own_losses.own_backward, plain),
        "steps of layers behind other modules": (claims.of_wrapped_layers, plain),
        "torch's distributed checkpoint, which keeps every expert": (
            partial(claims.through_distributed_checkpoint, folder=folder),
            plain,
        ),
        "a layer that the last micro-batch skips": (
            claims.skipped_in_the_last_micro_batch,
            partial(claims.skipped_unsharded, ranks=ranks),
        ),
        "a rank without a valid token": (
            own_losses.constant_on_one_rank,
            partial(own_losses.constant_unsharded, ranks=ranks),
        ),
        "a loss of one's own": (partial(own_losses.own_loss, microbatches=1), own_losses.own_loss_unsharded),
        "a loss of one's own, in micro-batches": (
            partial(own_losses.own_loss, microbatches=3),
            own_losses.own_loss_unsharded,
        ),
        "a loss of log-probabilities": (
            partial(own_losses.own_logprob_loss, microbatches=1),
            own_losses.own_logprob_loss_unsharded,
        ),
        "a loss of log-probabilities, in micro-batches": (
            partial(own_losses.own_logprob_loss, microbatches=3),
            own_losses.own_logprob_loss_unsharded,
        ),
    }


CLAIMS = list(cases_in())

CONTEXT: dict[str, Any] = {"ranks": 4, "cp": 2, "ep": 2, "etp": 2, "zero": 1}
"""Ranks that share sequences, each with a part of every sequence."""

PLACES: dict[str, dict[str, Any]] = {
    "1 rank": ONE,
    "1 rank, bf16": {**ONE, "dtype": "bf16"},
    "2 ranks": TWO,
    "2 ranks, recompute": {**TWO, "recompute": "layer"},
    "4 ranks": FOUR,
    "4 ranks, bf16": {**FOUR, "dtype": "bf16", "model": "keep_in_fp32 = [routers]"},
    "4 ranks, recompute": {**FOUR, "recompute": "layer"},
    "4 ranks, cp 2": CONTEXT,
    **{f"2 ranks, zero {stage}": {**MIXED, "zero": stage} for stage in (1, 2, 3)},
    **{f"4 ranks, zero {stage}": {**FOUR, "zero": stage} for stage in (1, 2, 3)},
}
OFTEN = {
    "1 rank, bf16": CLAIMS,
    "2 ranks": CLAIMS,
    "2 ranks, recompute": ["a step after an exception in backward", "two backward passes of one forward pass"],
    "2 ranks, zero 1": ["a step after an exception in backward", "accumulation by hand"],
    "2 ranks, zero 3": CLAIMS,
    "4 ranks, zero 3": ["micro-batches, however labels are masked", "a loss of one's own, in micro-batches"],
    "4 ranks": [
        "a plain backward pass",
        "micro-batches, however labels are masked",
        "an unsharded model's state_dict",
        "a loss by hand, with the balance terms",
        "a layer that the last micro-batch skips",
        "a rank without a valid token",
        "a loss of one's own, in micro-batches",
        "a loss of log-probabilities, in micro-batches",
    ],
    "4 ranks, cp 2": [
        "a loss by hand, with the balance terms",
        "a loss of one's own, in micro-batches",
        "a loss of log-probabilities, in micro-batches",
    ],
}
"""What `make test` tries: each claim on two ranks, and on four those that depend on ranks of one tp group."""

TRIED = [
    pytest.param(place, claim, marks=() if claim in OFTEN.get(place, ()) else pytest.mark.slow, id=f"{claim}-{place}")
    for place in PLACES
    for claim in CLAIMS
]
Errors = Callable[[str], list[dict[str, float | str]]]


@pytest.fixture(scope="module")
def errors_of(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> Errors:
    """The error of every claim on each rank of a place: one job for all claims."""

    @cache
    def run(place: str) -> list[dict[str, float | str]]:
        options, folder = PLACES[place], tmp_path_factory.mktemp("checkpoint")
        cases = cases_in(str(folder), options["ranks"] // (options.get("tp", 1) * options.get("cp", 1)))
        tried = {claim: cases[claim] for claim in (CLAIMS if extent.everything else OFTEN[place])}
        return gloo.run(options["ranks"], contract.errors, options, tried, initialize=False, timeout=240.0)

    return run


@pytest.mark.parametrize(("place", "claim"), TRIED)
def test_gradients_are_the_unsharded_models_after(errors_of: Errors, place: str, claim: str) -> None:
    found = [errors[claim] for errors in errors_of(place)]
    assert [each for each in found if not isinstance(each, float)] == []
    assert max(found) < BOUNDS[PLACES[place].get("dtype", "fp32")]


FEW = {"1 rank": ONE, "2 ranks": TWO, "4 ranks": FOUR}
few_and_many = pytest.mark.parametrize(
    "options", [pytest.param(FEW[name], id=name, marks=[pytest.mark.slow] if FEW[name] is FOUR else []) for name in FEW]
)


@few_and_many
def test_a_step_never_computes_with_other_weights_than_it_is_given(gloo: GlooPool, options: dict[str, Any]) -> None:
    assert max(gloo.run(options["ranks"], claims.another_models_weights, options, initialize=False)) < 1e-6


@few_and_many
def test_hooks_of_parameters_are_given_every_gradient(gloo: GlooPool, options: dict[str, Any]) -> None:
    assert all(gloo.run(options["ranks"], claims.hooks_see_every_gradient, options, initialize=False))


@pytest.mark.parametrize("swapped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_jobs_of_one_process_never_use_each_others_groups(gloo: GlooPool, swapped: bool) -> None:
    for errors in gloo.run(4, contract_jobs.two_jobs, swapped, initialize=False):
        assert max(errors) < BOUNDS["fp32"]


@few_and_many
def test_frozen_parameters_have_no_gradient_and_do_not_decay(gloo: GlooPool, options: dict[str, Any]) -> None:
    for without, alike, error in gloo.run(options["ranks"], contract_jobs.frozen, options, initialize=False):
        assert without
        assert alike
        assert error < BOUNDS["fp32"]


NORMS = [ONE, TWO, {"ranks": 2, "tp": 2, "ep": 1}, pytest.param(FOUR, marks=pytest.mark.slow)]


@pytest.mark.parametrize("options", NORMS, ids=str)
def test_torchs_own_gradient_norm_is_right_or_raises(gloo: GlooPool, options: dict[str, Any]) -> None:
    for norm, told in gloo.run(options["ranks"], contract_jobs.norms, options, initialize=False):
        alone = options["ranks"] == 1  # over two meshes torch raises
        assert told == f"{norm:.4f}" or (told.endswith("Error") and not alone)


@few_and_many
def test_an_averaged_model_is_the_mean_of_its_weights(gloo: GlooPool, options: dict[str, Any]) -> None:
    assert max(gloo.run(options["ranks"], contract_jobs.averaged, options, initialize=False)) < 1e-6


OTHER_INPUTS = "MOE0702 ranks 0 and 1 have the same `job.data_rank`, but different tokens, labels or inputs"

ERRORS = {
    "no scalar": r"MOE0713 (rank 3, |)(step 1: |)the loss gave torch.float32 \[\d, 8, 32\], and must give a scalar",
    "a loss that raises": "MOE0713 .*the function `loss` raised RuntimeError: Expected target size",
    "no tensor": "MOE0713 .*the loss gave float, and must give a scalar tensor",
    "a detached loss": "MOE0713 the loss does not depend on the model's logits on any rank",
    "no tokens": "MOE0702 .*tokens are of class NoneType, and must be a torch.Tensor",
    "no labels given": "MOE0713 .*job.step needs labels",
    "a dict": "MOE0702 .*tokens are of class dict, and must be a torch.Tensor",
    "zero count": "MOE0713 the count is 0 on every rank",
    "no count": "MOE0713 .*the count gave 'many', and must give a number from 0 on",
    "no labels": "MOE0713 no label of the batch is valid, on any rank",
    "late count": "MOE0713 .*a count that takes logits is known only after the forward pass",
    "both losses": "MOE0713 .*one of loss and logprob_loss, not both",
    "inputs": r"MOE0713 .*inputs\['mask'\] is \[\d, 7\], and must be \[batch, sequence, …\] as tokens \[\d, 8\]",
    "micro-batches": "MOE0713 .* sequences cannot be cut into 100 micro-batches",
    "accumulate": "MOE0713 .*job.accumulate got (64|128) labels,",
    "backward too late": "MOE0713 a forward pass of the whole model is computed again after `with job.accumulate",
    "a hook's labels": "MOE0702 .*labels contain the id",
    "a hook's tokens": OTHER_INPUTS,
    "a hook on some": "nothing",
    "a hook's call": "MOE0702 rank 1 has labels and rank 0 none: give them on every rank or on none",
    "frozen between": "MOE0713 rank 1, step 3: `loss` changed `requires_grad` of the model's parameters",
    "evaluating between": "MOE0702 rank 0 trains and rank 1 evaluates",
    "names": "MOE0713 ranks differ in .* names of inputs",
    "other labels": r"MOE0713 .*job.accumulate got \d+ labels that are not -100, its forward passes had \d+",
    "other labels on one rank": r"MOE0713 rank 1: job.accumulate got \d+ labels that are not -100, its forward",
    "another job's": "MOE0714 this job of tiny got a model that another job built",
    "layers": "MOE0710 the model has 4 layers, and its plan 3",
    "without gradients": "MOE0713 .*job.step computes gradients, and was called under torch.no_grad",
    "all frozen": "MOE0713 no parameter of the model has `requires_grad`",
    "fully_shard": "MOE0711 fully_shard|torch: ",
    "tokens in another order": OTHER_INPUTS,
    "other shapes": OTHER_INPUTS,
    "other inputs": OTHER_INPUTS,
    "ids of one loss": "MOE0702 .*labels contain the id",
    "autocast": r"MOE0711 torch.autocast\('cpu', torch.bfloat16\) is on",
    "data parallel": "MOE0711 DistributedDataParallel takes parameters for replicas",
    "anomaly": r"MOE0711 torch.autograd.set_detect_anomaly\(True\) reads gradients",
    "inside another": "Operator c10d.broadcast_.default does not have a sharding strategy",
    "other tokens": OTHER_INPUTS,
    "modes": r"MOE0702 rank 1 trains and rank 0 evaluates: call `train\(\)` or `eval\(\)` on every rank",
    "an adapter": r"MOE0710 (rank 2: |)head.weight was replaced: head is now of class Sequential",
    "other calls": "MOE0702 ranks make different calls: one is at `start of a forward pass`, another",
    "steps": "MOE0713 ranks differ in `microbatches`",
    "frozen on one rank": "MOE0702 ranks . and . want gradients of different parameters",
    "replaced": r"MOE0710 (rank 0: |)head.weight .* was replaced: this rank's part has shape \[32, 16\], but the plan",
    "works": "True",
}


@pytest.mark.parametrize("options", [ONE, FOUR, CONTEXT], ids=["1 rank", "4 ranks", "4 ranks, cp 2"])
def test_a_mistake_is_one_clear_error_the_same_on_every_rank(gloo: GlooPool, options: dict[str, Any]) -> None:
    found = gloo.run(options["ranks"], refusals.refusals, options, initialize=False)
    assert all(other == found[0] for other in found)
    after = found[0].pop("after the job")
    assert after.startswith("nothing" if options is ONE else "MOE0709")
    for mistake, words in found[0].items():
        assert re.match(ERRORS[mistake], words), (mistake, words)


def test_batches_that_a_hook_makes_unequal_are_refused_with_a_capacity(gloo: GlooPool) -> None:
    told = set(gloo.run(2, refusals.cropped_by_a_hook, TWO, initialize=False))
    words = "and must have one: places of experts follow from it"
    assert told == {f"MOE0702 tokens have shapes from [2, 8] to [4, 8] on the ranks, {words}"}


def test_another_ranks_state_is_refused_by_name(gloo: GlooPool, tmp_path: Path) -> None:
    every = gloo.run(4, refusals.foreign_states, FOUR, str(tmp_path), initialize=False)
    for found in (every[0], every[2]):  # which hold the same parts
        assert {found[name] for name in ("model", "optimizer", "layers", "own", "own optimizer")} == {"nothing"}
    for found in every:
        assert found["another plan's"].startswith("MOE0712 this optimizer state does not fit this rank: its plan sh")
        assert found["other optimizer"].startswith("MOE0712 this optimizer state has 0 parameters, but the model has")
        assert re.match(
            r"MOE0712 this optimizer state's exp_avg of parameter \d+ is a Tensor .*, but the parameter is a DTensor",
            found["whole optimizer"],
        )
    for found in (every[1], every[3]):
        assert found["model"].startswith("MOE0712 this state_dict does not fit this rank: it has rank 0's part of")
        assert found["optimizer"].startswith("MOE0712 this optimizer state does not fit this rank")
        assert "its rank is unknown" in found["items"]
        assert found["layers"].startswith("MOE0712 this state_dict does not fit this rank")
        assert found["own"] == found["own optimizer"] == "nothing"
    for found in every:
        assert "it could be any rank's part" in found["parts"]
