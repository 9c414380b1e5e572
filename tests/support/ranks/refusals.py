"""Mistakes on ranks, and the error that each rank raises."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from support.plans import moe_plan
from support.ranks.contract import batch, forward_backward, mine, plain
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import moec
from moec.runtime.job.job import Job
from moec.runtime.model.module import PlanModule
from moec.runtime.weights.masters import local_part


def said(act: Callable[[], object]) -> str:
    """The code and message of the diagnostic that `act` raises."""
    try:
        act()
    except moec.DiagnosticError as error:
        return f"{error.diagnostics[0].code} {error.diagnostics[0].message}"
    return "nothing"


def refusals(options: dict[str, Any]) -> dict[str, str]:
    """The diagnostic of each mistake on this rank."""
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model = job.build(seed=1)
        tokens, labels = mine(job, *batch())

        def step(**given: Any) -> Callable[[], object]:
            return lambda: job.step(model, tokens, labels, **given)

        def bad_on_last_rank(logits: Tensor, labels: Tensor) -> Any:
            return logits.sum() if job.rank < job.world_size - 1 else logits

        def raises_on_last_rank(logits: Tensor, labels: Tensor) -> Tensor:
            return logits.sum() if job.rank < job.world_size - 1 else torch.nn.functional.cross_entropy(logits, labels)

        def autocast() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                model(tokens)

        found = {
            "no scalar": said(step(loss=bad_on_last_rank)),
            "a loss that raises": said(step(loss=raises_on_last_rank)),
            "no tensor": said(step(loss=lambda logits, labels: 1.0)),
            "a detached loss": said(step(loss=lambda logits, labels: logits.sum().detach())),
            "no tokens": said(lambda: job.step(model, tokens if job.rank else None, labels)),
            "no labels given": said(lambda: job.step(model, tokens, None)),
            "a dict": said(lambda: model({"input_ids": tokens})),
            "zero count": said(step(count=lambda labels: 0)),
            "no count": said(step(count=lambda labels: "many")),
            "no labels": said(lambda: job.step(model, tokens, torch.full_like(labels, -100))),
            "late count": said(step(count=lambda logits, labels: 1, microbatches=2)),
            "both losses": said(step(loss=bad_on_last_rank, logprob_loss=bad_on_last_rank)),
            "inputs": said(step(loss=bad_on_last_rank, inputs={"mask": labels[:, 1:]})),
            "micro-batches": said(step(microbatches=100)),
            "accumulate": said(lambda: accumulate_too_little(job, model, tokens, labels)),
            "backward too late": said(lambda: checkpointed_for_too_long(job, tokens, labels)),
            "a hook's labels": said(
                lambda: with_a_hook(job, lambda model, given: (given[0], given[1] + 64), tokens, labels)
            ),
            "other labels": said(lambda: accumulate_others(job, model, tokens, labels)),
            "another job's": said(lambda: another_jobs(job, model)),
            "layers": said(lambda: with_a_layer_more(job, tokens)),
            "without gradients": said(lambda: torch.no_grad()(step())()),
            "all frozen": said(lambda: job.step(job.build().requires_grad_(False), tokens, labels)),
            "fully_shard": said_or_torchs(lambda: fully_sharded(job, tokens)),
            "autocast": said(autocast),
            "data parallel": said(lambda: nn.parallel.DistributedDataParallel(model)),
        }
        if job.world_size > 1:
            found |= refusals_of_several_ranks(job, model, tokens, labels)
        found["works"] = str(forward_backward(job, model).keys() == job.plan.parameters.keys())
    found["after the job"] = said(lambda: model(tokens))
    return found


def refusals_of_several_ranks(job: Job, model: PlanModule, tokens: Tensor, labels: Tensor) -> dict[str, str]:
    """Errors of mistakes that only one rank makes."""

    def step(**given: Any) -> Callable[[], object]:
        return lambda: job.step(model, tokens, labels, **given)

    found = {}
    found["other tokens"] = said(lambda: model((tokens + job.rank) % 32))
    found["other labels on one rank"] = said(lambda: accumulate_others_on_a_rank(job, model, tokens, labels))
    found["modes"] = said(lambda: model.train(job.rank > 0)(tokens))
    model.train()
    spoils = lambda model, given: (given[0].fill_(job.rank), *given[1:])  # noqa: E731
    found["a hook's tokens"] = said(lambda: with_a_hook(job, spoils, tokens.clone(), labels))
    copies = lambda model, given: (given[0].clone(), *given[1:]) if job.data_rank else None  # noqa: E731
    found["a hook on some"] = said(lambda: with_a_hook(job, copies, tokens, labels))
    calls = lambda model, given: nested(model, given[0]) if job.rank == 0 else None  # noqa: E731
    found["a hook's call"] = said(lambda: with_a_hook(job, calls, tokens, labels))
    freeze = lambda model: model.get_parameter("norm.weight").requires_grad_(job.rank != 1)  # noqa: E731
    found["frozen between"] = said(lambda: changed_between(job, freeze, tokens, labels))
    evaluate = lambda model: model.train(job.rank != 1)  # noqa: E731
    found["evaluating between"] = said(lambda: changed_between(job, evaluate, tokens, labels))
    with torch.autograd.set_detect_anomaly(True):
        found["anomaly"] = said(step())
    found["names"] = said(step(loss=lambda logits, labels, **_: logits.sum(), inputs={f"r{job.rank}": labels.float()}))
    found["an adapter"] = said(lambda: with_an_adapter_on_one_rank(job, tokens))
    found["other calls"] = said(step() if job.rank else lambda: model(tokens, labels))
    found["steps"] = said(step(microbatches=1 + job.rank % 2))
    norm = model.get_parameter("norm.weight").requires_grad_(job.rank != 2)
    found["frozen on one rank"] = said(lambda: model(tokens))
    norm.requires_grad_(True)
    # The same sequences in another order; then other labels and inputs, which the model does not get.
    swapped = tokens.flip(0) if job.rank % 2 else tokens
    found["tokens in another order"] = said(lambda: model(swapped))
    others = {"weights": torch.full(labels.shape, float(job.rank))}
    found["other inputs"] = said(step(loss=lambda logits, labels, weights: logits.sum(), inputs=others))
    found["other shapes"] = said(lambda: unchecked(job, tokens[: 1 + job.rank % 2]))
    found["ids of one loss"] = said(
        lambda: job.step(model, tokens, labels.clamp_min(0) + 40, logprob_loss=lambda logprobs, labels: -logprobs.sum())
    )
    found["replaced"] = said(lambda: with_a_plain_parameter(job, tokens))
    found["inside another"] = raised(lambda: inside_another(job))
    return found


def accumulate_too_little(job: Job, model: PlanModule, tokens: Tensor, labels: Tensor) -> None:
    with job.accumulate(model, labels, labels):
        plain(model, tokens, labels).backward()


def accumulate_others(job: Job, model: PlanModule, tokens: Tensor, labels: Tensor) -> None:
    """The right number of labels, but other ignored ones."""
    with job.accumulate(model, torch.full_like(labels, 3)):
        plain(model, tokens, labels).backward()


def accumulate_others_on_a_rank(job: Job, model: PlanModule, tokens: Tensor, labels: Tensor) -> None:
    with job.accumulate(model, torch.full_like(labels, 3) if job.rank == 1 else labels):
        plain(model, tokens, labels).backward()


def another_jobs(job: Job, model: PlanModule) -> None:
    with moec.launch(job.plan, device="cpu") as other:
        other.clip_grad_norm_(model, 1.0)


def unchecked(job: Job, tokens: Tensor) -> None:
    """A pass of a job that checks no values."""
    with moec.launch(job.plan, device="cpu", checks="none") as other:
        other.build()(tokens)


def with_a_layer_more(job: Job, tokens: Tensor) -> None:
    model = job.build()
    model.layers.append(model.layers[0])
    model(tokens)


def fully_sharded(job: Job, tokens: Tensor) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(job.build())(tokens)


def said_or_torchs(act: Callable[[], object]) -> str:
    """moec's error, or torch's if torch raises first."""
    try:
        return said(act)
    except (ValueError, TypeError, AssertionError, NotImplementedError, RuntimeError) as error:
        return f"torch: {type(error).__name__}"


def inside_another(job: Job) -> None:
    """DistributedDataParallel around a module that contains the model, with replicated parameters only."""
    model = job.build()
    names = [f"0.{name}" for name in job.plan.parameters if "norm" not in name]
    host = nn.Sequential(model)
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(host, names)
    nn.parallel.DistributedDataParallel(host)


def raised(act: Callable[[], object]) -> str:
    """Torch's own error."""
    try:
        act()
    except NotImplementedError as error:
        return str(error)
    return "nothing"


