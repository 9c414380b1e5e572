"""Diagnostics of `moec.layer` that need a process group: each function causes one and returns it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from support.plans import layer_text

from moec.grammar.diagnostics import Diagnostic, DiagnosticError


@contextmanager
def process_group(backend: str, ranks: int) -> Iterator[None]:
    """A process group of torch that this process is rank 0 of; "fake" ones have no other process."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store = FakeStore() if backend == "fake" else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def raised(act: Callable[[], object]) -> Sequence[Diagnostic]:
    with pytest.raises(DiagnosticError) as error:
        act()
    return error.value.diagnostics


def layer_before_its_group() -> Sequence[Diagnostic]:
    import torch

    from moec.driver import layer

    made = layer(layer_text(ranks=None))
    with process_group("fake", 2):
        return raised(lambda: made(torch.ones(4, 16)))


def experts_in_a_file() -> Sequence[Diagnostic]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from moec.runtime.host.experts_of_rank import ExpertsOfRank

    with process_group("gloo", 1):
        experts = DTensor.from_local(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
        return raised(lambda: torch.save({"experts": ExpertsOfRank.of(experts)}, io.BytesIO()))


LAYER_EVENTS = {"MOE0745": layer_before_its_group, "MOE0746": experts_in_a_file}
