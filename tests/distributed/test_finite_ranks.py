"""A gradient that is NaN on one rank stops or skips the step on every rank."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.plans import moe_plan
from support.ranks.contract import MIXED
from support.ranks.gloo_pool import GlooPool
from support.ranks.training import batches

import moec
from moec.runtime.errors import JobError
from moec.runtime.weights.masters import local_part

EXPERTS = "layers.1.moe.experts.up.weight"
FOUR = {"ranks": 4, "ep": 2}


def steps_as_rank(options: dict[str, Any], on_nonfinite: str, clips: bool) -> tuple[list[str], list[bool], list[float]]:
    """Of three steps: the errors, whether weights moved, and the losses. A part of the second gradient is spoiled."""
    errors, moved, losses = [], [], []
    with moec.launch(moe_plan(**options), device="cpu", timeout=60, on_nonfinite=on_nonfinite) as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        for number, (tokens, labels) in enumerate(batches(32, 8, 8, 3)):
            before = {name: local_part(p).clone() for name, p in model.named_parameters()}
            mine = (t.chunk(job.data_size)[job.data_rank] for t in (tokens, labels))
            losses.append(job.step(model, *mine).item())
            # Of four ranks 1 and 3 have the same experts without ZeRO.
            last = job.world_size - 1
            if number == 1 and job.rank in ((1, last) if options["zero"] == 0 else (last,)):
                gradient = model.get_parameter(EXPERTS).grad
                assert gradient is not None
                local_part(gradient).view(-1)[0] = torch.nan
            try:
                if clips:
                    job.clip_grad_norm_(model, 1.0, optimizer=optimizer)
                optimizer.step()
            except JobError as error:
                errors.append(str(error))
            optimizer.zero_grad()
            moved.append(any(not torch.equal(local_part(p), before[name]) for name, p in model.named_parameters()))
            assert all(local_part(p).isfinite().all() for p in model.parameters())
        assert job.finite.skipped == (on_nonfinite == "skip")
    return errors, moved, losses


@pytest.mark.parametrize(
    ("options", "zero", "clips"),
    [
        (MIXED, 0, True),
        (MIXED, 3, False),
        *(pytest.param(FOUR, zero, clips, marks=pytest.mark.slow) for zero in (0, 3) for clips in (True, False)),
    ],
    ids=str,
)
def test_every_rank_names_the_gradient_of_one_and_none_changes_a_weight(
    gloo: GlooPool, options: dict[str, Any], zero: int, clips: bool
) -> None:
    options, ranks = {**options, "zero": zero}, options["ranks"]
    results = gloo.run(ranks, steps_as_rank, options, "raise", clips)
    for errors, moved, _ in results:
        (error,) = errors
        assert "MOE0723" in error
        assert f"rank {ranks - 1 if zero else 1}: step 2: the gradient of {EXPERTS} is NaN or infinite" in error
        assert moved == [True, False, True]
    skipped = gloo.run(ranks, steps_as_rank, options, "skip", clips)
    for (_, _, losses), (errors, moved, with_skip) in zip(results, skipped, strict=True):
        assert (errors, moved, with_skip) == ([], [True, False, True], losses)


def losses_of_a_bad_batch(tp: int) -> tuple[list[float], int, bool]:
    """Three steps that skip; in the second the router of one data-parallel rank has no scores."""
    losses = []
    options = {"ranks": 2 * tp, "tp": tp, "ep": 2, "gate": "topk(2, bias = online(0.01))"}
    with moec.launch(moe_plan(**options), device="cpu", timeout=60, on_nonfinite="skip") as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        embedding = local_part(model.get_parameter("embedding.weight"))
        for number in range(3):
            tokens = (torch.arange(32) % 31).reshape(4, 8).chunk(job.data_size)[job.data_rank].clone()
            # The last id is of the last rank of a tp group.
            last = embedding[-1].clone()
            if number == 1:
                tokens[0, 3] = 31 if job.data_rank == 1 else 0
                embedding[-1] = torch.nan
            losses.append(job.step(model, tokens, tokens.clamp(max=30)).item())
            embedding[-1] = last
            optimizer.step()
            optimizer.zero_grad()
        finite = all(local_part(p).isfinite().all() for p in model.state_dict().values() if isinstance(p, torch.Tensor))
        return losses, job.finite.skipped, finite


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_batch_without_scores_on_one_rank_is_skipped_on_all(gloo: GlooPool, tp: int) -> None:
    for losses, skipped, finite in gloo.run(2 * tp, losses_of_a_bad_batch, tp):
        assert [loss == loss for loss in losses] == [True, False, True]
        assert (skipped, finite) == (1, True)


def own_losses_of_a_group(number_of: str) -> str:
    """What a step says whose custom loss is times a number of the rank's own, of four ranks in two tp groups."""
    with moec.launch(moe_plan(ranks=4, tp=2, ep=2), device="cpu", timeout=60) as job:
        model = job.build(seed=1)
        (tokens, labels) = batches(32, 8, 8, 1)[0]
        factor = {"rank": 1.0 + job.rank, "group": 1.0 + job.data_rank}
        factor |= {name: float(name) if job.rank == 3 else 1.0 for name in ("nan", "inf")}
        last_bits = 1 + 1e-6 * job.rank

        def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return logits.float().logsumexp(-1).sum() * factor[number_of] * last_bits

        try:
            job.step(model, *(t.chunk(job.data_size)[job.data_rank] for t in (tokens, labels)), loss=loss)
        except JobError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("number_of", "said"),
    [
        ("rank", "MOE0713.*the custom loss is .* here, and from"),
        ("inf", "MOE0713.*the custom loss is .* here, and from .* to inf"),
        ("nan", "MOE0713.*NaN on some"),
        ("group", ""),
    ],
)
def test_a_custom_loss_that_differs_within_a_tp_group_is_one_error(gloo: GlooPool, number_of: str, said: str) -> None:
    found = gloo.run(4, own_losses_of_a_group, number_of)
    assert len(set(found)) == 1
    assert re.search(said, found[0]) if said else not found[0]
