"""Parameters that a script computes anew for each pass, as by a parametrization whose factor changes."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
from support.plans import moe_plan
from support.ranks.gloo_pool import GlooPool
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrize

import moec
from moec.codegen.plan import Plan
from moec.runtime.errors import JobError
from moec.runtime.host.reference import reference
from moec.runtime.weights.gathering import Snapshot

FACTORS = (1.0, 3.0)
WEIGHT = "layers.0.attention.q.parametrizations.weight.original"


class Scaled(nn.Module):
    """A parametrization by a factor, which is set before each pass."""

    factor = 1.0

    def forward(self, weight: Tensor) -> Tensor:
        return weight if self.factor == 1.0 else weight * self.factor


def scaled(model: nn.Module) -> Scaled:
    scale = Scaled()
    parametrize.register_parametrization(model.get_submodule("layers.0.attention.q"), "weight", scale)
    return scale


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(32, (8, 9), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def sharded_gradient(plan: Plan) -> Tensor:
    """The gradient of a step of two micro-batches, each with another factor."""
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        scale, factors = scaled(model), cycle(FACTORS)
        model.register_forward_pre_hook(lambda *_: setattr(scale, "factor", next(factors)))
        tokens, labels = (part.chunk(plan.data_size)[job.data_rank] for part in batch())
        job.step(model, tokens, labels, loss=summed_loss, microbatches=2)
        gradient = dict(model.named_parameters())[WEIGHT].grad
        assert gradient is not None
        return gradient.full_tensor()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("zero", range(4))
def test_each_micro_batch_has_the_gradient_of_its_own_parametrization(gloo: GlooPool, zero: int):
    plan = moe_plan(ranks=2, ep=2, zero=zero, batch=8, balance="[]")
    model = reference(plan.spec, seed=1)
    scale = scaled(model)
    for index, scale.factor in enumerate(FACTORS):
        tokens, labels = (
            torch.cat([rank.tensor_split(2)[index] for rank in part.chunk(plan.data_size)]) for part in batch()
        )
        (summed_loss(model(tokens).logits, labels) / batch()[1].numel()).backward()
    expected = dict(model.named_parameters())[WEIGHT].grad
    assert expected is not None
    for gradient in gloo.run(2, sharded_gradient, plan):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


def replaced_in_a_step(plan: Plan) -> str:
    """The error of a step whose second micro-batch has another parameter, which must not get the first's gradient."""
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        module, calls = model.get_submodule("layers.0.attention.q"), iter(range(2))

        def replace(*_: object) -> None:
            if next(calls):
                module.weight = nn.Parameter(module.weight.detach() * 3)

        model.register_forward_pre_hook(replace)
        tokens, labels = (part.chunk(plan.data_size)[job.data_rank] for part in batch())
        with pytest.raises(JobError) as raised:
            job.step(model, tokens, labels, microbatches=2)
        return str(raised.value)


def test_a_parameter_that_is_replaced_between_micro_batches_is_refused(gloo: GlooPool):
    for message in gloo.run(2, replaced_in_a_step, moe_plan(ranks=2, ep=2, zero=1, batch=8, balance="[]")):
        assert "MOE0713" in message
        assert "was replaced, parametrized or given a hook between the micro-batches" in message


def test_another_tensor_at_the_same_address_is_another_parameter():
    """A step may keep weights of tensors that are gone, whose memory new ones have."""
    weight = torch.zeros(3)
    taken = Snapshot([weight])
    assert taken.is_of([weight])
    assert not taken.is_of([weight.detach()])
    weight.add_(1)
    assert taken.has_changed
    assert not taken.is_of([weight])
    of_view = Snapshot([weight.view_as(weight)])  # the view is gone
    weight.add_(1)
    assert of_view.has_changed


def gradient_norm(plan: Plan, takes: bool) -> tuple[float, list[float]]:
    """The norm of a gradient after a step of two micro-batches, and those that the loss function `takes` for itself."""
    taken: list[float] = []
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        weight = model.head.weight

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            summed = summed_loss(logits, labels)
            if takes:
                (gradient,) = torch.autograd.grad(summed, weight, retain_graph=True)
                taken.append(float(gradient.full_tensor().norm()))
            return summed

        tokens, labels = (part.chunk(plan.data_size)[job.data_rank] for part in batch())
        job.step(model, tokens, labels, loss=loss, microbatches=2)
        return float(weight.grad.full_tensor().norm()), taken


@pytest.mark.parametrize("zero", [0, 2])
def test_gradients_that_a_loss_takes_are_no_part_of_the_step(gloo: GlooPool, zero: int):
    plan = moe_plan(ranks=2, ep=1, zero=zero)
    (norm, _), *_ = gloo.run(2, gradient_norm, plan, False)
    (norm_with_others, taken), *_ = gloo.run(2, gradient_norm, plan, True)
    assert norm_with_others == pytest.approx(norm, rel=1e-5)
    assert len(taken) == 2
    assert min(taken) > 0
