"""Faults of other projects' kernels, each by its name: ours do not have them, and would be found with them.

`test_interpreted.py` runs this file, in its own process. The fault is then planted in the rendered text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from given_experts import choices_with, memory_full_of_nan, of_rows, of_tokens
from support.combinations import some
from torch import Tensor
from triton.runtime import interpreter

from moec.codegen.kernels.kernel_shape import render
from moec.runtime import ops
from moec.runtime.backends.triton import triton_launch, triton_modules
from moec.runtime.backends.triton.libraries import library_grouped_mm
from moec.runtime.backends.triton.triton_launch import Kernels

EMPTY = [[5, 0, 0, 40, 0]]
SOURCES = [[2, 0, 1], [1, 0, 70]]


def an_empty_expert() -> None:
    """torchtitan #1166: a grouped product with an empty expert hung, or left its gradient undefined."""
    with memory_full_of_nan():
        for counts in (EMPTY, SOURCES):
            of_rows(counts, bias=True, weighted=True).require_right()
        of_tokens(choices_with(EMPTY[0], 3), 5, bias=True).require_right()


def no_rows() -> None:
    """xtuner #1799, NeMo Automodel #2995: without rows, backward failed, or only expert 0 had a gradient."""
    with memory_full_of_nan():
        for counts in ([[0, 0, 0]], [[0, 0], [0, 0]]):
            given = of_rows(counts, bias=True, weighted=True)
            found = given.run()
            assert all(not found[name].any() for name in ("up", "down", "up_bias", "down_bias"))
        dropped = of_tokens(torch.full((1, 6, 2), -1), 4, bias=True)
        assert not any(value.any() for value in dropped.run().values())


def a_second_backward() -> None:
    """PyTorch #193633: rows past the last offset are undefined; at the second backward 0 × NaN is NaN."""
    with memory_full_of_nan():
        choices = choices_with([33, 0, 20, 7], 2)
        choices[0, ::3, 1] = -1  # as many last rows of hidden belong to no expert
        for given in (of_tokens(choices, 4, bias=True), of_rows(SOURCES, weighted=True)):
            first, second = given.runs(2)
            given.require_right(first)
            assert all(torch.equal(first[name], second[name]) for name in first)


def the_bias_of_down() -> None:
    """NeMo Automodel #2591: down's bias was added once per choice, not weighted by the gate."""
    of_rows([[3, 1, 4]], bias=True, weighted=True).require_right()
    of_tokens(choices_with([3, 1, 4], 2), 3, bias=True).require_right()


def repeats() -> None:
    """maxtext fd2ff2b: a backward for permutations was given indices with repeats."""
    of_tokens(torch.tensor([[[1, 1], [0, 1], [2, 2]]]), 3).require_right()


def sums_over_experts() -> None:
    """VeOmni #670: the sum over a token's experts was rounded after each of them."""
    terms = torch.tensor([2048.0, *[1.0] * 7], dtype=torch.float16)
    positions = torch.arange(8).view(1, 1, 8)
    summed = ops.sum_rows(terms[:, None].contiguous(), positions, torch.ones(1, 8, dtype=torch.int64))
    combined = ops.combine(terms[:, None].contiguous(), positions, torch.ones(1, 1, 8))
    assert summed.item() == combined.item() == 2056.0  # 2,055 in fp16; 2,048 if each term is rounded


def slots_of_padding() -> None:
    """TransformerEngine #2026: the slots that nobody takes were not zeroed."""
    x, experts = torch.randn(2, 5, 7), torch.randint(3, (2, 5, 2), generator=torch.Generator().manual_seed(0))
    with memory_full_of_nan():
        starts = ops.queue_starts(ops.count_queues(experts, 3), 0)
        rows, counts, _ = ops.permute_padded(x, experts, starts, None, 1, 1, 1, 1, 1, 0, 1)
    taken = torch.arange(rows.shape[1])[None, :] < counts.clamp(max=rows.shape[1]).flatten()[:, None]
    assert 0 < taken.sum() < taken.numel()
    assert not rows[~taken].any()


def races() -> None:
    """TransformerEngine #2921: programs raced for the gradient of a bias. No two of ours write one number."""
    with one_writer_each():
        of_rows([[20, 0, 30]], 72, 68, bias=True, weighted=True).run()
        of_rows([[7, 0, 9], [10, 1, 0]], 72, 68, bias=True, weighted=True).run()
        of_tokens(choices_with([10, 0, 20], 2), 3, 72, 68, bias=True).run()


