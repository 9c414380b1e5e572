"""Training runs that the tests compare: as one rank of a plan, and unsharded."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from support.plans import moe_plan, moe_spec
from support.ranks.gloo_pool import GlooPool
from support.ranks.torch_optimizers import torch_optimizers
from support.session import extent
from torch import Tensor, nn

import moec
from moec.codegen.plan import Plan
from moec.grammar.spec import Spec
from moec.passes.ir import local_slices
from moec.runtime.host.reference import reference
from moec.runtime.job.job import Job
from moec.runtime.weights.masters import local_part

STEPS = 8 if extent.everything else 4
"""Steps of a run: more than three, so that the last one sees a batch again (`batches`)."""
MAX_NORM = 0.5
TOLERANCE = 1e-4
# At larger rates AdamW makes whole steps of gradients that are rounding noise: with lr = 1e-2 curves part at step 10,
# by 1.6e-3; with eps = 1e-5 beside it they do not (2e-6). That is no property of the sharding.


def batches(vocab: int, batch: int, sequence: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    """The same few batches again and again, so that the loss falls; one label in ten ignored."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(3):
        tokens = torch.randint(vocab, (batch, sequence), generator=generator)
        labels = torch.randint(vocab, (batch, sequence), generator=generator)
        labels[torch.rand(batch, sequence, generator=generator) < 0.1] = -100
        found.append((tokens, labels))
    return [found[step % 3] for step in range(steps)]


def batches_of(spec: Spec, steps: int) -> list[tuple[Tensor, Tensor]]:
    """`batches` of the file's sizes."""
    assert spec.train is not None
    return batches(spec.model.vocab, spec.train.batch, spec.train.sequence, steps)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """This rank's parts of the gradients, by the parameters' names."""
    return {name: local_part(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def share(tensor: Tensor, sizes: Sequence[int] | None, rank: int, ranks: int) -> Tensor:
    """A rank's sequences: an equal part, or `sizes` many."""
    return tensor.split(list(sizes))[rank] if sizes else tensor.chunk(ranks)[rank]


def own_part(job: Job, *tensors: Tensor) -> list[Tensor]:
    """This rank's sequences of each: an equal part."""
    return [share(tensor, None, job.data_rank, job.data_size) for tensor in tensors]


def train_as_rank(plan: Plan, steps: int, sizes: Sequence[int] | None = None, compiled: str = "") -> dict[str, Any]:
    """Trains as this process's rank of a plan.

    Gives the curve, gradient norms, loads, the first step's gradients, final parameters and logits. `compiled` names a
    backend of `torch.compile`.
    """
    losses, norms, loads, drops = [], [], [], []
    gradients: dict[str, Tensor] = {}
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        if compiled:
            # Dynamo checks for this and hides the warning.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            torch._dynamo.reset()
            model.compile(fullgraph=True, backend=compiled, dynamic=True)
        optimizer = job.optimizer(model)
        for tokens, labels in batches_of(plan.spec, steps):
            mine = [share(t, sizes, job.data_rank, job.data_size) for t in (tokens, labels)]
            losses.append(job.step(model, *mine).item())
            if not gradients:
                job.restore_homes(model)
            gradients = gradients or {name: gradient.clone() for name, gradient in gradients_of(model).items()}
            norms.append(job.clip_grad_norm_(model, MAX_NORM).item())
            loads.append(job.expert_loads(model))
            drops.append(job.drop_rates(model))
            optimizer.step()
            optimizer.zero_grad()
        job.restore_homes(model)  # a pass before the next step: no guest counts, for their homes have changed
        logits = job.whole_logits(model(mine[0]))
    parameters = {name: local_part(p).clone() for name, p in model.named_parameters()}
    return {
        "losses": losses,
        "norms": norms,
        "loads": loads,
        "drops": drops,
        "gradients": gradients,
        "parameters": parameters,
        "logits": logits.detach(),
    }


def train_unsharded(spec: Spec, steps: int) -> dict[str, Any]:
    """The same training of the reference module, in this process."""
    assert spec.train is not None
    model = reference(spec, seed=1)
    named = dict(model.named_parameters())
    optimizers = torch_optimizers(spec.train.optimizer, named)
    losses, norms = [], []
    gradients: dict[str, Tensor] = {}
    for tokens, labels in batches_of(spec, steps):
        loss = model(tokens, labels).loss
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
        norms.append(torch.nn.utils.clip_grad_norm_(named.values(), MAX_NORM).item())
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    parameters = {n: p.detach() for n, p in named.items()}
    logits = model(tokens).logits.detach()
    return {"losses": losses, "norms": norms, "gradients": gradients, "parameters": parameters, "logits": logits}


@cache
def unsharded(steps: int = STEPS, **options: Any) -> dict[str, Any]:
    """`train_unsharded` of `moe_text(**options)`, computed once for all degrees."""
    return train_unsharded(moe_spec(**options), steps)


def require_same_training(
    results: Sequence[dict[str, Any]], expected: dict[str, Any], plan: Plan, sizes: Sequence[int] | None = None
) -> None:
    """Fails unless all ranks have the unsharded model's curve, norms, gradients, parameters and logits."""
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE)
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-3)
    require_learning(expected["losses"])
    for rank, result in enumerate(results):
        number = plan.data_rank(rank)
        logits = share(expected["logits"], sizes, number, plan.data_size)
        torch.testing.assert_close(result["logits"], logits, rtol=1e-2, atol=1e-3)
        gradients = parts_of_rank(plan, expected["gradients"], rank)
        assert result["gradients"].keys() == gradients.keys()
        largest = max(float(gradient.abs().max()) for gradient in expected["gradients"].values())
        for name, gradient in gradients.items():
            found = result["gradients"][name]
            torch.testing.assert_close(found, gradient, rtol=0, atol=2e-5 * largest, msg=_of(name, rank))
        for name, value in parts_of_rank(plan, expected["parameters"], rank).items():
            torch.testing.assert_close(result["parameters"][name], value, rtol=1e-2, atol=1e-3, msg=_of(name, rank))


def require_the_unsharded_training(
    gloo: GlooPool, model: dict[str, Any], degrees: dict[str, Any], sizes: list[int] | None = None
) -> list[dict[str, Any]]:
    """What all ranks find; fails where it is not what the unsharded model finds."""
    options = {"batch": 8, "optimizer": "adamw(lr = 3e-3)", **model}
    plan = moe_plan(**{**options, **degrees})
    results = gloo.run(plan.world_size, train_as_rank, plan, STEPS, sizes)
    require_same_training(results, unsharded(**options), plan, sizes)
    return results


def require_learning(losses: Sequence[float]) -> None:
    """Fails where the last batch's loss has not fallen by far more than `TOLERANCE`: equal curves would prove nothing.

    Three batches take turns: runs of less than four steps are not looked at.
    """
    fallen = 0.1 if len(losses) >= 8 else 100 * TOLERANCE
    assert len(losses) < 4 or losses[-1] < losses[(len(losses) - 1) % 3] - fallen, "the run learns nothing"


def _of(name: str, rank: int) -> Any:
    return lambda text: f"{name} on rank {rank}: {text}"


def parts_of_rank(plan: Plan, whole: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """A rank's parts of whole tensors, by the layouts of the masters."""
    found = {}
    for name, tensor in whole.items():
        data = plan.parameters[name]
        found[name] = tensor[local_slices(data.shape, data.master, plan.meshes[data.mesh], rank)]
    return found
