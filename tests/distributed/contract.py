"""What test_contract.py runs on the ranks of a job and on the unsharded model: what PyTorch users do with a model."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from models import moe_plan
from torch import Tensor, nn
from training import gradients_of

import moec
from moec.passes.ir import Layout
from moec.runtime.job import Job, local_part
from moec.runtime.module import PlanModule
from moec.runtime.reference import reference
from moec.runtime.shards import local_slices

ONE = {"ranks": 1, "ep": 1}
FOUR = {"ranks": 4, "tp": 2, "ep": 2}
BATCH = (8, 8)

Gradients = Mapping[str, Tensor]


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and labels of all ranks; the first half of the labels is mostly ignored, so that halves weigh unlike."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(32, BATCH, generator=generator) for _ in range(2))
    labels[: BATCH[0] // 2][torch.rand(BATCH[0] // 2, BATCH[1], generator=generator) < 0.9] = -100
    return tokens, labels


def mine(job: Job, *tensors: Tensor) -> list[Tensor]:
    """This rank's sequences: every other one, so that each rank has some of either half."""
    return [tensor[job.data_rank :: job.data_size].contiguous() for tensor in tensors]


def parts_of(whole: Gradients, job: Job) -> dict[str, Tensor]:
    """What this rank should have of whole tensors."""
    found = {}
    for name, tensor in whole.items():
        data = job.plan.parameters[name]
        layout = Layout.parse(data.layout)
        found[name] = tensor[local_slices(data.shape, layout, job.plan.meshes[data.mesh], job.rank)]
    return found


def distance(got: Gradients, wanted: Gradients) -> float:
    """The largest difference over the largest element, over all tensors; infinite where one is missing."""
    if got.keys() != wanted.keys():
        return float("inf")
    scale = max(float(tensor.abs().max()) for tensor in wanted.values())
    return max(float((got[name] - wanted[name]).abs().max()) for name in wanted) / scale


def whole_gradients(options: dict[str, Any], score: Callable[[PlanModule, Tensor, Tensor], Tensor]) -> Gradients:
    """The unsharded model's gradients of a loss over the whole batch, from the weights of `job.build(seed=1)`."""
    model = reference(moe_plan(**options).spec, seed=1)
    score(model, *batch()).backward()
    return gradients_of(model)


def plain(model: PlanModule, tokens: Tensor, labels: Tensor) -> Tensor:
    loss = model(tokens, labels).loss
    assert loss is not None
    return loss


def forward_backward(job: Job, model: PlanModule) -> Gradients:
    """The gradients of one plain backward pass."""
    model.zero_grad()
    plain(model, *mine(job, *batch())).backward()
    return gradients_of(model)


def off(options: dict[str, Any], run: Callable[[Job, PlanModule], Gradients], score: Any = plain) -> float:
    """`distance` of the gradients that `run` gives from the unsharded model's gradients of `score`."""
    torch.set_num_threads(1)
    with moec.launch(moe_plan(**options), device="cpu") as job:
        found = run(job, job.build(seed=1))
        return distance(found, parts_of(whole_gradients(options, score), job))


# ---- the claims, each as a function of (job, model) -----------------------------------------------------


