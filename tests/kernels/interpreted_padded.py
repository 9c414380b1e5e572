"""Queues and padded rows of the Triton backend against the plain-torch ones. `test_interpreted.py` runs it."""

from __future__ import annotations

import random

import pytest
import torch
from interpreted import GPU, TINY, noting
from support.combinations import some
from torch import Tensor

import moec
from moec.codegen.kernels.plan_kernels import kernels_of
from moec.runtime.backends.torch import torch_backend
from moec.runtime.backends.triton import triton_backend
from moec.runtime.backends.triton.triton_tiles import target_at
from moec.runtime.ops import permute_weights


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    torch.manual_seed(0)


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3}


def close(ours: Tensor | tuple[Tensor, ...], exact: Tensor | tuple[Tensor, ...]) -> None:
    """Equal in shape and dtype, and in value to the dtype's bound, scaled by the largest."""
    pairs = [(ours, exact)] if isinstance(ours, Tensor) else zip(ours, exact, strict=True)
    for one, other in pairs:
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if not one.dtype.is_floating_point:
            assert torch.equal(one, other)
        elif one.numel():
            assert float((one - other).abs().max()) <= TOLERANCE[one.dtype] * max(1.0, float(other.abs().max()))


def chosen(batch: int, tokens: int, num_experts: int, k: int, skew: float = 0.0) -> Tensor:
    scores = torch.rand(batch, tokens, num_experts) + skew * torch.randn(num_experts)
    return scores.argsort(-1)[..., :k]


def both(name: str, *arguments: object) -> tuple[Tensor, ...]:
    """Compares with plain torch; returns plain torch's result."""
    ours, exact = (getattr(backend, name)(*arguments) for backend in (triton_backend, torch_backend))
    close(ours, exact)
    return (exact,) if isinstance(exact, Tensor) else exact


def agree_on_places(x: Tensor, experts: Tensor, num_experts: int, how: tuple[int, ...]) -> None:
    """Every operator of a layer with a capacity, each on plain torch's earlier results."""
    (counts,) = both("count_queues", experts, num_experts)
    (starts,) = both("queue_starts", counts, how[0])
    rows, counts, positions = both("permute_padded", x, experts, starts, *how)
    (kept,) = both("keep_choices", experts, starts, *how)
    (largest,) = both("largest_load", kept, num_experts)
    both("permute_dynamic", x, kept, largest, num_experts)
    agree_on_sums(torch.randn_like(rows), positions)
    (out,) = both("sum_rows", torch.randn_like(rows), positions, counts)
    both("sum_rows_backward", torch.randn_like(out), positions, counts, rows.shape[:2])


def agree_on_sums(rows: Tensor, positions: Tensor) -> None:
    """Rows' gradients and weighted sums: none reads an empty place."""
    weights = torch.rand(positions.shape, dtype=torch.promote_types(rows.dtype, torch.float32))
    both("permute_padded_backward", rows, positions)
    (out,) = both("combine_padded", rows, positions, weights)
    both("combine_padded_backward", torch.randn_like(out), rows, positions, weights)


# batch, tokens, experts, k, dim; groups, spread, parts, whole, least
LAYERS = {
    "uneven": ((2, 17, 6, 2, 5), (0, 1, 3, 4, 1)),
    "one group": ((2, 9, 6, 2, 5), (1, 2, 1, 2, 1)),
    "two groups": ((4, 6, 3, 2, 7), (2, 1, 1, 1, 1)),
    "many experts": ((1, 34, 130, 3, 3), (0, 1, 1, 2, 1)),
    "k is all": ((1, 9, 4, 4, 16), (0, 1, 1, 2, 1)),
    "one token": ((1, 1, 8, 2, 7), (0, 1, 1, 1, 1)),
    "no tokens": ((2, 0, 8, 2, 7), (0, 1, 1, 1, 1)),
    "no tokens, places all the same": ((2, 0, 8, 2, 7), (1, 1, 1, 1, 5)),
    "no sequences": ((0, 5, 8, 2, 7), (0, 1, 1, 1, 1)),
    "no capacity": ((2, 5, 4, 2, 7), (0, 1, 0, 1, 0)),
    "more capacity than tokens": ((2, 5, 4, 2, 7), (1, 1, 40, 1, 1)),
    "as many places as one program fills, and one": ((1, 65, 1, 1, 2), (0, 1, 1, 1, 1)),
    "more than one block": ((1, 70, 130, 1, 1), (0, 1, 1, 1, 3)),
    "wide": ((1, 3, 3, 2, 2100), (0, 1, 1, 2, 1)),
}


@pytest.mark.parametrize(
    "name", some(list(LAYERS), [name for name in LAYERS if name not in ("uneven", "many experts")])
)
def test_places_of_every_layer(name: str) -> None:
    (*chosen_of, dim), how = LAYERS[name]
    batch, tokens, num_experts, _ = chosen_of
    agree_on_places(torch.randn(batch, tokens, dim), chosen(*chosen_of), num_experts, how)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_places_in_other_dtypes(dtype: torch.dtype) -> None:
    agree_on_places(torch.randn(2, 9, 5, dtype=dtype), chosen(2, 9, 6, 2), 6, (0, 1, 3, 4, 1))


@pytest.mark.slow
def test_one_expert_is_everybodys_first_choice() -> None:
    experts = torch.stack([torch.full((1, 140), 3), torch.randint(3, (1, 140))], -1)  # 256 are counted at a time
    agree_on_places(torch.randn(1, 140, 2), experts, 6, (0, 1, 5, 2, 1))


