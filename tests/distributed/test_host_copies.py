"""Copies of row counts to the host: one for each mixture, gathers included, and none in backward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.plans import moe_plan
from support.ranks.gloo_pool import GlooPool
from support.ranks.training import batches, own_part
from torch import Tensor
from torch.library import opcheck

import moec
from moec.codegen.plan import Plan
from moec.runtime.ops import ragged_collectives
from moec.runtime.ranks import groups

MIXTURES = 2
"""Layers of a plan that exchange rows."""

PLANS: dict[str, tuple[int, Callable[[], Plan]]] = {
    "ep": (2, lambda: moe_plan(ranks=2, ep=2)),
    "ep, recomputed": (2, lambda: moe_plan(ranks=2, ep=2, recompute="layer")),
    "etp": (2, lambda: moe_plan(ranks=2, ep=1, etp=2)),
    "ep and etp": (4, lambda: moe_plan(ranks=4, ep=2, etp=2)),
    "ep and etp, recomputed": (4, lambda: moe_plan(ranks=4, ep=2, etp=2, recompute="layer")),
}


@contextmanager
def copies_to_host() -> Iterator[list[int]]:
    """Notes how many tensors each copy brings. A conversion that reads any other tensor raises: it would wait."""
    tolist, noted, on_host = Tensor.tolist, list[int](), list[Tensor]()

    def kept(function: Callable[..., list[Tensor]], *arguments: Any) -> list[Tensor]:
        found = function(*arguments)
        on_host.extend(found)
        return found

    def noting(function: Callable[..., list[Tensor]], *tensors: Tensor) -> list[Tensor]:
        noted.append(len(tensors))
        return kept(function, *tensors)

    def reading(tensor: Tensor) -> Any:
        if sys._getframe(1).f_globals["__name__"] == ragged_collectives.__name__:
            storages = {each.untyped_storage().data_ptr() for each in on_host}
            assert tensor.untyped_storage().data_ptr() in storages, "reads what is not on the host"
        return tolist(tensor)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ragged_collectives, "to_host", partial(noting, ragged_collectives.to_host))
        patched.setattr(ragged_collectives, "_splits", partial(kept, ragged_collectives._splits))
        patched.setattr(Tensor, "tolist", reading)
        yield noted


def copies_of_a_step(name: str) -> tuple[list[int], list[int]]:
    """The tensors of each copy in a forward pass, and in the backward pass after it."""
    with moec.launch(PLANS[name][1](), device="cpu") as job, copies_to_host() as noted:
        model = job.build(seed=1)
        ((tokens, labels),) = batches(32, 8, 8, 1)
        loss = model(*own_part(job, tokens, labels)).loss
        forward = [*noted]
        assert loss is not None
        loss.backward()
        return forward, noted[len(forward) :]


@pytest.mark.parametrize("name", PLANS)
def test_rows_are_exchanged_after_one_copy_to_the_host_and_sent_back_without(gloo: GlooPool, name: str) -> None:
    ranks, _ = PLANS[name]
    sizes_at_once = 2 if name.startswith("ep and etp") else 1
    assert gloo.run(ranks, copies_of_a_step, name) == [([sizes_at_once] * MIXTURES, [])] * ranks


# ---- exchange_and_gather_counts ------------------------------------------------------------------------


def joined_and_apart(counts: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Each result of the joined conversion on this rank of ep 2 x etp 2, and of the two that it joins."""
    rank = dist.get_rank()
    own = counts[rank][None]
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    with groups.use({"ep": pairs[rank // 2], "etp": pairs[2 + rank % 2]}):
        received, splits = ragged_collectives.exchange_counts(own, "ep")
        all_counts, all_splits = ragged_collectives.gather_counts(received, "etp")
        joined = ragged_collectives.exchange_and_gather_counts(own, "ep", "etp")
        opcheck(ragged_collectives.exchange_and_gather_counts, (own, "ep", "etp"))
    return list(zip(joined, (received, all_counts, splits, all_splits), strict=True))


def test_both_conversions_of_counts_at_once_give_what_they_give_one_after_the_other(gloo: GlooPool) -> None:
    counts = torch.randint(0, 9, (4, 8), generator=torch.Generator().manual_seed(0))
    for rank, results in enumerate(gloo.run(4, joined_and_apart, counts)):
        assert all(torch.equal(joined, apart) for joined, apart in results)
        assert results[1][0].sum() == counts[:, 4 * (rank % 2) :][:, :4].sum()


def refused_at_once(counts: Tensor) -> str:
    with groups.use({"ep": dist.group.WORLD, "etp": dist.group.WORLD}):
        try:
            ragged_collectives.exchange_and_gather_counts(counts[dist.get_rank()][None], "ep", "etp", "layer 3")
        except RuntimeError as error:
            return str(error)
    return "nothing"


def test_counts_below_0_are_refused_by_the_ranks_that_send_or_get_them(gloo: GlooPool) -> None:
    found = gloo.run(2, refused_at_once, torch.tensor([[3, 1, 2, 2], [0, 2, 4, -1]]))
    assert found == [
        'moec::gather_counts: rank 0 counts -1 rows from rank 1 over "etp" in layer 3',
        'moec::exchange_counts: rank 1 counts -1 rows to rank 1 over "ep" in layer 3',
    ]