class Boom(torch.autograd.Function):
    """Raises the error of a GPU that is out of memory, in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise torch.OutOfMemoryError("boom")


def after_an_exception(job: Job, model: PlanModule) -> Gradients:
    """Steps whose backward fails in the middle, and then one that does not."""

    def fail(module: nn.Module, inputs: Any, output: Any) -> Any:
        return (Boom.apply(output[0]), *output[1:])

    for microbatches in (1, 2):
        handle = model.layers[1].register_forward_hook(fail)
        try:
            job.step(model, *mine(job, *batch()), microbatches=microbatches)
        except torch.OutOfMemoryError:
            pass
        else:
            raise AssertionError("backward did not fail")
        handle.remove()
    model.zero_grad()
    job.step(model, *mine(job, *batch()))
    return gradients_of(model)


def after_an_exception_in_forward(job: Job, model: PlanModule) -> Gradients:
    """The same of a forward pass; parameters change before the next."""

    def fail(module: nn.Module, inputs: Any) -> None:
        raise KeyError("boom")

    handle = model.layers[2].register_forward_pre_hook(fail)
    try:
        job.step(model, *mine(job, *batch()), microbatches=2)
    except KeyError:
        handle.remove()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(state)
    return forward_backward(job, model)


def by_autograd_grad(job: Job, model: PlanModule) -> Gradients:
    loss = plain(model, *mine(job, *batch()))
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters)
    assert all(p.grad is None for p in parameters)
    return {name: local_part(gradient) for name, gradient in zip(names, found, strict=True)}


def of_a_deep_copy(job: Job, model: PlanModule) -> Gradients:
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    plain(model, *mine(job, *batch())).backward()
    return forward_backward(job, copied)


def in_micro_batches(job: Job, model: PlanModule) -> Gradients:
    job.step(model, *mine(job, *batch()), microbatches=3)
    return gradients_of(model)


def accumulated_by_hand(job: Job, model: PlanModule) -> Gradients:
    pairs = list(zip(*(part.tensor_split(2) for part in mine(job, *batch())), strict=True))
    with job.accumulate(model, *(labels for _, labels in pairs)):
        for tokens, labels in pairs:
            plain(model, tokens, labels).backward()
    return gradients_of(model)


def one_backward_of_many_forwards(job: Job, model: PlanModule) -> Gradients:
    pairs = list(zip(*(part.tensor_split(2) for part in mine(job, *batch())), strict=True))
    with job.accumulate(model, *(labels for _, labels in pairs)):
        sum(plain(model, tokens, labels) for tokens, labels in pairs).backward()
    return gradients_of(model)


def retained(job: Job, model: PlanModule) -> Gradients:
    """Two backward passes of one forward pass add up."""
    loss = plain(model, *mine(job, *batch())) / 2
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients_of(model)


def checkpointed(job: Job, model: PlanModule) -> Gradients:
    """Layers computed again in backward by torch's own means."""
    from torch.utils.checkpoint import checkpoint

    for layer in model.layers:
        inner = layer.forward
        layer.forward = lambda *inputs, inner=inner: checkpoint(inner, *inputs, use_reentrant=False)
    return forward_backward(job, model)


def replaced(job: Job, model: PlanModule) -> Gradients:
    """A new parameter in the place of another is used in training and in evaluation."""
    layer = model.layers[0]
    old = layer.get_parameter("attention.q.weight")
    with torch.no_grad():
        new = nn.Parameter(old.clone())
        old.fill_(99.0)
    layer.get_submodule("attention.q").weight = new
    model.eval()
    with torch.no_grad():
        evaluated = model(*mine(job, batch()[0])).logits
    model.train()
    assert evaluated.abs().max() < 10
    return forward_backward(job, model)


def loaded_after_the_optimizer(job: Job, model: PlanModule) -> Gradients:
    """Weights loaded late are what the next step starts from."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = job.optimizer(model)
    for _ in range(2):
        job.step(model, *mine(job, *batch(1)))
        optimizer.step()
        optimizer.zero_grad()
    model.load_state_dict(state)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    return forward_backward(job, model)


def whole_state_loaded(job: Job, model: PlanModule) -> Gradients:
    """Of an unsharded model's `state_dict` every rank takes its part."""
    other = job.build(seed=2)
    other.load_state_dict(reference(job.plan.spec, seed=1).state_dict())
    return forward_backward(job, other)


def through_distributed_checkpoint(job: Job, model: PlanModule, folder: str) -> Gradients:
    """Saved and loaded by torch's own resharding checkpoint."""
    import torch.distributed.checkpoint as dcp

    dcp.save(model.state_dict(), checkpoint_id=folder)
    other = job.build(seed=2)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state)
    return forward_backward(job, other)


# ---- losses of one's own ----------------------------------------------------------------------------------


def smoothed(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """A loss of every token, weighted: label smoothing, which wants the whole vocabulary."""
    each = F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100, label_smoothing=0.1
    )
    return (each * weights.flatten()).sum()


