"""Functions that compute in blocks of rows, against the same in one block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moec.runtime.backends.torch import torch_backend, torch_blocks
from moec.runtime.ops.elementwise import GATED


def layer_results(dtype: torch.dtype) -> list[Tensor]:
    """The results of every function that computes in blocks: T 11, k 3, D 6, F 5, E 4."""
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    experts = torch.rand(1, 11, 4, generator=generator).argsort(-1)[..., :3].contiguous()
    rows, _, positions = torch_backend.permute(random(1, 11, 6), experts, 4)
    weights = random(1, 11, 3).to(torch.promote_types(dtype, torch.float32))
    pairs = random(33, 2, 5)
    return [
        torch_backend.permute_backward(rows, positions),
        torch_backend.combine(rows, positions, weights),
        *torch_backend.combine_backward(random(1, 11, 6), rows, positions, weights),
        *(torch_backend.gated(pairs, activation) for activation in GATED),
        *(torch_backend.gated_backward(random(33, 5), pairs, activation) for activation in GATED),
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("elements", [1, 8, 50])
def test_the_size_of_blocks_changes_no_result(
    elements: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = layer_results(dtype)
    monkeypatch.setattr(torch_blocks, "BLOCK", elements)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-2, "atol": 1e-2}
    for in_blocks, expected in zip(layer_results(dtype), at_once, strict=True):
        torch.testing.assert_close(in_blocks, expected, **tolerance)


@pytest.mark.parametrize("shape", [(0, 5), (1, 5), (7, 5), (8, 5), (3, 0), (3, 2**20)])
def test_blocks_cover_every_row_once(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_blocks, "BLOCK", 10)
    x = torch.empty(shape)
    rows = [row for block in torch_blocks.blocks(x) for row in range(shape[0])[block]]
    assert rows == list(range(shape[0]))
