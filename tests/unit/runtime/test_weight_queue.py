"""A backward pass in two parts gives the gradients of a whole one, whatever else runs through its graph."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import moec.runtime.ops  # noqa: F401  (registers torch.ops.moec.*)
from moec.runtime.model.split_products import linear
from moec.runtime.weight_queue import WeightQueue, _Unit

moe = torch.ops.moec


def parameters(frozen: int | None = None) -> list[nn.Parameter]:
    """A norm, a dense matrix with a bias, experts' up and down, and one matrix for each expert with a bias."""
    draw = torch.Generator().manual_seed(0)
    shapes = (6,), (6, 6), (6,), (3, 2, 5, 6), (3, 6, 5), (3, 6, 6), (3, 6)
    made = [nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=draw)) for shape in shapes]
    if frozen is not None:
        made[frozen].requires_grad_(False)
    return made


def run(x: Tensor, weights: list[Tensor], note: Callable[[Tensor, Tensor], Tensor] = lambda x, y: y) -> Tensor:
    """Dense products, of which the matrix is used twice, and both kinds of experts; `note` may replace a product."""
    norm, dense, bias, up, down, own, own_bias = weights
    counts = torch.tensor([[3, 0, 5]])
    normed = x * norm
    y = linear(normed, dense, bias) + linear(x, dense.t())
    y = note(normed, y)
    experts, *_ = moe.expert_mlp(y, counts, up, down, None, None, None, "swiglu")
    return moe.expert_linear(experts, counts, own, own_bias).sin().sum()  # type: ignore[no-any-return]


def in_two_parts(given: list[nn.Parameter], note: Callable[[Tensor, Tensor], Tensor] = lambda x, y: y) -> Tensor:
    """The gradient of x; those of parameters are in `grad`."""
    x = rows()
    queue = WeightQueue()
    with queue.forward():
        loss = run(x, list(queue.split("all", given)), note)
    queue.to_inputs([loss], None)
    assert all(parameter.grad is None for parameter in given)
    queue.to_weights()
    assert x.grad is not None
    return x.grad


def rows() -> Tensor:
    return torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()


def require_equal(given: list[nn.Parameter], grad_x: Tensor, frozen: int | None = None) -> None:
    x, whole = rows(), parameters(frozen)
    run(x, list(whole)).backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    torch.testing.assert_close(grad_x, x.grad)
    for one, other in zip(given, whole, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("frozen", [None, 0, 1, 3, 5, 6])
def test_both_parts_give_the_gradients_of_a_whole_pass(frozen: int | None):
    given = parameters(frozen)
    require_equal(given, in_two_parts(given), frozen)


def test_gradients_that_a_hook_computes_for_itself_are_not_added():
    def note(x: Tensor, y: Tensor) -> Tensor:
        noted = y * 1
        noted.register_hook(lambda grad: found.extend(torch.autograd.grad(y, x, grad, retain_graph=True)))
        return noted

    found = list[Tensor]()
    given = parameters()
    require_equal(given, in_two_parts(given, note))
    assert len(found) == 1


def test_a_backward_pass_of_a_hook_takes_no_products_of_others():
    def run_two(first: Tensor, second: Tensor, x: Tensor) -> Tensor:
        early = linear(x, first)
        middle = early * 1
        late = linear(middle, second)
        figure = early.square().sum()
        middle.register_hook(lambda _: figure.backward(retain_graph=True))
        return late.sum()

    def matrices() -> list[nn.Parameter]:
        return [nn.Parameter(torch.eye(6, dtype=torch.float64) * number) for number in (2, 3)]

    whole, given, queue = matrices(), matrices(), WeightQueue()
    run_two(*whole, rows()).backward()  # type: ignore[no-untyped-call]
    with queue.forward():
        (first,), (second,) = (queue.split(name, [matrix]) for name, matrix in zip("ab", given, strict=True))
        loss = run_two(first, second, rows())
    queue.to_inputs([loss], None)
    queue.to_weights()
    for one, other in zip(given, whole, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_pass_without_gradients_is_not_cut():
    queue, given = WeightQueue(), parameters()
    with queue.forward(), torch.no_grad():
        assert queue.split("all", given) is given


def test_what_waits_is_freed_when_a_step_ends_early():
    given, queue = parameters(), WeightQueue()
    with queue.forward():
        loss = run(rows(), list(queue.split("all", given)))
    queue.to_inputs([loss], None)
    queue.drop()
    del queue, loss
    gc.collect()
    assert not [thing for thing in gc.get_objects() if isinstance(thing, _Unit)]
