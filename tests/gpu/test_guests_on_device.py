"""Guests, and homes that move, of two ranks on this machine's device. They share it, which NCCL refuses, so gloo takes
its place."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.plans import moe_plan
from support.ranks.guests import RandomGuests
from support.ranks.training import batches_of, own_part
from support.tables import each_row
from torch import Tensor

import moec
from moec.codegen.plan import Plan
from moec.runtime.weights.masters import local_part

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or AMD device")

STEPS = 8
MODEL = {"ranks": 2, "ep": 2, "batch": 8, "dim": 64, "expert": "swiglu(64)", "optimizer": "adamw(lr = 3e-3)"}


def train_as_rank(rank: int, port: int, plans: list[Plan], device: str, folder: str) -> None:
    """Writes the losses of each plan, and this rank's parameters, to a file."""
    given = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in given.items()})
    join = dist.init_process_group
    with (
        mock.patch.object(dist, "init_process_group", lambda _, **options: join("cpu:gloo,cuda:gloo", **options)),
        mock.patch("moec.runtime.job.job.PlacementPolicy", RandomGuests),
    ):
        torch.save([train(plan, device) for plan in plans], f"{folder}/{rank}.pt")


def train(plan: Plan, device: str) -> list[Tensor]:
    with moec.launch(plan, device=device) as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        losses, were_placed = [], False
        for batch in batches_of(plan.spec, STEPS):
            losses.append(job.step(model, *own_part(job, *(each.to(device) for each in batch))))
            were_placed |= any(
                layer.guests is not None or (layer.homes is not None and layer.homes.have_moved)
                for layer in model.layers[1:]
            )
            optimizer.step()
            optimizer.zero_grad()
        assert were_placed == (plan.spec.adapt is not None)
        job.restore_homes(model)
        return [torch.stack(losses).cpu(), *(local_part(p).detach().cpu().clone() for p in model.parameters())]


@each_row(
    ("adapt", "dtype", "bound"),
    [
        ("[greedy(), replicate(4)]; clock = false", "fp32", 1e-4),
        ("replicate(4)", "fp32", 1e-4),
        ("greedy(); clock = false", "bf16", 0.0),
    ],
)
def test_ranks_with_other_places_in_every_step_train_as_without(
    adapt: str, dtype: str, bound: float, tmp_path: Path
) -> None:
    plans = [moe_plan(**MODEL, dtype=dtype), moe_plan(**MODEL, dtype=dtype, adapt=adapt)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(train_as_rank, (port, plans, "cuda", str(tmp_path)), 2)
    for rank in range(2):
        for theirs, ours in zip(*torch.load(tmp_path / f"{rank}.pt"), strict=True):
            assert float((ours - theirs).abs().max()) <= bound * float(theirs.abs().max())
