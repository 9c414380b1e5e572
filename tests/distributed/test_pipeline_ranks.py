"""Pipelines on gloo ranks: training, checkpoints and evaluations are those of the model without stages."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from support.image_plans import CHANNELS, CLASSES, IMAGE, image_plan, image_spec
from support.plans import moe_plan, moe_spec
from support.ranks.gloo_pool import GlooPool
from support.ranks.training import batches_of, gradients_of, own_part, parts_of_rank, unsharded
from support.staged_plans import staged_plan
from torch import Tensor

import moec
from moec.codegen.plan import Plan
from moec.grammar.diagnostics import DiagnosticError
from moec.runtime.job.job import Job
from moec.runtime.model.module import PlanModule

STEPS, LOSSES, GRADIENTS = 3, 1e-5, 2e-6
MODEL: dict[str, Any] = {
    "batch": 16, "depth": 6, "optimizer": "adamw(lr = 3e-3)", "model": "embedding = tokens(tied = true)",
    "expert": "swiglu(16, bias = true)",
}  # fmt: skip
PIPELINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "interleaved, dp 2, zero 1": ({"ranks": 2, "ep": 2, "zero": 1}, {"virtual": 2, "schedule": "interleaved"}),
    "looped, dp 2, zero 3": ({"ranks": 2, "ep": 1, "zero": 3}, {"virtual": 3, "schedule": "looped_bfs"}),
    "gpipe of 3, tp 2, recomputed": (
        {"ranks": 2, "ep": 1, "tp": 2, "recompute": "layer"}, {"pp": 3, "schedule": "gpipe"},
    ),
    "dp 2, cp 2, etp 2, zero 2": ({"ranks": 4, "ep": 2, "cp": 2, "etp": 2, "zero": 2}, {}),
    "zero bubble V, dp 2, zero 3": ({"ranks": 2, "ep": 1, "zero": 3}, {"virtual": 2, "schedule": "zero_bubble_v"}),
    "zero bubble of 3, tp 2, etp 2, recomputed": (
        {"ranks": 2, "ep": 1, "tp": 2, "etp": 2, "recompute": "layer"}, {"pp": 3, "schedule": "zero_bubble"},
    ),
    "dual pipe V, dp 2, experts recomputed": (
        {"ranks": 2, "ep": 2, "recompute": "experts"}, {"virtual": 2, "schedule": "dual_pipe_v"},
    ),
}  # fmt: skip
FAST = "interleaved, dp 2, zero 1"
"""Of whole backward passes."""
SPLIT = "zero bubble of 3, tp 2, etp 2, recomputed"


def pipeline(degrees: dict[str, Any], stages: dict[str, Any], **options: Any) -> Plan:
    return staged_plan(moe_spec(**MODEL, microbatches=4, **degrees, **options), **stages)


def train(job: Job, model: PlanModule, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for tokens, labels in batches_of(job.plan.spec, steps.stop)[steps.start :]:
        losses.append(job.step(model, *own_part(job, tokens, labels)).item())
        job.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trained(plan: Plan) -> dict[str, Any]:
    """Losses and norms of some steps; loads, gradients and the names of layers after the first."""
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        optimizer, found = job.optimizer(model), {"losses": list[float](), "norms": list[float]()}
        first: dict[str, Any] = {}
        for tokens, labels in batches_of(plan.spec, STEPS):
            found["losses"].append(job.step(model, *own_part(job, tokens, labels)).item())
            first = first or {
                "gradients": {name: gradient.clone() for name, gradient in gradients_of(model).items()},
                "loads": {layer: load.tolist() for layer, load in job.expert_loads(model).items()},
            }
            found["norms"].append(job.clip_grad_norm_(model, 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        job.check_replicas(model)
        return {**found, **first, "layers": len(model.layers)}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in (FAST, SPLIT) else pytest.mark.slow) for name in PIPELINES]
)
def test_a_pipeline_trains_as_the_unsharded_model(gloo: GlooPool, name: str):
    plan = pipeline(*PIPELINES[name])
    results, expected = gloo.run(plan.world_size, trained, plan), unsharded(STEPS, **MODEL)
    seen = set[str]()
    for rank, result in enumerate(results):
        assert result["losses"] == pytest.approx(expected["losses"], abs=LOSSES)
        assert result["norms"] == pytest.approx(expected["norms"], rel=LOSSES)
        assert result["loads"] == results[0]["loads"]
        assert len(result["loads"]) == 5
        assert result["layers"] == 6
        wanted = parts_of_rank(plan, expected["gradients"], rank % plan.stage_size)
        assert result["gradients"].keys() == wanted.keys() - plan.elsewhere(rank)
        for parameter, gradient in result["gradients"].items():
            off = float((gradient - wanted[parameter]).norm() / expected["gradients"][parameter].norm())
            assert off < GRADIENTS, (parameter, rank)
        seen |= result["gradients"].keys()
    assert seen == expected["gradients"].keys()


def step_of_images(plan: Plan) -> tuple[float, float]:
    """The loss and the gradient norm of a step over images."""
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(8, CHANNELS, IMAGE, IMAGE, generator=generator), torch.arange(8) % CLASSES
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        return job.step(model, *own_part(job, images, labels)).item(), job.clip_grad_norm_(model, 1.0).item()


def test_stages_of_a_model_of_images_send_as_many_tokens_as_it_has_patches(gloo: GlooPool):
    options: dict[str, Any] = {"batch": 8, "microbatches": 2, "gate": "topk(2, jitter = 0.2)", "tp": 1}
    whole = gloo.run(1, step_of_images, image_plan(ranks=1, ep=1, **options))
    for found in gloo.run(4, step_of_images, staged_plan(image_spec(ranks=2, ep=2, zero=1, **options))):
        assert found == pytest.approx(whole[0], rel=LOSSES)


def stepped_twice(plan: Plan) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[int, list[int]], dict[str, Any]]:
    """Gradients after one step and after a second one with the same batch, loads, and a line of metrics."""
    with moec.launch(plan, device="cpu") as job, TemporaryDirectory() as folder:
        model = job.build(seed=1)
        batch = own_part(job, *batches_of(plan.spec, 1)[0])
        with job.metrics(Path(folder) / "run.jsonl") as metrics:
            job.step(model, *batch)
            once = {name: gradient.clone() for name, gradient in gradients_of(model).items()}
            loss = job.step(model, *batch)
            metrics.step(model, loss, grad_norm=job.clip_grad_norm_(model, 1e9))
        lines = (Path(folder) / "run.jsonl").read_text().splitlines() if job.rank == 0 else ["{}"]
        loads = {layer: load.tolist() for layer, load in job.expert_loads(model).items()}
        return once, gradients_of(model), loads, json.loads(lines[-1])


@pytest.fixture(scope="module")
def twice(gloo: GlooPool) -> list[Any]:
    plan = pipeline({"ranks": 1, "ep": 1}, {"last_layers": (0, 5)}, gate="topk(2, bias = online(0.000001))")
    assert not plan.expert_meshes.keys() & {0}
    return gloo.run(2, stepped_twice, plan)


def test_a_schedule_neither_scales_nor_clears_the_gradients_of_an_earlier_step(twice: list[Any]):
    for once, both, *_ in twice:
        for name, gradient in once.items():
            torch.testing.assert_close(both[name], 2 * gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_figures_of_a_stage_without_a_mixture_have_the_sizes_of_the_others(twice: list[Any]):
    *_, loads, line = twice[0]
    assert loads == twice[1][2]
    assert sorted(loads) == [1, 2, 3, 4, 5]
    assert line["load"].keys() == {"1", "2", "3", "4", "5"}


def resumed(plan: Plan, source: str, target: str) -> list[float]:
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        if source:
            job.load(source, model, optimizer)
        start = 2 * bool(source)
        losses = train(job, model, optimizer, range(start, start + 2))
        if target:
            job.save(target, model, optimizer).wait()
        return losses


def test_a_checkpoint_loads_with_other_stages_and_without_any(gloo: GlooPool, tmp_path: Path):
    gate, one = {"gate": "topk(2, bias = online(0.01), jitter = 0.1)"}, {"ranks": 1, "ep": 1}
    plan, path = pipeline(*PIPELINES[FAST], **gate), str(tmp_path / "two")
    gloo.run(plan.world_size, resumed, plan, "", path)
    others = [plan, pipeline(one, {"pp": 3}, **gate), moe_plan(**MODEL, **one, **gate)]
    losses = [gloo.run(other.world_size, resumed, other, path, "") for other in others]
    expected = losses[0][0]
    assert all(found == pytest.approx(expected, abs=LOSSES) for ranks in losses for found in ranks)


def keeps_timeout(plan: Plan) -> bool:
    """Whether the script's own process group has its timeout inside of a job."""
    backend = torch.distributed.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    before = backend.options._timeout
    with moec.launch(plan, device="cpu", timeout=61):
        return bool(backend.options._timeout == before)


