"""Pipelines on gloo ranks: training, checkpoints and errors are those of the model without stages."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
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
from torch.nn.utils import parametrize

import moec
from moec.codegen.plan import Plan
from moec.grammar.diagnostics import DiagnosticError
from moec.runtime.errors import RankError
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


def step_in_hook(parameter: Tensor) -> None:
    """An optimizer in a hook."""
    assert parameter.grad is not None
    with torch.no_grad():
        parameter -= 0.1 * parameter.grad


def refusals(plan: Plan) -> dict[str, str]:
    """What calls that need the whole model say, and steps that cannot be taken."""
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        tokens, labels = own_part(job, *batches_of(plan.spec, 1)[0])

        def mean(logits: Tensor, labels: Tensor) -> Tensor:
            return logits.mean(-1)

        other = next(number for number, layer in enumerate(model.layers) if not [*layer.parameters()])
        calls: dict[str, Callable[[], object]] = {
            "forward": lambda: model(tokens),
            "logits": lambda: torch.no_grad()(model.eval())(tokens),
            "eval with gradients": lambda: model.eval()(tokens, labels),
            "eval of another batch": lambda: torch.no_grad()(model.eval())(tokens + (job.rank % 2), labels),
            "five": lambda: job.step(model, tokens, labels, microbatches=5),
            "generate": lambda: model.generate(tokens[:1], max_new_tokens=1),
            "accumulate": lambda: job.accumulate(model, labels).__enter__(),
            "own loss": lambda: job.step(model, tokens, labels, loss=mean),
            "count": lambda: job.step(model, tokens, labels, loss=mean, count=lambda logits, labels: 1, microbatches=1),
            "other layer": lambda: model.layers[other](tokens),
            "other batch": lambda: job.step(model, tokens + (job.rank % 2), labels),
            "save_hf": lambda: moec.save_hf(model, "nowhere"),
            "compile": model.compile,
        }
        said = {}
        for name, call in calls.items():
            with pytest.raises(DiagnosticError) as refused:
                call()
            said[name] = str(refused.value)
            model.train()
        assert not any(gradient.any() for gradient in gradients_of(model).values())  # the refused own loss adds nothing
        with pytest.raises(AttributeError, match=f"layer {other} is in stage"):
            model.layers[other].attention  # noqa: B018
        if job.rank == 0:
            with pytest.raises(AttributeError, match="'norm': it is in stage 1, on rank 1"):
                model.norm  # noqa: B018
        job.step(model, tokens, labels)
        with pytest.raises(DiagnosticError) as refused:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        said["torch's clipping"] = str(refused.value)
        hook = model.register_forward_hook(lambda *_: None)
        with pytest.raises(DiagnosticError) as refused:
            job.step(model, tokens, labels)
        said["hook"] = str(refused.value)
        hook.remove()
        embedding = model.get_parameter("embedding.weight")
        hooks = [embedding.register_hook(lambda gradient: gradient.clamp(-1, 1))] if job.rank == 0 else []
        with pytest.raises(DiagnosticError) as refused:
            job.step(model, tokens, labels)
        said["hook of a tied weight"] = str(refused.value)
        for hook in hooks:
            hook.remove()
        number = next(number for number, layer in enumerate(model.layers) if [*layer.parameters()])
        hook = model.layers[number].get_parameter("attention.q.weight").register_post_accumulate_grad_hook(step_in_hook)
        with pytest.raises(DiagnosticError) as refused:
            job.step(model, tokens, labels)
        said["step in a hook"] = str(refused.value)
        job.step(model, tokens, labels, microbatches=1)
        hook.remove()
        if job.rank == 1:
            part = model.layers[number].get_submodule("attention.q")
            parametrize.register_parametrization(part, "weight", torch.nn.Identity())
        job.step(model, tokens, labels)  # no other stage waits for a parametrized one
        if job.rank == 1:
            parametrize.remove_parametrizations(part, "weight")
        with torch.no_grad():
            embedding[0, 0] += job.rank
        with pytest.raises(DiagnosticError) as refused:
            job.check_replicas(model)
        said["drifted copies"] = str(refused.value)
        embedding.requires_grad_(job.rank == 0)
        with pytest.raises(DiagnosticError) as refused:
            job.step(model, tokens, labels)
        said["half of a tied weight"] = str(refused.value)
        embedding.requires_grad_()
        model.requires_grad_(False)
        with pytest.raises(DiagnosticError) as refused:
            job.step(model, tokens, labels)
        said["all frozen"] = str(refused.value)
        model.requires_grad_()
        with torch.no_grad():
            for layer in model.layers:
                for gate in (p for n, p in layer.named_parameters() if n == "moe.gate.weight"):
                    gate.fill_(float("nan"))
                    break
        with pytest.raises(DiagnosticError) as refused:
            job.step(model, tokens, labels)
        with pytest.raises(DiagnosticError) as refused_evaluation, torch.no_grad():
            model.eval()(tokens, torch.full_like(labels, -100))
        return {**said, "nan": str(refused.value), "nan in an evaluation": str(refused_evaluation.value)}


def test_what_needs_the_whole_model_is_refused_on_every_rank(gloo: GlooPool):
    plan = pipeline({"ranks": 1, "ep": 1}, {"schedule": "zero_bubble"})
    words = {
        "forward": "in training mode", "logits": "without labels", "eval with gradients": "with gradients",
        "eval of another batch": "MOE0702", "five": "takes no 5 micro-batches",
        "generate": "MOE0711", "accumulate": "microbatches=n", "own loss": "must give a scalar",
        "count": "MOE0700",
        "other layer": "is in stage", "other batch": "MOE0702", "save_hf": "weights export", "nan": "MOE0708",
        "nan in an evaluation": "MOE0708",
        "hook": "MOE0711", "compile": "schedule = one_f_one_b", "torch's clipping": "job.clip_grad_norm_",
        "hook of a tied weight": "embedding.weight has a hook", "step in a hook": "MOE0722",
        "drifted copies": "embedding.weight: rank 0 and rank 1 differ from each other",
        "half of a tied weight": "1 of 2 train it", "all frozen": "all are frozen",
    }  # fmt: skip
    for said in gloo.run(2, refusals, plan):
        assert said.keys() == words.keys()
        for name, text in said.items():
            assert words[name] in text, name


def warned(plan: Plan) -> list[str]:
    """What a rank warns of in two steps of a mean, where the first stage is frozen and nothing zeroes gradients."""
    with moec.launch(plan, device="cpu") as job, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = job.build(seed=1)
        model.requires_grad_(job.is_last_stage)
        for _ in range(2):
            job.step(model, *own_part(job, *batches_of(plan.spec, 1)[0]), loss=lambda logits, labels: logits.mean())
        return [str(warning.message) for warning in caught]


def test_what_only_one_stage_sees_its_first_rank_warns_of(gloo: GlooPool):
    plan = staged_plan(moe_spec(ranks=2, ep=2, batch=8, microbatches=2))
    *others, said, last = gloo.run(4, warned, plan)
    assert ["gives a mean" in said[0], "gradients of an earlier job.step" in said[1]] == [True, True]
    assert [*others, last] == [[], [], []]


def stalled(plan: Plan) -> str:
    """What a rank says when rank 1 raises in its third forward pass."""
    try:
        with moec.launch(plan, device="cpu") as job:
            model = job.build(seed=1)
            passes = list[int]()

            def hook(*_: object) -> None:
                passes.append(0)
                if job.rank == 1 and len(passes) == 3:
                    raise LookupError("no more data")

            for layer in model.layers:
                if any(True for _ in layer.parameters()):
                    layer.register_forward_pre_hook(hook)
                    break
            job.step(model, *own_part(job, *batches_of(plan.spec, 1)[0]))
    except (RankError, LookupError) as error:
        return str(error)
    return ""


def went_on(plan: Plan) -> list[str]:
    """What the next step, clipping and evaluation say after a step in whose middle every rank caught an exception."""
    said = list[str]()
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        batch, passes = own_part(job, *batches_of(plan.spec, 1)[0]), list[int]()

        def hook(*_: object) -> None:
            passes.append(0)
            if len(passes) > 2 - job.rank:
                raise LookupError("a bad layer")

        layer = next(layer for layer in model.layers if [*layer.parameters()])
        handle = layer.register_forward_pre_hook(hook)
        with pytest.raises(LookupError):
            job.step(model, *batch)
        handle.remove()
        with pytest.raises(DiagnosticError) as refused:
            job.step(model, *batch)
        said.append(str(refused.value))
        with pytest.raises(DiagnosticError) as refused:
            job.clip_grad_norm_(model, 1.0)
        said.append(str(refused.value))
        with pytest.raises(DiagnosticError) as refused, torch.no_grad():
            model.eval()(*batch)
        return [*said, str(refused.value)]


def test_a_step_that_an_exception_ended_in_the_middle_cannot_be_followed_by_another(gloo: GlooPool):
    for said in gloo.run(2, went_on, pipeline({"ranks": 1, "ep": 1}, {"schedule": "gpipe"}), initialize=False):
        assert all("MOE0752" in text for text in said)


def test_a_rank_that_raises_in_its_stage_is_named_by_those_that_wait(gloo: GlooPool):
    said = gloo.run(3, stalled, pipeline({"ranks": 1, "ep": 1}, {"pp": 3}), initialize=False)
    assert said[1] == "no more data"
    assert all("rank 1 ended with LookupError" in said[rank] for rank in (0, 2))
    assert any("micro-batch" in text for text in said)
