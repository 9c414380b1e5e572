"""Products of rows in both their forms, persistent with blocks by TMA and one tile per program with pointers.

Tiles reach beyond the end of each expert's matrices and rows, where other experts' numbers lie: these may be NaN.
`test_interpreted.py` runs this file.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from given_experts import Given, choices_with, memory_full_of_nan, of_rows, of_tokens
from support.combinations import diagonals, pairs

from moec.codegen.kernels import fitting
from moec.codegen.kernels.product_shapes import ProductShape
from moec.codegen.kernels.tiles import Tile, Ways
from moec.runtime.backends.triton import triton_experts, triton_projection, triton_tiles
from moec.runtime.backends.triton.triton_launch import Kernels

WAYS = str(
    Ways.parse(
        "up=16x64x32w4s3 down=16x32x16w4s3 down_backward=16x64x32w4s3 "
        "down_weights=32x16x16w4s3 up_backward=16x32x32w4s3 up_weights=16x64x32w4s2"
    )
)
DIM, HIDDEN = 44, 24
"""Multiples of 16 bytes, and of no tile: each block of the last column of tiles reaches into the next expert."""

COUNTS = [37, 0, 1, 16, 18, 21]
EMPTY, SOME = 1, 3


@pytest.fixture(params=[False, True])
def bulk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """The form of the products: blocks by TMA, or pointers."""
    monkeypatch.setattr(triton_experts, "in_bulk", lambda *_: request.param)
    triton_experts._shapes.cache_clear()
    yield request.param
    triton_experts._shapes.cache_clear()


def layer(gathered: bool, *, weighted: bool = False, bias: bool = False) -> Given:
    """Over rows from two ranks, or over tokens that stay."""
    if gathered:
        parts = [[count // 2 for count in COUNTS], [count - count // 2 for count in COUNTS]]
        return of_rows(parts, DIM, HIDDEN, weighted=weighted, bias=bias, ways=WAYS)
    return of_tokens(choices_with(COUNTS, 3), len(COUNTS), DIM, HIDDEN, bias=bias, ways=WAYS)


@pytest.mark.parametrize(
    ("bulk", "gathered", "bias"), pairs([False, True], [False, True], [False, True]), indirect=["bulk"]
)
def test_both_forms_are_right_where_memory_is_full_of_nan(bulk: bool, gathered: bool, bias: bool) -> None:
    given = layer(gathered, weighted=gathered, bias=bias)
    with memory_full_of_nan():
        found = given.run()
    given.require_right(found)


@pytest.mark.usefixtures("bulk")
@pytest.mark.parametrize(("bulk", "gathered"), diagonals([False, True], [False, True]), indirect=["bulk"])
def test_weights_of_an_expert_without_rows_are_seen_by_no_result(gathered: bool) -> None:
    given = layer(gathered)
    exact = given.exact()
    for name in ("up", "down"):
        given.tensors[name][EMPTY] = torch.nan
    found = given.run()
    for name, expected in exact.items():
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("bulk")
def test_rows_of_one_expert_are_seen_by_no_other() -> None:
    given = of_rows([COUNTS], DIM, HIDDEN, ways=WAYS)
    exact = given.exact()
    first = sum(COUNTS[:SOME])
    own = slice(first, first + COUNTS[SOME])
    given.tensors["rows"][own] = torch.nan
    found = given.run()
    assert found["out"][own].isnan().all()
    others = [expert for expert in range(len(COUNTS)) if expert != SOME]
    for name, expected in exact.items():
        keep = (
            others
            if name in ("up", "down")
            else [row for row in range(len(expected)) if row not in range(own.start, own.stop)]
        )
        torch.testing.assert_close(found[name][keep].double(), expected[keep], rtol=1e-5, atol=1e-5)


def test_persistent_programs_take_several_tiles_each(bulk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    programs: dict[str, int] = {}
    launch = Kernels.launch

    def noted(kernels: Kernels, kernel: str, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
        programs[kernel] = grid[0]
        launch(kernels, kernel, grid, *arguments, **options)

    monkeypatch.setattr(Kernels, "launch", noted)
    monkeypatch.setattr(triton_projection, "programs_at", lambda *_: 2)
    of_rows([COUNTS], DIM, HIDDEN, ways=WAYS).require_right()
    tiles = sum(-(-count // 16) for count in COUNTS)
    for kernel in ("up", "down", "down_backward", "up_backward"):
        assert programs[kernel] == 2 if bulk else programs[kernel] >= tiles, kernel


def test_a_device_with_less_shared_memory_than_tiles_need_runs_smaller_ones_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Ways.parse(WAYS)
    shared = fitting.buffer_bytes(Tile(16, 64, 32, 4, 2), "fp32")
    monkeypatch.setattr(triton_tiles, "shared_of", lambda _: shared)
    monkeypatch.setattr(triton_tiles, "_fitted", triton_tiles._fitted.__wrapped__)
    triton_tiles._warn_of_shared_memory.cache_clear()
    run: set[Tile | None] = set()
    tile_of = ProductShape.tile_of

    def noted(shape: ProductShape, kernel: str) -> Tile | None:
        run.add(tile_of(shape, kernel))
        return tile_of(shape, kernel)

    monkeypatch.setattr(ProductShape, "tile_of", noted)
    given = of_rows([COUNTS], DIM, HIDDEN, ways=WAYS)
    with pytest.warns(UserWarning, match="less than the chosen tiles need") as warned:
        given.require_right()
    assert len(warned) == 1
    assert asked.tile("up") not in run
    assert Tile(16, 64, 32, 4, 2) in run
