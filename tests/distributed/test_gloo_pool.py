"""The worker pool that the other tests in this folder use."""

from __future__ import annotations

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from support.ranks import gloo_pool
from support.ranks.gloo_pool import GlooPool, RankDiedError, RankHungError


def describe(suffix: str) -> tuple[int, int, str]:
    return dist.get_rank(), dist.get_world_size(), f"{os.environ['RANK']}{suffix}"


def process_id() -> int:
    return os.getpid()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("misplaced")
    dist.all_reduce(torch.ones(1))


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def die(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def warn() -> None:
    warnings.warn("beware", stacklevel=1)


def initialize_from_environment() -> tuple[bool, float]:
    before = dist.is_initialized()
    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    return before, x.item()


@pytest.fixture(scope="module")
def own_pool():
    """A pool that may be broken without slowing other tests down."""
    pool = GlooPool(size=2)
    yield pool
    pool.close()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_back_by_rank(gloo: GlooPool, world_size: int) -> None:
    assert gloo.run(world_size, describe, "!") == [(r, world_size, f"{r}!") for r in range(world_size)]


def test_processes_are_reused_between_jobs(gloo: GlooPool) -> None:
    assert gloo.run(2, process_id) == gloo.run(2, process_id)


def test_tensors_travel_both_ways(gloo: GlooPool) -> None:
    x = torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3)
    for result in gloo.run(2, torch.mul, x, 2):
        assert torch.equal(result, 2 * x)


def test_an_exception_is_raised_again_with_the_traceback_of_the_rank_that_failed_first(gloo: GlooPool) -> None:
    with pytest.raises(KeyError, match="misplaced") as caught:
        gloo.run(2, fail_on, 1)
    assert "in fail_on" in str(caught.value.__cause__)
    assert "raised on rank 1" in caught.value.__notes__
    assert gloo.run(2, describe, "") == [(0, 2, "0"), (1, 2, "1")]


def test_warnings_in_a_worker_are_errors(gloo: GlooPool) -> None:
    with pytest.raises(UserWarning, match="beware"):
        gloo.run(1, warn)


def test_a_function_may_initialize_from_the_environment_as_under_torchrun(gloo: GlooPool) -> None:
    for _ in range(2):
        assert gloo.run(2, initialize_from_environment, initialize=False) == [(False, 2.0)] * 2


def test_a_hang_names_the_ranks_and_where_they_hang_and_the_pool_recovers(own_pool: GlooPool) -> None:
    own_pool.run(2, describe, "")
    with pytest.raises(RankHungError, match=r"(?s)ranks \[0\] did not finish within 1 s.*in hang_on") as caught:
        own_pool.run(2, hang_on, 0, timeout=1.0)
    assert "rank 1" not in str(caught.value)
    assert own_pool.run(2, describe, "") == [(0, 2, "0"), (1, 2, "1")]


def test_a_death_is_reported_with_its_exit_code_and_the_pool_recovers(own_pool: GlooPool) -> None:
    with pytest.raises(RankDiedError, match="exit code 7"):
        own_pool.run(1, die, 0)
    assert own_pool.run(1, describe, "") == [(0, 1, "0")]


def test_no_process_is_left_when_the_pool_closes() -> None:
    pool = GlooPool(size=1)
    (pid,) = pool.run(1, process_id)
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_ranks_that_cannot_make_their_process_group_begin_again_once(
    own_pool: GlooPool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = own_pool.run(2, process_id)
    monkeypatch.setattr(gloo_pool, "ENTRY_SECONDS", 3.0)
    os.kill(before[1], signal.SIGSTOP)
    after = own_pool.run(2, process_id)
    assert not set(before) & set(after)
    assert "the ranks begin again" in capfd.readouterr().err