@contextmanager
def one_writer_each() -> Iterator[None]:
    """Requires of every launch that none of its programs stores a number that another, or itself, has stored."""
    stored: list[np.ndarray] = []
    store, launch = interpreter.InterpreterBuilder.create_masked_store, Kernels.launch

    def noted(builder: object, pointers: Any, value: Any, mask: Any, *rest: object) -> object:
        stored.append(pointers.data[mask.data])
        return store(builder, pointers, value, mask, *rest)

    def launched(kernels: Kernels, kernel: str, *arguments: Any, **options: Any) -> None:
        stored.clear()
        launch(kernels, kernel, *arguments, **options)
        places = np.concatenate(stored) if stored else np.empty(0)
        assert len(np.unique(places)) == len(places), kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_masked_store", noted)
        patch.setattr(Kernels, "launch", launched)
        yield


@dataclass(frozen=True, slots=True)
class Fault:
    """A check that fails with the fault, and the fault: what to replace in rendered text, in some kernel."""

    check: Callable[[], None]
    old: str
    new: str


FAULTS = {
    "a grouped product with an empty expert": Fault(
        an_empty_expert, r"( +)(first, last = .*\n)", r"\1\2\1if first == last:\n\1    return\n"
    ),
    "without rows only expert 0 has a gradient": Fault(
        no_rows, r"( +)(first, last = .*\n)", r"\1\2\1if first == last:\n\1    return\n"
    ),
    "rows past the last offset are NaN at the second backward": Fault(
        a_second_backward, r"(tl\.load\(\w+_ptr \+ (?:left|right)_at), mask=there.*?, other=0\.0\)", r"\1)"
    ),
    "the bias of down is not weighted by the gate": Fault(
        the_bias_of_down, r"( +out \+= .*\n)( +out \*= .*\n)", r"\2\1"
    ),
    "a custom backward for permutations gets repeats": Fault(repeats, r"total \+= (tl\.load\(rows_ptr)", r"total = \1"),
    "a sum over experts in 16 bits": Fault(
        sums_over_experts, r"total \+= (.*)\n", r"total = (total + \1).to(tl.float16).to(tl.float32)\n"
    ),
    "slots of padding are not zeroed": Fault(slots_of_padding, r"rows, rows % num_places >= counts", "rows, rows < 0"),
    "a race for the gradient of a bias": Fault(races, r"program_id\(0\) \* BB", r"program_id(0) * (BB // 2)"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_kernels_do_not_have_the_fault(name: str) -> None:
    FAULTS[name].check()


OF_EXPERTS = [name for name, fault in FAULTS.items() if fault.check not in (sums_over_experts, slots_of_padding)]


@pytest.mark.parametrize(
    "name", some(OF_EXPERTS, [name for name in OF_EXPERTS if FAULTS[name].check not in (an_empty_expert, races)])
)
def test_kernels_around_a_library_do_not_have_the_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEC_BACKEND", "grouped_mm")
    computed = []
    grouped_mm = library_grouped_mm.grouped_mm

    def undefined_past_the_last_offset(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        """As on a device, where nothing writes these rows."""
        out = grouped_mm(left, right, offs=offs)
        if out.dim() == 2:
            out[int(offs[-1]) :] = torch.nan
        computed.append(out)
        return out

    monkeypatch.setattr(library_grouped_mm, "grouped_mm", undefined_past_the_last_offset)
    FAULTS[name].check()
    assert computed or FAULTS[name].check is no_rows


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_found_if_it_is_planted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, planted = FAULTS[name], []

    def faulty(shape: object) -> str:
        text, number = re.subn(fault.old, fault.new, render(shape))
        planted.append(number)
        return text

    monkeypatch.setattr(triton_modules, "render", faulty)
    forget_kernels()
    try:
        with pytest.raises(AssertionError):
            fault.check()
        assert sum(planted), f"no rendered kernel has `{fault.old}`"
    finally:
        forget_kernels()


def forget_kernels() -> None:
    """Kernels are rendered again when they are next launched."""
    triton_modules.module_of.cache_clear()
    triton_launch.kernels_of_shape.cache_clear()