def test_ranks_without_a_tied_parameter_leave_the_group_of_all_ranks_alone(gloo: GlooPool):
    assert gloo.run(3, keeps_timeout, pipeline({"ranks": 1, "ep": 1}, {"pp": 3})) == [True] * 3


def odd_steps(plan: Plan) -> tuple[list[float], dict[int, float], list[str]]:
    """Losses and norms of steps with a frozen part and unequal micro-batches, the second of which is skipped; rates of
    dropped choices; the names of layer 2's parameters that have a gradient."""
    found = list[float]()
    with moec.launch(plan, device="cpu", on_nonfinite="skip") as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        for name, parameter in model.named_parameters():
            if ".attention." in name:
                parameter.requires_grad_(False)
        for number, (tokens, labels) in enumerate(batches_of(plan.spec, 3)):
            scale = torch.tensor(float("inf") if number == 1 else 2.0)

            def loss(logits: Tensor, labels: Tensor, scale: Tensor = scale) -> Tensor:
                each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
                return scale * each.sum()

            value = job.step(model, *own_part(job, tokens, labels), microbatches=2, loss=loss)
            found += [value.item(), job.clip_grad_norm_(model, 0.5).item()]
            optimizer.step()
            if number < 2:
                optimizer.zero_grad()
        trained = sorted(n for n, p in model.named_parameters() if n.startswith("layers.2.") and p.grad is not None)
        return found, job.drop_rates(model), trained


