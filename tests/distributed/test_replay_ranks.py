"""gloo processes: a rollout under one plan, its routes in a step of another, and one error for wrong routes."""

from __future__ import annotations

from typing import Any

import torch
from support.plans import moe_plan, moe_spec
from support.ranks.gloo_pool import GlooPool
from torch import Tensor

import moec
from moec.runtime.host.reference import reference
from moec.runtime.weights.masters import local_part

OPTIONS: dict[str, Any] = {
    "ranks": 4,
    "optimizer": "adamw(lr = 1e-3); replay = true",
    "model": "embedding = tokens(segments = true, padding = given)",
    "beside": "capacity = factor(1.0)",
}
ROLLOUT = {**OPTIONS, "ep": 4}
TRAINING = {**OPTIONS, "ep": 2, "tp": 2}
PADDED = torch.rand(8, 8, generator=torch.Generator().manual_seed(6)) < 0.2
SEGMENTS = torch.tensor([[0, 0, 0, 0, 0, 4, 4, 9]]).repeat(8, 1)
TOKENS, LABELS = torch.randint(32, (2, 8, 8), generator=torch.Generator().manual_seed(5))


def rolled_out_and_trained() -> dict[str, Any]:
    """A rollout of this rank's sequences, and a step of another plan and other weights with the routes of all ranks."""
    with moec.launch(moe_plan(**ROLLOUT), device="cpu") as job:
        mine = TOKENS.chunk(job.data_size)[job.data_rank]
        texts = SEGMENTS[: len(mine)]
        padded = PADDED.chunk(job.data_size)[job.data_rank]
        chosen = job.build(seed=1).eval()(mine, segments=texts, padding=padded).routes
        gathered = [torch.empty_like(chosen) for _ in range(job.data_size)]
        torch.distributed.all_gather(gathered, chosen.contiguous())
    routes = torch.cat(gathered)
    with moec.launch(moe_plan(**TRAINING), device="cpu") as job:
        model = job.build(seed=2)
        parts = [whole.chunk(job.data_size)[job.data_rank] for whole in (TOKENS, LABELS, routes)]
        texts, padded = SEGMENTS[: len(parts[0])], PADDED.chunk(job.data_size)[job.data_rank]
        beside = {"segments": texts, "padding": padded}
        replayed = model(parts[0], routes=parts[2], **beside).routes
        loss = job.step(model, *parts[:2], routes=parts[2], **beside, microbatches=2)
        wholes = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        plain = job.whole_logits(model(parts[0]))  # free, one text in each sequence, no padding
        wrong = {}
        for name, bad in {"one rank's": 8 if job.rank == 3 else 0, "every rank's": 8}.items():
            try:
                job.step(model, *parts[:2], routes=parts[2].clone().fill_(-1).index_fill(-1, torch.tensor([0]), bad))
            except moec.DiagnosticError as error:
                wrong[name] = error.diagnostics[0].code, error.diagnostics[0].message
        for name, given in {"routes": parts[2], "segments": texts, "padding": padded}.items():
            try:
                job.step(model, *parts[:2], **{name: given if job.rank > 1 else None})
            except moec.DiagnosticError as error:
                wrong[f"{name} on some ranks"] = error.diagnostics[0].code, error.diagnostics[0].message
        try:
            job.step(model, *parts[:2], segments=texts if job.rank else texts.flip(1))
        except moec.DiagnosticError as error:
            wrong["descending"] = error.diagnostics[0].code, error.diagnostics[0].message
        assert local_part(next(model.parameters())).isfinite().all()
    return {
        "routes": routes,
        "same": torch.equal(replayed, parts[2]),
        "loss": loss,
        "grads": wholes,
        "wrong": wrong,
        "plain": plain.detach(),
    }


def test_a_step_with_the_routes_of_another_plans_rollout_is_the_unsharded_one(gloo: GlooPool) -> None:
    results = gloo.run(4, rolled_out_and_trained)
    alone = reference(moe_spec(**OPTIONS), seed=1).eval()
    routes: Tensor = results[0]["routes"]
    assert torch.equal(alone(TOKENS, segments=SEGMENTS, padding=PADDED).routes, routes)
    other = reference(moe_spec(**OPTIONS), seed=2)
    loss = other(TOKENS, LABELS, routes=routes, segments=SEGMENTS, padding=PADDED).loss
    loss.backward()
    for rank, result in enumerate(results):
        assert result["same"]
        torch.testing.assert_close(result["loss"], loss.detach())
        for name, parameter in other.named_parameters():
            torch.testing.assert_close(result["grads"][name], parameter.grad, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(result["plain"], other(TOKENS).logits.detach().chunk(2)[rank // 2])
    wrong = {str(result["wrong"]) for result in results}
    assert len(wrong) == 1, "ranks raise different errors"
    found = dict(results[0]["wrong"])
    for name in ("routes", "segments", "padding"):
        code, words = found.pop(f"{name} on some ranks")
        assert code == "MOE0702"
        assert words.startswith(f"rank 2 has {name} and rank 0 none: give ")
    assert [code for code, _ in found.values()] == ["MOE0726", "MOE0726", "MOE0727"]
