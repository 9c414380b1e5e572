"""What runs around products by a library: what the plan lists, and rows of no expert. `test_interpreted.py` runs it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.combinations import pairs
from torch import Tensor

import moec
from moec.codegen.kernels.around_shape import AroundShape
from moec.codegen.kernels.plan_kernels import kernels_of, products_of
from moec.codegen.kernels.product_shapes import ProductShape
from moec.codegen.kernels.stored_tiles import Entry, StoredTiles
from moec.codegen.kernels.tiles import KERNELS, Tile, Ways
from moec.codegen.plan import Plan
from moec.runtime.backends import BackendError
from moec.runtime.backends.triton import triton_backend
from moec.runtime.backends.triton.libraries import library_grouped_mm
from moec.runtime.backends.triton.triton_launch import Kernels
from moec.runtime.backends.triton.triton_modules import kernels_in
from moec.runtime.backends.triton.triton_tiles import target_at

TEXT = """
device "toy" { kind = cuda; memory = 80GB; bandwidth = 1TB/s; peak { fp32 = 1TFLOPS; bf16 = 1TFLOPS } }
model "tiny" {
  vocab = 8; dim = 8; depth = 1; dtype = fp32
  layers { attention = mha(heads = 2); moe { experts = 4 * swiglu(8, BIAS); gate = topk(2) } }
}
cluster "two" { device = "toy"; level "process" { size = 2 } }
train { batch = 2; sequence = 4; optimizer = adamw(lr = 1e-2) }
parallel { ep = 2 }
"""

ALL = Ways(*("grouped_mm" for _ in KERNELS))
OURS = Tile(16, 16, 16, 4, 2)
MIXES = {"none of ours": ALL, **{f"{kernel} ours": ALL.with_way(kernel, OURS) for kernel in KERNELS}}


OF_OTHERS = {"count", "scan", "rank", "invert", "combine", "add_parts", "add_rows", "table", "order"}
"""Kernels that choose, count and place rows, which run in any way."""


@pytest.fixture(autouse=True)
def _as_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """`MOEC_BACKEND=triton`, with which the interpreter's tests run, would force our products."""
    monkeypatch.delenv("MOEC_BACKEND", raising=False)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The kernels of experts that are launched from now on."""
    found: set[str] = set()
    launch = Kernels.launch

    def noted(kernels: Kernels, kernel: str, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
        found.update({kernel} - OF_OTHERS)
        launch(kernels, kernel, grid, *arguments, **options)

    monkeypatch.setattr(Kernels, "launch", noted)
    return found


def plan_of(ep: int, bias: bool, ways: Ways) -> Plan:
    """A plan whose tiles say so."""
    text = TEXT.replace("BIAS", f"bias = {str(bias).lower()}").replace("ep = 2", f"ep = {ep}")
    plan = moec.compile(text if ep == 2 else text.replace("size = 2", "size = 1"))
    (products,) = products_of(plan)
    stored = StoredTiles(device="interpreter", triton=None, entries=(Entry.of(products.key, ways, None),))
    return replace(plan, tiles=stored)


def run_experts(ep: int, bias: bool, ways: Ways) -> list[Tensor]:
    """Experts of the plan, forward and backward."""
    experts, settings = 4 // ep, (None, None, str(ways))
    up, down = torch.randn(experts, 2, 8, 8), torch.randn(experts, 8, 8)
    biases = (torch.randn(experts, 2, 8), torch.randn(experts, 8)) if bias else (None, None)
    of_experts = (up, down, *biases)
    if ep == 1:
        x, weights = torch.randn(1, 4, 8), torch.rand(1, 4, 2)
        choices = torch.tensor([[[0, 1], [1, 3], [-1, 2], [3, -1]]])
        mixed, *saved = triton_backend.mixture_mlp(x, choices, weights, *of_experts, "swiglu", *settings)
        counts, hidden, *others = saved
        given = (mixed, x, hidden, counts, *others, weights, *of_experts, "swiglu", *settings)
        return [mixed, *triton_backend.mixture_mlp_backward(*given)]
    rows, counts, weights = torch.randn(8, 8), torch.tensor([[3, 1], [0, 4]]), torch.rand(8)
    out, hidden, table = triton_backend.expert_mlp(rows, counts, *of_experts, weights, "swiglu", *settings)
    saved = (hidden, table, counts, *of_experts, weights, "swiglu", *settings)
    return [out, *triton_backend.expert_mlp_backward(out, rows, *saved)]


@pytest.mark.parametrize(("mix", "ep", "bias"), pairs(list(MIXES), [1, 2], [False, True]))
def test_a_plan_lists_what_runs_around_products_by_a_library(mix: str, ep: int, bias: bool, launched: set[str]) -> None:
    listed = [
        kernel
        for kernel in kernels_of(plan_of(ep, bias, MIXES[mix]), target_at(torch.device("cpu")))
        if isinstance(kernel.shape, ProductShape | AroundShape)
    ]
    run_experts(ep, bias, MIXES[mix])
    assert launched == {name for kernel in listed for name, _ in kernels_in(kernel.shape, kernel.launched)}


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biases"])
def test_rows_past_the_last_offset_reach_no_result(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the eight choices are dropped, so that two rows are nobody's; there memory holds NaN."""
    exact = library_grouped_mm.grouped_mm

    def poisoned(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        out = exact(left, right, offs=offs)
        if right.dim() == 3:
            out[int(offs[-1]) :] = torch.nan
        return out

    def filled(self: Tensor, *size: object, **options: object) -> Tensor:
        made = new_empty(self, *size, **options)
        return made.fill_(torch.nan) if made.dtype.is_floating_point else made

    new_empty = Tensor.new_empty
    torch.manual_seed(0)
    expected = run_experts(1, bias, ALL)
    monkeypatch.setattr(library_grouped_mm, "grouped_mm", poisoned)
    monkeypatch.setattr(Tensor, "new_empty", filled)
    torch.manual_seed(0)
    for result, other in zip(run_experts(1, bias, ALL), expected, strict=True):
        assert torch.equal(result, other)


def test_a_library_by_name_refuses_what_it_cannot_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEC_BACKEND", "grouped_mm")
    ours = Ways(*(OURS for _ in KERNELS))
    assert all(result.isfinite().all() for result in run_experts(2, False, ours))  # by the library
    x, choices, weights = torch.randn(1, 2, 6), torch.zeros(1, 2, 1, dtype=torch.int64), torch.rand(1, 2, 1)
    matrices = torch.randn(2, 2, 8, 6), torch.randn(2, 6, 8)
    with pytest.raises(BackendError, match=r"MOE0707.*grouped_mm needs widths that are multiples of 4 in fp32, not 6"):
        triton_backend.mixture_mlp(x, choices, weights, *matrices, None, None, "swiglu")
    doubles = [given.double() for given in (x, weights, *matrices)]
    with pytest.raises(BackendError, match=r"MOE0707.*grouped_mm does not support fp64"):
        triton_backend.mixture_mlp(doubles[0], choices, *doubles[1:], None, None, "swiglu")