def checkpointed_for_too_long(job: Job, tokens: Tensor, labels: Tensor) -> None:
    """The whole model recomputed after the end of `job.accumulate`."""
    model = job.build()
    with job.accumulate(model, labels):
        loss = checkpoint(
            lambda tokens, labels: plain(model, tokens.clone(), labels), tokens, labels, use_reentrant=False
        )
    loss.backward()


def with_a_hook(job: Job, hook: Any, tokens: Tensor, labels: Tensor) -> None:
    model = job.build()
    model.register_forward_pre_hook(hook)
    job.step(model, tokens, labels)


def cropped_by_a_hook(options: dict[str, Any]) -> str:
    """The diagnostic if a hook passes fewer sequences on one data-parallel rank, with a capacity."""
    with moec.launch(moe_plan(**options, beside="capacity = factor(1.25)"), device="cpu") as job:
        crop = lambda model, given: tuple(ids[:2] for ids in given) if job.data_rank == 0 else None  # noqa: E731
        return said(lambda: with_a_hook(job, crop, *mine(job, *batch())))


def nested(model: nn.Module, tokens: Tensor) -> None:
    """A forward pass in a hook of another one."""
    hooks = model._forward_pre_hooks.copy()
    model._forward_pre_hooks.clear()
    try:
        with torch.no_grad():
            model(tokens)
    finally:
        model._forward_pre_hooks.update(hooks)