def sequence_loss(logprobs: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """A loss that is no sum over tokens: of each sequence's own log-probability."""
    return (-(logprobs * weights).sum(1)).sigmoid().sum()


def weight_sum(labels: Tensor, weights: Tensor) -> float:
    return float((weights * (labels != -100)).sum())


def token_weights() -> Tensor:
    return torch.rand(BATCH, generator=torch.Generator().manual_seed(7))


def own_loss(job: Job, model: PlanModule, microbatches: int) -> Gradients:
    tokens, labels, weights = mine(job, *batch(), token_weights())
    job.step(
        model, tokens, labels, loss=smoothed, count=weight_sum, inputs={"weights": weights}, microbatches=microbatches
    )
    return gradients_of(model)


def own_loss_unsharded(model: PlanModule, tokens: Tensor, labels: Tensor) -> Tensor:
    output, weights = model(tokens), token_weights()
    assert output.aux_loss is not None
    return smoothed(output.logits, labels, weights) / weight_sum(labels, weights) + output.aux_loss


def own_logprob_loss(job: Job, model: PlanModule, microbatches: int) -> Gradients:
    tokens, labels, weights = mine(job, *batch(), token_weights())
    job.step(model, tokens, labels, logprob_loss=sequence_loss, inputs={"weights": weights}, microbatches=microbatches)
    return gradients_of(model)


def own_logprob_loss_unsharded(model: PlanModule, tokens: Tensor, labels: Tensor) -> Tensor:
    output, weights, valid = model(tokens), token_weights(), labels != -100
    picked = output.logits.float().log_softmax(-1).gather(-1, labels.where(valid, 0)[..., None])[..., 0]
    assert output.aux_loss is not None
    return sequence_loss(picked.where(valid, 0), labels, weights) / int(valid.sum()) + output.aux_loss


def own_backward(job: Job, model: PlanModule) -> Gradients:
    """A loss by hand, of logits and the balance terms, without labels."""
    tokens, labels = mine(job, *batch())
    output = model(tokens)
    summed = F.cross_entropy(job.whole_logits(output).flatten(0, 1), labels.flatten(), reduction="sum")
    assert output.aux_loss is not None
    (summed / (batch()[1] != -100).sum() + output.aux_loss).backward()
    return gradients_of(model)


def constant_on_one_rank(options: dict[str, Any]) -> float:
    """A loss that is a constant on the first data rank, none of whose tokens count."""

    def run(job: Job, model: PlanModule) -> Gradients:
        tokens, labels = mine(job, *batch())

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            if job.data_rank == 0 and job.data_size > 1:
                return torch.zeros(())
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

        job.step(model, tokens, labels, loss=loss, count=lambda labels: 10 / job.data_size)
        return gradients_of(model)

    def unsharded(model: PlanModule, tokens: Tensor, labels: Tensor) -> Tensor:
        output, labels = model(tokens), labels.clone()
        if options["ranks"] > 1:
            labels[::2] = -100
        assert output.aux_loss is not None
        return F.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), reduction="sum") / 10 + output.aux_loss

    return off(options, run, unsharded)


# ---- refusals ------------------------------------------------------------------------------------------------


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

        def autocast() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                model(tokens)

        found = {
            "no scalar": said(step(loss=bad_on_last_rank)),
            "no tensor": said(step(loss=lambda logits, labels: 1.0)),
            "zero count": said(step(count=lambda labels: 0)),
            "no count": said(step(count=lambda labels: "many")),
            "no labels": said(lambda: job.step(model, tokens, torch.full_like(labels, -100))),
            "late count": said(step(count=lambda logits, labels: 1, microbatches=2)),
            "both losses": said(step(loss=bad_on_last_rank, logprob_loss=bad_on_last_rank)),
            "inputs": said(step(loss=bad_on_last_rank, inputs={"mask": labels[:, 1:]})),
            "micro-batches": said(step(microbatches=100)),
            "accumulate": said(lambda: accumulate_too_little(job, model, tokens, labels)),
            "autocast": said(autocast),
            "data parallel": said(lambda: nn.parallel.DistributedDataParallel(model)),
        }
        if job.world_size > 1:
            found["other tokens"] = said(lambda: model((tokens + job.rank) % 32))
            found["modes"] = said(lambda: model.train(job.rank > 0)(tokens))
            model.train()
            found["steps"] = said(step(microbatches=1 + job.rank % 2))
            norm = model.get_parameter("norm.weight").requires_grad_(job.rank != 2)
            found["frozen on one rank"] = said(lambda: model(tokens))
            norm.requires_grad_(True)
            found["replaced"] = said(lambda: with_a_plain_parameter(job, tokens))
            found["inside another"] = raised(lambda: inside_another(job))
        found["works"] = str(forward_backward(job, model).keys() == job.plan.parameters.keys())
    found["after the job"] = said(lambda: model(tokens))
    return found


def accumulate_too_little(job: Job, model: PlanModule, tokens: Tensor, labels: Tensor) -> None:
    with job.accumulate(model, labels, labels):
        plain(model, tokens, labels).backward()


def inside_another(job: Job) -> None:
    """DistributedDataParallel around a module that has the model somewhere inside, and its replicas alone to sum."""
    model = job.build()
    names = [f"0.{name}" for name in job.plan.parameters if "norm" not in name]
    host = nn.Sequential(model)
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(host, names)
    nn.parallel.DistributedDataParallel(host)


def raised(act: Callable[[], object]) -> str:
    """The first words of torch's own error."""
    try:
        act()
    except NotImplementedError as error:
        return str(error)
    return "nothing"


