"""Steps on pipelines that are refused or that fail, on gloo ranks: every rank says so, and none waits for ever."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.plans import moe_spec
from support.ranks.gloo_pool import GlooPool
from support.ranks.training import batches_of, gradients_of, own_part
from support.staged_plans import staged_plan
from torch import Tensor
from torch.nn.utils import parametrize

import moec
from moec.codegen.plan import Plan
from moec.grammar.diagnostics import DiagnosticError
from moec.runtime.errors import RankError


def pipeline(ranks: int = 1, **stages: Any) -> Plan:
    model = {"depth": 3, "batch": 16, "balance": "[]", "model": "embedding = tokens(tied = true)"}
    return staged_plan(moe_spec(**model, ranks=ranks, ep=1, microbatches=4), **stages)


def refusals(plan: Plan) -> dict[str, str]:
    """What calls that need the whole model say, and steps that cannot be taken."""
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        tokens, labels = own_part(job, *batches_of(plan.spec, 1)[0])

        def mean(logits: Tensor, labels: Tensor) -> Tensor:
            return logits.mean(-1)

        def detached(logits: Tensor, labels: Tensor) -> Tensor:
            return logits.detach().sum()

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
            "detached loss": lambda: job.step(model, tokens, labels, loss=detached),
            "count": lambda: job.step(model, tokens, labels, loss=mean, count=lambda logits, labels: 1),
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
    plan = pipeline(schedule="zero_bubble")
    words = {
        "forward": "in training mode", "logits": "without labels", "eval with gradients": "with gradients",
        "eval of another batch": "MOE0702", "five": "takes no 5 micro-batches",
        "generate": "MOE0711", "accumulate": "microbatches=n", "own loss": "must give a scalar",
        "detached loss": "does not depend on the model's logits on any rank", "count": "MOE0700",
        "other layer": "is in stage", "other batch": "MOE0702", "save_hf": "weights export", "nan": "MOE0708",
        "nan in an evaluation": "MOE0708",
        "hook": "MOE0711", "compile": "schedule = one_f_one_b", "torch's clipping": "job.clip_grad_norm_",
        "hook of a tied weight": "embedding.weight has a hook",
        "drifted copies": "embedding.weight: rank 0 and rank 1 differ from each other",
        "half of a tied weight": "1 of 2 train it", "all frozen": "all are frozen",
    }  # fmt: skip
    for said in gloo.run(2, refusals, plan):
        assert said.keys() == words.keys()
        for name, text in said.items():
            assert words[name] in text, name


def step_in_hook(parameter: Tensor) -> None:
    """An optimizer in a hook."""
    assert parameter.grad is not None
    with torch.no_grad():
        parameter -= 0.1 * parameter.grad


def steps_in_hooks(plan: Plan) -> dict[str, str]:
    """What steps say in which a hook of the first stage changes a parameter."""
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        batch, said = own_part(job, *batches_of(plan.spec, 1)[0]), dict[str, str]()
        attention = next(layer for layer in model.layers if [*layer.parameters()]).get_submodule("attention")
        query, key = attention.get_submodule("q"), attention.get_submodule("k")
        embedding = model.get_parameter("embedding.weight")
        node = embedding.view_as(embedding).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        if 0 in job.stages:
            parametrize.register_parametrization(query, "weight", torch.nn.Identity())
        hooks: dict[str, Callable[[], Any]] = {
            "parameter": lambda: key.weight.register_post_accumulate_grad_hook(step_in_hook),
            "original": lambda: query.parametrizations.weight.original.register_post_accumulate_grad_hook(step_in_hook),
            "tied": lambda: node.register_hook(lambda *_: step_in_hook(embedding)),
        }
        for name, register in hooks.items():
            for microbatches in (4, 1):
                handles = [register()] if 0 in job.stages else []
                try:
                    job.step(model, *batch, microbatches=microbatches)
                except DiagnosticError as error:
                    said[f"{name}, {microbatches}"] = str(error)
                for handle in handles:
                    handle.remove()
        job.step(model, *batch)
        return said


@pytest.mark.parametrize(("ranks", "schedule"), [(2, "one_f_one_b"), (1, "zero_bubble")])
def test_a_hook_that_changes_a_parameter_between_micro_batches_is_refused(gloo: GlooPool, ranks: int, schedule: str):
    words = {
        "parameter, 4": "of pipeline stage 0", "original, 4": "of pipeline stage 0", "tied, 4": "of pipeline stage 0",
        "tied, 1": "embedding.weight, of which several pipeline stages",
    }  # fmt: skip
    for said in gloo.run(2 * ranks, steps_in_hooks, pipeline(ranks, schedule=schedule)):
        assert said.keys() == words.keys()
        assert all("MOE0722" in text and words[name] in text for name, text in said.items()), said


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
        store = torch.distributed.distributed_c10d._get_default_store()
        if job.rank == 0:  # until the other rank has its messages: it would fail where this one has left
            store.wait(["received"])
        else:
            store.set("received", "")
        return [*said, str(refused.value)]


def test_a_step_that_an_exception_ended_in_the_middle_cannot_be_followed_by_another(gloo: GlooPool):
    for said in gloo.run(2, went_on, pipeline(schedule="gpipe"), initialize=False):
        assert all("MOE0752" in text for text in said)


def test_a_rank_that_raises_in_its_stage_is_named_by_those_that_wait(gloo: GlooPool):
    said = gloo.run(3, stalled, pipeline(pp=3), initialize=False)
    assert said[1] == "no more data"
    assert all("rank 1 ended with LookupError" in said[rank] for rank in (0, 2))
    assert any("micro-batch" in text for text in said)