def changed_between(job: Job, change: Callable[[PlanModule], object], tokens: Tensor, labels: Tensor) -> None:
    """One rank changes its model between two micro-batches."""
    model = job.build()

    def changing(logits: Tensor, labels: Tensor) -> Tensor:
        change(model)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    job.step(model, tokens, labels, loss=changing, microbatches=2)


def with_an_adapter_on_one_rank(job: Job, tokens: Tensor) -> None:
    model = job.build()
    if job.rank == 2:
        model.head = nn.Sequential(model.head)
    model(tokens)


def with_a_plain_parameter(job: Job, tokens: Tensor) -> None:
    model = job.build()
    model.get_submodule("head").weight = nn.Parameter(torch.zeros(32, 16))
    model(tokens)


def foreign_states(options: dict[str, Any], folder: str) -> dict[str, str]:
    """The diagnostics of this rank when it loads rank 0's files."""
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model, path = job.build(seed=1), Path(folder)
        optimizer = job.optimizer(model)
        job.step(model, *mine(job, *batch()))
        optimizer.step()
        if job.rank == 0:
            torch.save(model.state_dict(), path / "model.pt")
            torch.save(optimizer.state_dict(), path / "optimizer.pt")
            torch.save(dict(model.state_dict().items()), path / "items.pt")
            torch.save(model.layers.state_dict(), path / "layers.pt")
            parts = {name: local_part(tensor) for name, tensor in model.state_dict().items()}
            torch.save(parts, path / "parts.pt")
        torch.distributed.barrier()

        def load(name: str) -> Any:
            return torch.load(path / name, weights_only=False)

        return {
            "model": said(lambda: model.load_state_dict(load("model.pt"))),
            "optimizer": said(lambda: optimizer.load_state_dict(load("optimizer.pt"))),
            "parts": said(lambda: model.load_state_dict(load("parts.pt"))),
            "items": said(lambda: model.load_state_dict(load("items.pt"))),
            "layers": said(lambda: model.layers.load_state_dict(load("layers.pt"))),
            "another plan's": said(lambda: optimizer.load_state_dict(state_of_another_plan())),
            "whole optimizer": said(lambda: optimizer.load_state_dict(whole_optimizer_state(job))),
            "other optimizer": said(lambda: optimizer.load_state_dict({"state": {}, "param_groups": []})),
            "own": said(lambda: model.load_state_dict(reloaded(model.state_dict()))),
            "own optimizer": said(lambda: optimizer.load_state_dict(reloaded(optimizer.state_dict()))),
        }


def state_of_another_plan() -> Any:
    """The state of an optimizer of the same model under another plan for as many ranks."""
    with moec.launch(moe_plan(ranks=4, ep=4), device="cpu") as job:
        return job.optimizer(job.build()).state_dict()


def whole_optimizer_state(job: Job) -> Any:
    """The state of the unsharded model's optimizer, with parameters in the order of `job.optimizer`."""
    model = moec.reference(job.plan)
    model(*batch()).loss.backward()
    names = [name for decays in (True, False) for name, p in job.plan.parameters.items() if p.decays is decays]
    optimizer = torch.optim.AdamW([model.get_parameter(name) for name in names])
    optimizer.step()
    return optimizer.state_dict()


def reloaded(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)