def with_a_plain_parameter(job: Job, tokens: Tensor) -> None:
    model = job.build()
    model.get_submodule("head").weight = nn.Parameter(torch.zeros(32, 16))
    model(tokens)


def foreign_states(options: dict[str, Any], folder: str) -> dict[str, str]:
    """The diagnostics of this rank when it loads what rank 0 has saved."""
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model, path = job.build(seed=1), Path(folder)
        optimizer = job.optimizer(model)
        job.step(model, *mine(job, *batch()))
        optimizer.step()
        if job.rank == 0:
            torch.save(model.state_dict(), path / "model.pt")
            torch.save(optimizer.state_dict(), path / "optimizer.pt")
            parts = {name: local_part(tensor) for name, tensor in model.state_dict().items()}
            torch.save(parts, path / "parts.pt")
        torch.distributed.barrier()

        def load(name: str) -> Any:
            return torch.load(path / name, weights_only=False)

        return {
            "model": said(lambda: model.load_state_dict(load("model.pt"))),
            "optimizer": said(lambda: optimizer.load_state_dict(load("optimizer.pt"))),
            "parts": said(lambda: model.load_state_dict(load("parts.pt"))),
            "own": said(lambda: model.load_state_dict(reloaded(model.state_dict()))),
            "own optimizer": said(lambda: optimizer.load_state_dict(reloaded(optimizer.state_dict()))),
        }


def reloaded(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


# ---- more than one job, frozen parameters, norms -------------------------------------------------------------


def two_jobs(swapped: bool) -> tuple[float, float]:
    """A student at tp 2 and a teacher at tp 1 in one process: `distance` of the gradients of each."""
    torch.set_num_threads(1)
    student, teacher = {**FOUR, "experts": 4}, {"ranks": 4, "ep": 4, "experts": 4, "dim": 24}
    first, second = (teacher, student) if swapped else (student, teacher)
    with moec.launch(moe_plan(**first), device="cpu") as one, moec.launch(moe_plan(**second), device="cpu") as two:
        models = one.build(seed=1), two.build(seed=1)
        losses = [plain(model, *mine(job, *batch())) for job, model in zip((one, two), models, strict=True)]
        for loss in losses:
            loss.backward()
        found = [
            distance(gradients_of(model), parts_of(whole_gradients(options, plain), job))
            for job, model, options in zip((one, two), models, (first, second), strict=True)
        ]
    return found[0], found[1]


def frozen(options: dict[str, Any]) -> tuple[bool, bool, float]:
    """Whether frozen parameters have no gradient and stay as they are; and how far the others' gradients are off."""
    with moec.launch(moe_plan(**options, optimizer="adamw(weight_decay = 0.5)"), device="cpu") as job:
        model = job.build(seed=1)
        kept = {name for name in job.plan.parameters if "layers.1." in name or "embedding" in name}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in kept)
        before = {name: local_part(model.get_parameter(name)).clone() for name in kept}
        optimizer = job.optimizer(model)
        found = forward_backward(job, model)
        wanted = parts_of(whole_gradients(options, plain), job)
        error = distance(found, {name: wanted[name] for name in wanted.keys() - kept})
        optimizer.step()
        alike = all(torch.equal(local_part(model.get_parameter(name)), value) for name, value in before.items())
        return found.keys().isdisjoint(kept), alike, error


def norms(options: dict[str, Any]) -> tuple[float, str]:
    """The norm by the job, and what torch's own function says of it."""
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model = job.build(seed=1)
        forward_backward(job, model)
        try:
            torchs = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            whole = torchs.full_tensor() if hasattr(torchs, "full_tensor") else torchs
            told = f"{float(whole):.4f}"
        except (RuntimeError, ValueError, NotImplementedError) as error:
            told = type(error).__name__
        return float(job.clip_grad_norm_(model, 1e9)), told


def averaged(options: dict[str, Any]) -> float:
    """`AveragedModel`: how far it is off the mean of the weights before and after a step."""
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model = job.build(seed=1)
        mean = torch.optim.swa_utils.AveragedModel(model)
        optimizer = job.optimizer(model)
        parameters = list(model.parameters())
        mean.update_parameters(model)
        before = [local_part(p).clone() for p in parameters]
        job.step(model, *mine(job, *batch()))
        optimizer.step()
        mean.update_parameters(model)
        pairs = zip(mean.module.parameters(), before, parameters, strict=True)
        worst = max(float((local_part(m) - (b + local_part(p)) / 2).abs().max()) for m, b, p in pairs)
        assert mean(mine(job, batch()[0])[0]).logits.isfinite().all()
        return worst
