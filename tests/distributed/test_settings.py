"""Settings of a model on the ranks of a job, and the random numbers that depend on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.plans import moe_plan, moe_spec
from support.ranks.gloo_pool import GlooPool
from support.ranks.refusals import said
from support.ranks.training import batches, gradients_of, own_part

import moec
from moec.passes.ir import local_slices
from moec.runtime.host.reference import reference

JITTER = {"gate": "topk(2, jitter = 0.3)", "batch": 8, "dtype": "fp32"}
STEP = 41


def jittered(options: dict[str, Any], microbatches: int) -> dict[str, Any]:
    """Two steps without an update between: their losses, the last one's gradients, and the settings."""
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model = job.build(seed=1)
        model.set(step=STEP)
        losses = []
        for tokens, labels in batches(32, 8, 8, 2):
            model.zero_grad()
            mine = own_part(job, tokens, labels)
            losses.append(job.step(model, *mine, microbatches=microbatches).item())
        return {"losses": losses, "gradients": gradients_of(model), "settings": model.settings}


def set_on_ranks(options: dict[str, Any]) -> dict[str, Any]:
    """What this rank is told of wrong settings, and the loss of a step after all of it."""
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model = job.build(seed=1)
        last = job.rank == job.world_size - 1
        refused = {
            "below": said(lambda: model.set(step=-1 if last else 1)),
            "above": said(lambda: model.set(seed=2**63 if job.rank == 0 else 1)),
            "unlike": said(lambda: model.set(step=job.rank)),
            "one sets another": said(lambda: model.set(**({"seed": 1} if last else {"step": 1}))),
        }
        tokens, labels = own_part(job, *batches(32, 8, 8, 1)[0])
        settings = dict(model.settings)
        model.settings["step"] = job.rank
        unset = said(lambda: job.step(model, tokens, labels))
        model.settings["step"] = 0
        short = slice(0, 1) if last else slice(None)
        return {
            **refused,
            "settings": settings,
            "settings changed without `set`": unset,
            "other shapes": said(lambda: model(tokens[short], labels[short])),
            "after": said(lambda: job.step(model, tokens, labels)),
        }


@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [
        (2, {"tp": 2, "ep": 2}),
        (2, {"ep": 2}),
        pytest.param(4, {"tp": 2, "ep": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"ep": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_and_micro_batches_draw_the_numbers_of_the_unsharded_batch(
    gloo: GlooPool, ranks: int, degrees: dict[str, int]
) -> None:
    plan = moe_plan(ranks=ranks, **JITTER, **degrees)
    model = reference(moe_spec(**JITTER), seed=1)
    model.set(step=STEP)
    expected = []
    for tokens, labels in batches(32, 8, 8, 2):
        model.zero_grad()
        loss = model(tokens, labels).loss
        loss.backward()
        expected.append(loss.item())
    wanted = {name: p.grad for name, p in model.named_parameters()}
    for microbatches in (1, 2):
        for rank, found in enumerate(gloo.run(ranks, jittered, {"ranks": ranks, **JITTER, **degrees}, microbatches)):
            assert found["settings"] == {"seed": 1, "step": STEP + 2}
            torch.testing.assert_close(found["losses"], expected, rtol=1e-5, atol=1e-6)
            for name, gradient in found["gradients"].items():
                data = plan.parameters[name]
                part = wanted[name][local_slices(data.shape, data.layout, plan.meshes[data.mesh], rank)]
                torch.testing.assert_close(gradient, part, rtol=1e-3, atol=1e-5)


def test_wrong_settings_are_refused_on_every_rank_alike(gloo: GlooPool) -> None:
    ranks = gloo.run(4, set_on_ranks, {"ranks": 4, "tp": 2, "ep": 2, **JITTER})
    first = ranks[0]
    assert all(found == first for found in ranks[1:])
    assert first["below"].startswith("MOE0715 rank 3: `step` is -1, and must be a whole number from 0 to")
    assert first["above"].startswith("MOE0715 rank 0: `seed` is 9223372036854775808")
    for name in ("unlike", "one sets another", "settings changed without `set`"):
        assert first[name].startswith("MOE0715 ranks differ in settings"), name
    assert first["settings"] == {"seed": 1, "step": 0}
    assert first["other shapes"].startswith("MOE0702 tokens have shapes from")
    assert first["after"] == "nothing"
