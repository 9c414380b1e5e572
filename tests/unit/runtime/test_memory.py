"""Large tensors on CPU: their memory is reused, and never while a tensor refers to it."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from moec.runtime import ops
from moec.runtime.backends.torch import torch_memory
from moec.runtime.backends.torch.torch_memory import POOL, Pool, new_empty


def address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def test_the_memory_of_a_tensor_that_ended_is_used_again() -> None:
    pool = Pool()
    first = pool.empty((3, 5), torch.float64)
    place = address(first)
    del first
    again = pool.empty((5, 3), torch.float64)
    assert address(again) == place
    assert again.shape == (5, 3)
    assert again.dtype == torch.float64


def test_a_view_keeps_the_memory() -> None:
    pool = Pool()
    first = pool.empty((4, 6), torch.float32).fill_(1)
    view = first[1:3].t()
    del first
    other = pool.empty((4, 6), torch.float32).fill_(2)
    assert address(other) != address(view)
    assert (view == 1).all()


def test_no_two_tensors_share_memory() -> None:
    pool = Pool()
    held: list[Tensor] = []
    for turn in range(200):
        held.append(pool.empty((10 + turn % 7,), torch.int64).fill_(turn))
        if turn % 3 == 2:
            held.pop(turn % len(held))
    assert len({address(x) for x in held}) == len(held)
    assert all((x == x[0]).all() for x in held)
    assert len({int(x[0]) for x in held}) == len(held)


def test_it_never_has_more_than_was_in_use_at_once() -> None:
    pool = Pool()
    most = 0
    for turn in range(100):
        held = [pool.empty((1 + (turn * 7 + i * 13) % 50,), torch.uint8) for i in range(1 + turn % 5)]
        most = max(most, pool.in_use)
        assert pool.in_use >= sum(x.numel() for x in held)
        assert pool.in_use + pool.waiting <= most
    held.clear()
    del held
    pool.empty((1,), torch.uint8)
    assert pool.waiting > 0


def test_a_block_serves_for_what_is_a_little_smaller_only() -> None:
    pool = Pool()
    sizes = [100, 90, 81, 79]
    places = [address(pool.empty((size,), torch.uint8)) for size in sizes[:3]]
    assert len(set(places)) == 1
    pool.empty((200,), torch.uint8)  # so that there is room for both
    held = pool.empty((79,), torch.uint8)
    assert pool.in_use == held.numel()


def test_what_waits_is_given_back_on_demand() -> None:
    pool = Pool()
    kept = pool.empty((8,), torch.uint8)
    pool.empty((9,), torch.uint8)
    pool.release()
    assert (pool.in_use, pool.waiting) == (kept.numel(), 0)


def test_threads_take_and_return_at_once() -> None:
    pool, wrong = Pool(), []

    def work(mark: int) -> None:
        for _ in range(300):
            mine = pool.empty((64,), torch.int64).fill_(mark)
            if not (mine == mark).all():
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("shape", [(0, 4), (2, 3)])
def test_small_tensors_are_torchs_own(shape: tuple[int, int]) -> None:
    before = POOL.in_use
    made = new_empty(torch.empty(0, dtype=torch.bfloat16), shape)
    assert (made.shape, made.dtype, POOL.in_use) == (shape, torch.bfloat16, before)


def test_gradients_of_experts_are_where_the_last_ones_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Live tensors are not overwritten."""
    monkeypatch.setattr(torch_memory, "LARGE", 0)
    monkeypatch.setattr(torch_memory, "POOL", Pool())
    x, up, down = torch.randn(1, 6, 8), torch.randn(4, 2, 16, 8), torch.randn(4, 8, 16)
    experts = torch.rand(1, 6, 4).argsort(-1)[..., :2].contiguous()
    weights = torch.rand(1, 6, 2)
    up.requires_grad_()

    def grad(times: float) -> Tensor:
        up.grad = None
        mixed, *_ = ops.mixture_mlp(x * times, experts, weights, up, down, None, None, "swiglu")
        mixed.sum().backward()
        assert up.grad is not None
        return up.grad

    first = grad(1)
    kept, place = first.clone(), address(first)
    other = grad(2)
    assert address(other) != place
    assert torch.equal(first, kept)
    del first
    assert address(grad(3)) == place
