"""The kernels that choose slots are those that a plan with guests lists. `test_interpreted.py` runs it."""

from __future__ import annotations

import pytest
import torch
from interpreted import GPU, HERE, TINY, Waits, noting, noting_launches

import moec
from moec.codegen.kernels.plan_kernels import kernels_of
from moec.codegen.kernels.row_shapes import QueuesShape, SlotsShape
from moec.runtime.backends.triton import triton_backend
from moec.runtime.backends.triton.triton_modules import kernels_in


def test_a_plan_with_guests_lists_the_kernels_that_choose_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    text = TINY.replace("device = cpu", 'device = "toy"') + "adapt { placement = replicate(slots = 2) }"
    shapes = {SlotsShape(experts=4, ranks=2, slots=3), QueuesShape(experts=4, k=1)}
    listed = {kernel.shape: kernel for kernel in kernels_of(moec.compile(GPU + text), HERE)}
    run, launched = noting(monkeypatch), noting_launches(monkeypatch)
    slots = torch.tensor([[[0, 1, 2], [2, 3, -1]], [[0, 0, 0]] * 2])
    with Waits() as waits:
        counts = triton_backend.count_queues(torch.tensor([[[0], [2], [2], [3]]]), 4).view(1, 4)
        triton_backend.assign_slots(torch.tensor([[[0, 2], [2, 3]]]), counts.expand(2, 4), slots, 0)
    assert run == shapes
    assert launched == {name for shape in shapes for name, _ in kernels_in(shape, listed[shape].launched)}
    assert waits.seen == []  # but for the copy of splits, which an interpreter does not show
