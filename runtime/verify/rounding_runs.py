"""Runs for the measurement of rounding: the unsharded model in one dtype, and the loss of given logits."""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch import Tensor

from moec.codegen.plan import Plan
from moec.passes.ir import local_slices
from moec.runtime.backends import plain_torch
from moec.runtime.verify.cluster.lockstep import Lockstep, Watch
from moec.runtime.verify.cluster.prepared_graphs import Graphs
from moec.runtime.verify.cluster.recorded import FAILURES, BackwardError
from moec.runtime.verify.cluster.routes import Routes
from moec.runtime.verify.cluster.stage_values import StageValues
from moec.runtime.verify.distances import Part
from moec.runtime.verify.inputs import GlobalBatch

MARGIN = 10.0
"""The distance of a label's logit above the others in `confident_logits`, as in a model that has learned. There
`softmax - onehot` cancels, and a loss that rounds before it subtracts is far off; at a random start it is not."""


class UnshardedRun:
    """One run of the unsharded model, forward and backward, with gradients of the parameters `trained`."""

    def __init__(
        self,
        graphs: Graphs,
        parameters: Mapping[str, Tensor],
        states: Mapping[str, Tensor],
        routes: Routes,
        trained: Container[str],
        watch: Watch | None = None,
    ) -> None:
        self.routes = routes
        self._dtype = next(iter(parameters.values())).dtype
        self._leaves = {name: [p.clone().requires_grad_(name in trained)] for name, p in parameters.items()}
        weights = self._leaves.__getitem__
        self._lockstep = Lockstep(graphs, 1, {}, weights, states=states, routes=routes, watch=watch)

    def run(self, batch: GlobalBatch) -> None:
        """Runs over the batch. Sets `result`, `scalars` and `gradients`, in float64."""
        with plain_torch():
            extra_inputs = batch.extra_inputs_of_one_rank
            stage_values = StageValues(self._lockstep, [batch.inputs], [batch.targets], extra_inputs=extra_inputs)
            (loss,) = stage_values.only_loss()
            loss.backward()
        (result,) = stage_values.result
        self.result = result.detach().double()
        self.scalars = {name: float(scalar.detach()) for name, (scalar,) in stage_values.scalars.items()}
        self.gradients = {
            name: torch.zeros_like(p).double() if p.grad is None else p.grad.double()
            for name, (p,) in self._leaves.items()
            if p.requires_grad
        }
        if batch.inputs.grad is not None:
            self.gradients["x"] = batch.inputs.grad.double()

    def logits_gradient(self, batch: GlobalBatch, logits: Tensor) -> Tensor:
        """The gradient of the loss with respect to `logits`, in float64."""
        leaf = logits.to(self._dtype).requires_grad_()
        self._lockstep.loss([leaf], [batch.targets])[0].backward()
        assert leaf.grad is not None
        return leaf.grad.double()


def logits_gradients(plan: Plan, lockstep: Lockstep, batch: GlobalBatch, logits: Tensor) -> list[Part]:
    """The gradient of a plan's loss with respect to each rank's part of `logits`. Raises `BackwardError`."""
    layout, dense = plan.result_layout, plan.meshes["dense"]
    indices = [local_slices(logits.shape, layout, dense, rank) for rank in range(plan.stage_size)]
    leaves = [logits[index].clone().requires_grad_() for index in indices]
    losses = lockstep.loss(leaves, batch.rank_targets)
    try:
        torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])
    except FAILURES as error:
        raise BackwardError(f"the backward pass of the loss alone, which stopped: {error}") from error
    return [(i, torch.zeros_like(x) if x.grad is None else x.grad) for i, x in zip(indices, leaves, strict=True)]


def confident_logits(batch: GlobalBatch, vocab: int, dtype: torch.dtype) -> Tensor:
    """Logits `[batch, sequence, vocab]` of a model that has learned: most of the probability is the label's."""
    shape = (*batch.targets.shape, vocab)
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(vocab), dtype=torch.float64)
    margins = logits.new_full((*shape[:-1], 1), MARGIN)
    return logits.scatter_add(-1, batch.targets.clamp_min(0)[..., None], margins).to(dtype)