def test_skipped_steps_frozen_parts_and_unequal_micro_batches_are_as_without_stages(gloo: GlooPool):
    options: dict[str, Any] = {"ranks": 2, "ep": 2, "zero": 1, "beside": "capacity = factor(1.0)", "microbatches": 3}
    (expected, rates, trained), *_ = gloo.run(2, odd_steps, moe_plan(**{**MODEL, **options, "batch": 18}))
    for schedule in ("one_f_one_b", "zero_bubble"):
        plan = staged_plan(moe_spec(**{**MODEL, **options, "batch": 18}), schedule=schedule)
        for rank, result in enumerate(gloo.run(4, odd_steps, plan)):
            assert result[0] == pytest.approx(expected, rel=LOSSES, nan_ok=True)
            assert result[1] == pytest.approx(rates)
            assert result[2] == (trained if rank < 2 else [])


def own_losses(plan: Plan) -> list[tuple[float, float]]:
    """The loss and the gradient norm of a step, by the model and by functions of the script."""
    found = []
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        tokens, labels = own_part(job, *batches_of(plan.spec, 1)[0])

        def loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
            each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            return (each * weights.flatten()).sum()

        def logprob_loss(logprobs: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
            return -(logprobs * weights).sum()

        weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(job.data_rank))
        inputs = {"inputs": {"weights": weights}, "count": lambda labels, weights: weights.sum()}
        for given in ({}, {"loss": loss, **inputs}, {"logprob_loss": logprob_loss, **inputs}):
            value = job.step(model, tokens, labels, **given)
            found.append((value.item(), job.clip_grad_norm_(model, 1e9).item()))
            model.zero_grad()
    return found


def test_a_loss_of_the_script_is_computed_by_the_last_stage(gloo: GlooPool):
    degrees, stages = PIPELINES[FAST]
    staged = pipeline({**degrees, "tp": 2}, stages, balance="[switch_loss(0.1)]")
    whole = moe_plan(**MODEL, microbatches=4, **degrees, tp=2, balance="[switch_loss(0.1)]")
    expected = gloo.run(whole.world_size, own_losses, whole)[0]
    for found in gloo.run(staged.world_size, own_losses, staged):
        assert found == [pytest.approx(pair, rel=LOSSES) for pair in expected]


def evaluated(plan: Plan) -> tuple[list[float], list[float], Tensor, dict[int, list[int]], str]:
    """Losses and balance terms of evaluations before and after a step that replays their routes, the last routes,
    loads, and what is said of logits."""
    losses, terms, logits = list[float](), list[float](), ""
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        tokens, labels = own_part(job, *batches_of(plan.spec, 1)[0])
        labels = labels.masked_fill(tokens < 8, -100)
        for _ in range(2):
            with torch.no_grad():
                output = model.eval()(tokens, labels)
            assert job.stages == plan.stages_of(job.rank)
            assert job.is_last_stage == hasattr(output, "logits")
            assert output.aux_loss is not None
            assert output.routes is not None
            losses.append(output.loss.item())
            terms.append(output.aux_loss.item())
            loads = {layer: load.tolist() for layer, load in job.expert_loads(model).items()}
            job.step(model.train(), tokens, labels, routes=output.routes.flip(-1))
            optimizer.step()
        try:
            assert output.logits.shape[:2] == tokens.shape
        except DiagnosticError as error:
            logits = str(error)
        every = [torch.empty_like(output.routes) for _ in range(job.world_size)]
        torch.distributed.all_gather(every, output.routes)
        return losses, terms, torch.cat(every[: job.data_size]), loads, logits


def test_a_pipeline_evaluates_and_replays_as_the_unsharded_model(gloo: GlooPool):
    options = {
        "gate": "topk(2, jitter = 0.1)", "balance": "[switch_loss(0.1, over = model)]",
        "optimizer": "adamw(lr = 3e-3); replay = true",
    }  # fmt: skip
    whole = moe_spec(**{**MODEL, **options}, microbatches=4, ranks=1, ep=1)
    (losses, terms, routes, loads, _), *_ = gloo.run(1, evaluated, moec.compile(whole))
    spec = moe_spec(**{**MODEL, **options}, microbatches=4, ranks=2, ep=2, zero=3)
    results = gloo.run(4, evaluated, staged_plan(spec, virtual=2, schedule="zero_bubble_v", last_layers=(0, 2, 4, 5)))
    for rank, result in enumerate(results):
        assert result[0] == pytest.approx(losses, abs=LOSSES)
        assert result[1] == pytest.approx(terms, abs=LOSSES)
        assert torch.equal(result[2], routes)
        assert result[3] == loads
        assert bool(result[4]) == (rank > 1)
    assert "stage 3, on ranks 0 to 1" in results[3][4]
