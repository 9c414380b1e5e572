"""Experts in parallel threads: each expert runs once, the same result for any number of threads, errors are raised."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from moec.runtime.backends.torch import torch_backend, torch_batches, torch_threads
from moec.runtime.backends.torch.torch_threads import each_expert

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _any_size_is_enough(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch_threads, "ENOUGH", 0)
    yield
    torch.set_num_threads(1)


class Seen:
    """The thread that computed each expert."""

    def __init__(self) -> None:
        self.by_thread: dict[int, list[int]] = {}
        self.begun = 0
        self.numbers: set[int] = set()
        self._lock = threading.Lock()

    def begin(self) -> Callable[[int], None]:
        self.begun += 1

        def compute(expert: int) -> None:
            torch.ones(2**17).add_(1)
            with self._lock:
                self.by_thread.setdefault(threading.get_ident(), []).append(expert)
                self.numbers.add(torch.get_num_threads())

        return compute

    @property
    def experts(self) -> list[int]:
        return sorted(expert for own in self.by_thread.values() for expert in own)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_expert_is_computed_once(threads: int) -> None:
    torch.set_num_threads(threads)
    for _ in range(3):
        seen = Seen()
        each_expert([100] * 24, 1, CPU, seen.begin)
        assert seen.experts == list(range(24))
        assert seen.begun == threads
        assert torch.get_num_threads() == threads
        assert seen.numbers == {1}
        assert (threading.get_ident() in seen.by_thread) == (threads == 1)


@pytest.mark.parametrize(
    ("sizes", "threads"),
    [
        ([100] * 8, 2),
        ([100, 0, 100, 0], 2),
        ([100, 0, 0, 0], 1),
        ([1000, 10, 10, 10], 1),
        ([0, 0], 1),
        ([], 1),
    ],
    ids=str,
)
def test_threads_share_products_where_experts_do_not_divide_evenly(sizes: list[int], threads: int) -> None:
    torch.set_num_threads(2)
    seen = Seen()
    each_expert(sizes, 1, CPU, seen.begin)
    assert seen.begun == threads
    assert seen.experts == list(range(len(sizes)))


def test_a_device_that_queues_its_work_has_one_thread() -> None:
    torch.set_num_threads(2)
    seen = Seen()
    each_expert([100] * 8, 1, torch.device("cuda"), seen.begin)
    assert seen.by_thread == {threading.get_ident(): list(range(8))}


def test_little_work_wakes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_threads, "ENOUGH", 1e6)
    torch.set_num_threads(2)
    begun = []
    for numbers in (100, 10_000):
        seen = Seen()
        each_expert([100] * 8, numbers, CPU, seen.begin)
        begun.append(seen.begun)
    assert begun == [1, 2]


def test_what_a_thread_raises_is_raised_when_all_have_ended() -> None:
    torch.set_num_threads(2)
    ended: list[int] = []

    def compute(expert: int) -> None:
        if expert == 0:
            raise RuntimeError("expert 0 cannot be computed")
        ended.append(expert)

    with pytest.raises(RuntimeError, match="expert 0 cannot"):
        each_expert([100] * 16, 1, CPU, lambda: compute)
    assert sorted(ended) == list(range(1, 16))


CLOSE = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, torch.bfloat16: {"rtol": 0.0, "atol": 0.0}}


def results(activation: str, dtype: torch.dtype, biased: bool) -> list[Tensor]:
    """Forward and backward of a mixture with dropped choices: T 300, k 2, D 24, F 16, E 7."""
    torch.manual_seed(0)
    factor = 2 if activation == "swiglu" else 1
    x, up, down = torch.randn(1, 300, 24), torch.randn(7, factor, 16, 24), torch.randn(7, 24, 16)
    biases = (torch.randn(7, factor, 16), torch.randn(7, 24)) if biased else (None, None)
    experts = torch.rand(1, 300, 7).argsort(-1)[..., :2].contiguous()
    experts[0, ::11, 1] = -1
    x, up, down = (t.to(dtype) for t in (x, up, down))
    biases = tuple(None if b is None else b.to(dtype) for b in biases)
    weights = torch.rand(1, 300, 2)
    mixed, counts, hidden, positions, table = torch_backend.mixture_mlp(
        x, experts, weights, up, down, *biases, activation
    )
    grads = torch_backend.mixture_mlp_backward(
        torch.randn(1, 300, 24).to(dtype), x, hidden, counts, positions, table, weights, up, down, *biases, activation
    )
    return [mixed, counts, positions, *grads]


def results_of_sources(activation: str, dtype: torch.dtype, biased: bool) -> list[Tensor]:
    """Forward and backward of experts whose rows come from two ranks: R 350, D 24, F 16, E 7."""
    torch.manual_seed(0)
    factor = 2 if activation == "swiglu" else 1
    counts = torch.tensor([[20, 30, 0, 25, 25, 20, 30], [30, 20, 50, 25, 25, 30, 20]])
    rows, grad, up, down = (
        torch.randn(size).to(dtype) for size in ((350, 24), (350, 24), (7, factor, 16, 24), (7, 24, 16))
    )
    biases = (torch.randn(7, factor, 16).to(dtype), torch.randn(7, 24).to(dtype)) if biased else (None, None)
    weights = torch.rand(350)
    out, hidden, table = torch_backend.expert_mlp(rows, counts, up, down, *biases, weights, activation)
    grads = torch_backend.expert_mlp_backward(grad, rows, hidden, table, counts, up, down, *biases, weights, activation)
    return [out, hidden, *grads]


@pytest.mark.parametrize("results", [results, results_of_sources])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_experts_are_the_same_on_any_number_of_threads(
    results: Callable[[str, torch.dtype, bool], list[Tensor]],
    activation: str,
    dtype: torch.dtype,
    biased: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[int] = []
    number = torch_threads._threads
    monkeypatch.setattr(torch_threads, "EVEN", 2)
    monkeypatch.setattr(torch_batches, "BLOCK", 2 * 16 * 200)  # two experts in a batch

    def counted(sizes: Sequence[int], numbers: int) -> int:
        begun.append(number(sizes, numbers))
        return begun[-1]

    monkeypatch.setattr(torch_threads, "_threads", counted)
    torch.set_num_threads(1)
    alone = results(activation, dtype, biased)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        for own, expected in zip(results(activation, dtype, biased), alone, strict=True):
            # Not bit for bit: MKL's float32 sums depend on the alignment of a matrix.
            torch.testing.assert_close(own, expected, **CLOSE[dtype])
        assert begun[-2:] == [threads, threads]


def _in_child(answers: multiprocessing.Queue[bool]) -> None:
    seen = Seen()
    each_expert([100] * 8, 1, CPU, seen.begin)
    answers.put(seen.begun == 2 and seen.experts == list(range(8)))


def test_a_forked_child_has_threads_of_its_own() -> None:
    torch.set_num_threads(2)
    each_expert([100] * 8, 1, CPU, Seen().begin)
    fork = multiprocessing.get_context("fork")
    answers: multiprocessing.Queue[bool] = fork.Queue()
    child = fork.Process(target=_in_child, args=(answers,))
    child.start()
    assert answers.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0
