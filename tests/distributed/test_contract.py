"""A job's model behaves like any PyTorch module, on one rank and on four (tp 2 × ep 2), in fp32 and bf16."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.combinations import diagonals, some
from support.ranks import contract, contract_jobs, refusals
from support.ranks.contract import FOUR, ONE
from support.ranks.gloo_pool import GlooPool

RANKS = {"1 rank": ONE, "4 ranks": FOUR}
BOUNDS = {"fp32": 2e-5, "bf16": 4e-2}
"""Bounds of errors over the largest gradient. bf16 has 8 bits; its unsharded model has the same error."""

CLAIMS: dict[str, Any] = {
    "a plain backward pass": contract.forward_backward,
    "a step after an exception in backward": contract.after_an_exception,
    "a step after an exception in forward": contract.after_an_exception_in_forward,
    "torch.autograd.grad, which leaves .grad alone": contract.by_autograd_grad,
    "a deep copy, whatever became of the original": contract.of_a_deep_copy,
    "micro-batches, however labels are masked": contract.in_micro_batches,
    "accumulation by hand": contract.accumulated_by_hand,
    "one backward pass of several forward passes": contract.one_backward_of_many_forwards,
    "two backward passes of one forward pass": contract.retained,
    "activation checkpointing by torch": contract.checkpointed,
    "a checkpoint of the whole model": contract.wholly_checkpointed,
    "a replaced parameter": contract.replaced,
    "weights loaded after the optimizer was made": contract.loaded_after_the_optimizer,
    "an unsharded model's state_dict": contract.whole_state_loaded,
    "a loss by hand, with the balance terms": contract.own_backward,
    "steps of layers behind other modules": contract.of_wrapped_layers,
}
OWN_LOSSES: dict[str, Any] = {
    "loss": (contract.custom_loss, contract.custom_loss_unsharded),
    "logprob_loss": (contract.own_logprob_loss, contract.own_logprob_loss_unsharded),
}


WHERE = [("4 ranks", "fp32"), ("1 rank", "bf16"), ("1 rank", "fp32"), ("4 ranks", "bf16")]
"""`make test-slow` runs all combinations; `make test` each claim on 4 ranks, and some in bf16."""

IN_BF16 = ("micro-batches, however labels are masked", "accumulation by hand", "a loss by hand, with the balance terms")
TRIED = [
    pytest.param(
        claim,
        *where,
        marks=() if where == WHERE[0] or (where == WHERE[1] and claim in IN_BF16) else pytest.mark.slow,
        id="-".join((claim, *where)),
    )
    for claim in CLAIMS
    for where in WHERE
]


@pytest.mark.parametrize(("claim", "ranks", "dtype"), TRIED)
def test_gradients_are_the_unsharded_models_after(gloo: GlooPool, claim: str, ranks: str, dtype: str) -> None:
    options = {**RANKS[ranks], "dtype": dtype}
    errors = gloo.run(options["ranks"], contract.off, options, CLAIMS[claim], initialize=False)
    assert max(errors) < BOUNDS[dtype]


RECOMPUTED = ("a step after an exception in backward", "two backward passes of one forward pass")


@pytest.mark.parametrize("claim", some(list(CLAIMS), RECOMPUTED))
def test_gradients_of_layers_that_recompute_are_the_unsharded_models_after(gloo: GlooPool, claim: str) -> None:
    options = {**FOUR, "recompute": "layer"}
    assert max(gloo.run(4, contract.off, options, CLAIMS[claim], initialize=False)) < BOUNDS["fp32"]


@pytest.mark.parametrize(
    ("ranks", "kind", "microbatches"), diagonals(["4 ranks", "1 rank"], list(OWN_LOSSES), [3, 1], number=2)
)
def test_a_loss_of_ones_own_has_the_whole_batchs_gradient(
    gloo: GlooPool, kind: str, ranks: str, microbatches: int
) -> None:
    own, unsharded = OWN_LOSSES[kind]
    run = partial(own, microbatches=microbatches)
    errors = gloo.run(RANKS[ranks]["ranks"], contract.off, RANKS[ranks], run, unsharded, initialize=False)
    assert max(errors) < BOUNDS["fp32"]


@pytest.mark.parametrize("ranks", RANKS)
def test_a_rank_without_a_valid_token_still_takes_part(gloo: GlooPool, ranks: str) -> None:
    errors = gloo.run(RANKS[ranks]["ranks"], contract.constant_on_one_rank, RANKS[ranks], initialize=False)
    assert max(errors) < BOUNDS["fp32"]


@pytest.mark.parametrize("options", [{**ONE, "dtype": "bf16"}, FOUR], ids=str)
def test_a_layer_that_the_last_micro_batch_skips_keeps_its_gradient(gloo: GlooPool, options: dict[str, Any]) -> None:
    errors = gloo.run(options["ranks"], contract.skipped, options, initialize=False)
    assert max(errors) < BOUNDS[options.get("dtype", "fp32")]


@pytest.mark.parametrize("options", [{**ONE, "dtype": "bf16"}, FOUR], ids=str)
def test_a_step_never_computes_with_other_weights_than_it_is_given(gloo: GlooPool, options: dict[str, Any]) -> None:
    assert max(gloo.run(options["ranks"], contract.another_models_weights, options, initialize=False)) < 1e-6


@pytest.mark.parametrize("options", [{**ONE, "dtype": "bf16"}, FOUR], ids=str)
def test_hooks_of_parameters_are_given_every_gradient(gloo: GlooPool, options: dict[str, Any]) -> None:
    assert all(gloo.run(options["ranks"], contract.hooks_see_every_gradient, options, initialize=False))


@pytest.mark.parametrize("ranks", RANKS)
def test_torchs_distributed_checkpoint_keeps_every_expert(gloo: GlooPool, ranks: str, tmp_path: Path) -> None:
    run = partial(contract.through_distributed_checkpoint, folder=str(tmp_path / "checkpoint"))
    errors = gloo.run(RANKS[ranks]["ranks"], contract.off, RANKS[ranks], run, initialize=False)
    assert max(errors) < BOUNDS["fp32"]


@pytest.mark.parametrize("swapped", [False, True])
def test_two_jobs_of_one_process_never_use_each_others_groups(gloo: GlooPool, swapped: bool) -> None:
    for errors in gloo.run(4, contract_jobs.two_jobs, swapped, initialize=False):
        assert max(errors) < BOUNDS["fp32"]


@pytest.mark.parametrize("ranks", RANKS)
def test_frozen_parameters_have_no_gradient_and_do_not_decay(gloo: GlooPool, ranks: str) -> None:
    for without, alike, error in gloo.run(RANKS[ranks]["ranks"], contract_jobs.frozen, RANKS[ranks], initialize=False):
        assert without
        assert alike
        assert error < BOUNDS["fp32"]


@pytest.mark.parametrize("options", [ONE, FOUR, {"ranks": 2, "ep": 2}, {"ranks": 2, "tp": 2, "ep": 1}], ids=str)
def test_torchs_own_gradient_norm_is_right_or_raises(gloo: GlooPool, options: dict[str, Any]) -> None:
    for norm, told in gloo.run(options["ranks"], contract_jobs.norms, options, initialize=False):
        alone = options["ranks"] == 1  # over two meshes torch raises
        assert told == f"{norm:.4f}" or (told.endswith("Error") and not alone)


@pytest.mark.parametrize("ranks", RANKS)
def test_an_averaged_model_is_the_mean_of_its_weights(gloo: GlooPool, ranks: str) -> None:
    assert max(gloo.run(RANKS[ranks]["ranks"], contract_jobs.averaged, RANKS[ranks], initialize=False)) < 1e-6


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


@pytest.mark.parametrize("ranks", RANKS)
def test_a_mistake_is_one_clear_error_the_same_on_every_rank(gloo: GlooPool, ranks: str) -> None:
    found = gloo.run(RANKS[ranks]["ranks"], refusals.refusals, RANKS[ranks], initialize=False)
    assert all(other == found[0] for other in found)
    after = found[0].pop("after the job")
    assert after.startswith("MOE0709" if ranks == "4 ranks" else "nothing")
    for mistake, words in found[0].items():
        assert re.match(ERRORS[mistake], words), (mistake, words)


def test_batches_that_a_hook_makes_unequal_are_refused_with_a_capacity(gloo: GlooPool) -> None:
    told = set(gloo.run(4, refusals.cropped_by_a_hook, FOUR, initialize=False))
    words = "and must have one: places of experts follow from it"
    assert told == {f"MOE0702 tokens have shapes from [2, 8] to [4, 8] on the ranks, {words}"}


def test_another_ranks_state_is_refused_by_name(gloo: GlooPool, tmp_path: Path) -> None:
    every = gloo.run(4, refusals.foreign_states, FOUR, str(tmp_path), initialize=False)
    for found in (every[0], every[2]):  # which hold the same parts
        assert {found[name] for name in ("model", "optimizer", "layers", "own", "own optimizer")} == {"nothing"}
    for found in every:
        assert found["another plan's"].startswith("MOE0712 this optimizer state is another rank's: its plan sh")
        assert found["other optimizer"].startswith("MOE0712 this optimizer state has 0 parameters, but the model has")
        assert re.match(
            r"MOE0712 this optimizer state's exp_avg of parameter \d+ is a Tensor .*, but the parameter is a DTensor",
            found["whole optimizer"],
        )
    for found in (every[1], every[3]):
        assert found["model"].startswith("MOE0712 this state_dict is another rank's: it has rank 0's part of")
        assert found["optimizer"].startswith("MOE0712 this optimizer state is another rank's")
        assert "its rank is unknown" in found["items"]
        assert found["layers"].startswith("MOE0712 this state_dict is another rank's")
        assert found["own"] == found["own optimizer"] == "nothing"
    for found in every:
        assert "it could be any rank's part" in found["parts"]
