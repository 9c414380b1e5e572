"""Products by torch's `grouped_mm` on CPU, where it takes fp32 and 16 bits: layouts, empty experts, rows of nobody."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moec.runtime.backends.triton.libraries.library_grouped_mm import times, times_transposed, transposed_times

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS, ENDS = 12, [3, 3, 9]  # the second expert has no rows, the last three rows belong to no expert
EXPERT = torch.tensor([0] * 3 + [2] * 6)

with_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    torch.manual_seed(0)


def offsets() -> Tensor:
    """As the table of tiles has them: a slice that may begin anywhere."""
    return torch.tensor([7, 0, *ENDS], dtype=torch.int32)[1:]


def agrees(found: Tensor, exact: Tensor) -> None:
    assert found.shape == exact.shape
    error = (found.double() - exact).abs().max() / exact.abs().max()
    assert error <= {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[found.dtype]


def by_expert(rows: Tensor, matrices: Tensor) -> Tensor:
    return torch.einsum("rk,rkn->rn", rows[: ENDS[-1]].double(), matrices.double()[EXPERT])


@with_dtypes
def test_products_and_their_gradients_are_each_expert_s_own(dtype: torch.dtype) -> None:
    rows, others, matrices = torch.randn(ROWS, 16), torch.randn(ROWS, 24), torch.randn(3, 24, 16)
    rows, others, matrices = (given.to(dtype) for given in (rows, others, matrices))
    agrees(times_transposed(rows, matrices, offsets())[: ENDS[-1]], by_expert(rows, matrices.transpose(1, 2)))
    agrees(times(others, matrices, offsets())[: ENDS[-1]], by_expert(others, matrices))
    first, last = (others[part].double().t() @ rows[part].double() for part in (slice(0, 3), slice(3, 9)))
    agrees(transposed_times(others, rows, offsets()), torch.stack([first, torch.zeros_like(first), last]))


@with_dtypes
def test_rows_past_the_last_offset_are_nobody_s_even_if_they_are_not_numbers(dtype: torch.dtype) -> None:
    rows, matrices = torch.randn(ROWS, 16).to(dtype), torch.randn(3, 24, 16).to(dtype)
    rows[ENDS[-1] :] = torch.nan
    assert times_transposed(rows, matrices, offsets())[: ENDS[-1]].isfinite().all()
    gradient = transposed_times(rows, rows, offsets())
    assert gradient.isfinite().all()
    assert not gradient[1].any()


def test_gradients_that_repeat_one_row_and_memory_that_is_not_aligned_are_copied() -> None:
    matrices = torch.randn(3, 24, 16)
    ones = torch.ones(1, 16).expand(ROWS, 16)  # the gradient of a sum, refused by torch with stride 0
    agrees(times_transposed(ones, matrices, offsets())[: ENDS[-1]], by_expert(ones, matrices.transpose(1, 2)))
    moved = torch.randn(ROWS * 16 + 1)[1:].view(ROWS, 16)
    agrees(times_transposed(moved, matrices, offsets())[: ENDS[-1]], by_expert(moved, matrices.transpose(1, 2)))