@pytest.mark.slow
def test_random_capacities() -> None:
    draw = random.Random(0)
    for _ in range(3):
        num_experts, batch = draw.randint(1, 40), draw.randint(1, 4)
        k, tokens, dim = draw.randint(1, min(num_experts, 6)), draw.randint(1, 12), draw.randint(1, 40)
        experts = chosen(batch, tokens, num_experts, k, draw.choice([0.0, 1.0, 5.0]))
        how = (draw.choice([0, 1, batch]), 1, draw.randint(1, 5), draw.randint(1, 5), draw.randint(0, 3))
        agree_on_places(torch.randn(batch, tokens, dim), experts, num_experts, how)


def test_queues_of_more_pieces_than_are_summed_at_a_time() -> None:
    counts = torch.randint(9, (6, 25, 3, 5))
    for groups in (0, 1, 2):
        both("queue_starts", counts, groups)


@pytest.mark.slow
def test_choices_of_more_blocks_than_are_summed_at_a_time() -> None:
    experts = torch.randint(1025, (1, 2052, 1))  # of which a program counts 4
    (kept,) = both("keep_choices", experts, torch.randint(3, (1, 1, 1, 1025)), 0, 1, 2, 1, 1)
    assert 0 < int((kept < 0).sum()) < 2052


def test_pieces_that_start_behind_others() -> None:
    """A rank's part of a sequence, and one whose queue is full already."""
    experts = chosen(2, 9, 5, 3)
    for before in (1, 2**40):
        starts = torch.randint(before, before + 2, (2, 1, 3, 5))
        (kept,) = both("keep_choices", experts, starts, 0, 2, 1, 1, 1)
        rows, _, positions = both("permute_padded", torch.randn(2, 9, 4), experts, starts, 0, 2, 1, 1, 1)
        assert torch.equal(positions < 0, kept < 0)
        agree_on_sums(rows, positions)


def test_views_are_read_as_what_they_show() -> None:
    experts, x = chosen(2, 12, 5, 2), torch.randn(2, 12, 6)
    for piece, part in zip(experts.chunk(2, dim=1), x.chunk(2, dim=1), strict=True):
        assert not piece.is_contiguous()
        agree_on_places(part, piece, 5, (0, 1, 3, 4, 1))
    rows = torch.randn(4, 5, 6).transpose(0, 1)
    agree_on_sums(rows, torch.randperm(20).view(2, 5, 2).transpose(0, 1))


def test_choices_that_find_no_place_write_nowhere() -> None:
    """More choices than places: plain torch raises or overwrites; kernels may not write beyond the rows."""
    rows, _, positions = triton_backend.permute_dynamic(
        torch.ones(1, 9, 4), torch.ones(1, 9, 1, dtype=torch.int64), torch.tensor(4), 2
    )
    assert positions.flatten().tolist() == [4, 5, 6, 7, -1, -1, -1, -1, -1]
    assert rows.sum((1, 2)).tolist() == [0, 16]


# ---- whole plans -------------------------------------------------------------------------------------

CAPACITIES = {
    "factor": "capacity = factor(0.75, eval = 1.5); group = sequence",
    "dynamic": "capacity = dynamic(max = 0.75); group = batch",
    "as many as are needed": "capacity = dynamic()",
}


def tiny(capacity: str) -> str:
    return TINY.replace("gate = topk(2, normalize = true)", f"gate = topk(2, normalize = true); {capacity}")


def test_verify_proves_the_kernels_of_a_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = moec.compile(tiny(CAPACITIES["factor"]))
    run = noting(monkeypatch)
    report = moec.verify(plan, scale=True)
    assert report.ok, report
    assert {shape.template for shape in run} >= {"queues", "places"}

    def one_too_few(x: Tensor, experts: Tensor, starts: Tensor, *how: int) -> tuple[Tensor, ...]:
        return exact(x, experts, starts + 1, *how)

    exact = triton_backend.permute_padded
    monkeypatch.setattr(triton_backend, "permute_padded", one_too_few)
    report = moec.verify(plan, scale=True)
    assert not report.ok
    assert report.first_difference is not None
    assert report.first_difference.op == "permute_padded"


@pytest.mark.parametrize("capacity", CAPACITIES.values(), ids=CAPACITIES)
def test_a_plan_lists_the_kernels_that_a_capacity_runs(capacity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = moec.compile(GPU + tiny(capacity).replace("device = cpu", 'device = "toy"'))
    listed = [kernel.shape for kernel in kernels_of(plan, target_at(torch.device("cpu")))]
    run = noting(monkeypatch)
    # A rank of two: half the batch, half the experts, as many places from both.
    x = torch.randn(1, 4, 8)
    _, weights, experts = triton_backend.route(torch.randn(1, 4, 4), None, 2, "softmax", "before", True)
    if "factor" in capacity or "max" in capacity:
        starts = triton_backend.queue_starts(triton_backend.count_queues(experts, 4), 0)
    if "factor" in capacity:
        rows, counts, positions = triton_backend.permute_padded(x, experts, starts, 0, 1, 3, 4, 1)
    else:
        kept = triton_backend.keep_choices(experts, starts, 0, 1, 3, 4, 1) if "max" in capacity else experts
        largest = triton_backend.largest_load(kept, 4)
        rows, counts, positions = triton_backend.permute_dynamic(x, kept, largest, 4)
    places = 2 * rows.shape[1]
    exchanged, up, down = torch.randn(2 * places, 8), torch.randn(2, 2, 8, 8), torch.randn(2, 8, 8)
    beside = permute_weights(weights, positions, rows).flatten()
    triton_backend.expert_mlp(exchanged, torch.full((1, 2), places), up, down, None, None, beside, "swiglu")
    triton_backend.sum_rows(rows, positions, counts)
    assert run == set(listed)
    assert len(run) == len(listed), "a shape is listed twice"
