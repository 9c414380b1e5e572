"""Rows, tokens and experts beyond 2³¹ elements of a tensor: kernels give the same bits there as at its beginning.

The tensors are sparse files, of which only the pages in use exist. Offsets are a little above multiples of 2³², so that
an offset of 32 bits names another place of the file. `test_interpreted.py` runs this file, in its own process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from moec.codegen.kernels.around_shape import AroundShape
from moec.codegen.kernels.kernel_shape import KernelShape
from moec.codegen.kernels.product_shapes import DownShape, ProductShape, UpShape
from moec.codegen.kernels.row_shapes import PlacesShape
from moec.codegen.kernels.shapes import GatedShape, RouteShape
from moec.codegen.kernels.tiles import Tile, Ways
from moec.runtime.backends.triton.triton_blocks import described
from moec.runtime.backends.triton.triton_launch import Kernels
from moec.runtime.backends.triton.triton_modules import module_of

ROWS, DIM, HIDDEN, CHOICES, EXPERTS = 5, 16, 16, 4, 8
FAR_ROW, FAR_EXPERT = 2**28 + 24, 2**24 + 3
"""Times the width of a row, or the elements of a matrix, they are a little above a multiple of 2³²."""

WAYS = Ways(*[Tile(16, 16, 16, 4, 1)] * 6)
MIXES = {
    "rows side by side": {},
    "biases": {"bias": True},
    "weighted rows": {"weighted": True, "bias": True},
    "rows from many sources": {"gathered": True, "weighted": True, "bias": True},
    "blocks": {"bulk": True},
    "blocks, weighted rows": {"bulk": True, "weighted": True},
}

Sparse = Callable[..., Tensor]


@pytest.fixture
def sparse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sparse:
    """Makes zeros of any shape without copying them."""
    # The interpreter copies every argument to the device and back, which here is the same memory.
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        file = tmp_path / "sparse"
        made = torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=dtype).view(shape)
        file.unlink()
        return made

    return make


@pytest.fixture
def begin_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """The first program of grids along an axis."""
    first = {}
    given = interpreter.interpreter_builder.create_get_program_id

    def program_id(axis: int) -> object:
        handle = given(axis)
        handle.data = handle.data + handle.data.dtype.type(first.get(axis, 0))
        return handle

    monkeypatch.setattr(interpreter.interpreter_builder, "create_get_program_id", program_id)
    return lambda axis, program: first.update({axis: program})


def kernels(shape: KernelShape) -> Kernels:
    return Kernels(module_of(shape), torch.device("cpu"))


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def placed(sparse: Sparse, at: int, values: Tensor) -> Tensor:
    """Zeros, and values from `at` on."""
    made = sparse(at + len(values), *values.shape[1:], dtype=values.dtype)
    made[at:] = values
    return made


def product(shape: ProductShape, kernel: str, tiles: int, *arguments: Tensor, more: Sequence[int] = ()) -> None:
    """Launches a product over one tile of rows and `tiles` tiles in all, with descriptors where it reads blocks."""
    of, blocks = kernels(shape), shape.blocks(kernel)
    given = [
        described(argument, blocks[name]) if name in blocks else argument
        for name, argument in zip(of.arguments(kernel), arguments, strict=False)
    ]
    rows_of_tiles = torch.ones(1, dtype=torch.int32) if shape.persistent(kernel) else 1
    of.launch(kernel, (tiles,), *given, rows_of_tiles, *more)


def experts_at(
    sparse: Sparse, begin_at: Callable[[int, int], None], row: int, expert: int, **how: bool
) -> dict[str, Tensor]:
    """All results of both projections for one expert's rows from `row` on."""
    bias, weighted, gathered, bulk = (how.get(name, False) for name in ("bias", "weighted", "gathered", "bulk"))
    known = (EXPERTS, DIM, HIDDEN, "swiglu", "fp32", gathered, 0, bias, WAYS)
    up_shape, down_shape = UpShape.of(*known, bulk=bulk), DownShape.of(*known, bulk=bulk, weighted=weighted)
    of_up, of_down = kernels(up_shape), kernels(down_shape)
    put, empty = partial(placed, sparse), partial(sparse, row + ROWS)
    offsets = sparse(expert + 2, dtype=torch.int32)
    offsets[expert], offsets[expert + 1] = row, row + ROWS
    tables = (offsets, torch.tensor([expert], dtype=torch.int32), torch.tensor([row], dtype=torch.int32))
    order = [put(row, torch.randperm(ROWS, generator=torch.Generator().manual_seed(0)).int() + row)] if gathered else []
    x, grad = put(row, drawn(ROWS, DIM, seed=1)), put(row, drawn(ROWS, DIM, seed=2))
    up, down = put(expert, drawn(1, 2, HIDDEN, DIM, seed=3)), put(expert, drawn(1, DIM, HIDDEN, seed=4))
    up_bias = [put(expert, drawn(1, 2, HIDDEN, seed=5))] if bias else []
    down_bias = [put(expert, drawn(1, DIM, seed=6))] if bias else []
    weights = [put(row, drawn(ROWS, seed=7))] if weighted else []
    made = {
        "hidden": empty(2, HIDDEN), "activated": empty(HIDDEN), "out": empty(DIM), "grad_hidden": empty(2, HIDDEN),
        "activated_again": empty(HIDDEN), "grad_rows": empty(DIM),
    }  # fmt: skip
    hidden, activated, out, grad_hidden, again, grad_rows = made.values()
    of_weights = [*weights, empty()] if weighted else []
    product(up_shape, "up", 2, x, *order, up, *up_bias, hidden, activated, *tables)
    product(down_shape, "down", 1, activated, down, *down_bias, *order, *weights, out, *tables)
    bias_of_weight, number = (down_bias, [row + ROWS]) if weighted else ([], [])
    given = (grad, down, *bias_of_weight, *order, *of_weights, hidden, grad_hidden, again)
    product(down_shape, "down_backward", 1, *given, *tables, more=number)
    product(up_shape, "up_backward", 1, grad_hidden, up, *order, grad_rows, *tables)
    found = {name: tensor[row:].clone() for name, tensor in made.items()}
    found |= {f"grad_weights_{i}": tensor[row:].clone() for i, tensor in enumerate(of_weights[1:])}

    of_matrices = {"up": sparse(expert + 1, 2, HIDDEN, DIM), "down": sparse(expert + 1, DIM, HIDDEN)}
    of_biases = {"up_bias": sparse(expert + 1, 2, HIDDEN), "down_bias": sparse(expert + 1, DIM)} if bias else {}
    begin_at(1, expert)
    of_down.launch("down_weights", (1, 1), grad, again, *order, of_matrices["down"], offsets)
    of_up.launch("up_weights", (2, 1), grad_hidden, x, *order, of_matrices["up"], offsets)
    if bias:
        of_up.launch("up_bias", (1, 1), grad_hidden, of_biases["up_bias"], offsets)
        of_down.launch("down_bias", (1, 1), grad, *order, *weights, of_biases["down_bias"], offsets)
    begin_at(1, 0)
    return found | {name: tensor[expert].clone() for name, tensor in (of_matrices | of_biases).items()}


def places_at(sparse: Sparse, begin_at: Callable[[int, int], None], row: int, token: int) -> dict[str, Tensor]:
    """What moves rows to and from their places, for tokens from `token` on and places from `row` on."""
    of = kernels(PlacesShape(k=CHOICES, dim=DIM, dtype="fp32", weights="fp32"))
    put, count = partial(placed, sparse), ROWS * CHOICES
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).view(ROWS, CHOICES)
    positions, weights = put(token, order + row), put(token, drawn(ROWS, CHOICES, seed=1))
    x, rows = put(token, drawn(ROWS, DIM, seed=2)), put(row, drawn(count, DIM, seed=3))
    made = {"fill": sparse(row + count, DIM), "grad_rows": sparse(row + count, DIM)}
    sums = {"add_rows": sparse(token + ROWS, DIM), "combine": sparse(token + ROWS, DIM)}
    sums["grad_weights"] = sparse(token + ROWS, CHOICES)
    taken = sparse(1, dtype=torch.int8)
    tokens, num_rows = token + ROWS, row + count
    begin_at(0, token)
    of.launch("fill", (ROWS, 1), x, positions, positions, made["fill"], tokens, 0, 1)
    of.launch("add_rows", (ROWS, 1), rows, positions, sums["add_rows"])
    of.launch("combine", (ROWS, 1), rows, positions, weights, sums["combine"])
    given = (x, rows, positions, weights, taken, made["grad_rows"], sums["grad_weights"])
    of.launch("combine_backward", (ROWS,), *given, tokens, num_rows)
    begin_at(0, 0)
    found = {name: tensor[row:].clone() for name, tensor in made.items()}
    return found | {name: tensor[token:].clone() for name, tensor in sums.items()}


def around_at(sparse: Sparse, begin_at: Callable[[int, int], None], row: int) -> dict[str, Tensor]:
    """What surrounds products by a library, for the last expert's rows from `row` on."""
    shape = AroundShape(
        experts=EXPERTS, dim=DIM, hidden=HIDDEN, activation="swiglu", dtype="fp32",
        gathered=True, k=0, bias=True, weighted=True,
    )  # fmt: skip
    of, put, empty = kernels(shape), partial(placed, sparse), partial(sparse, row + ROWS)
    offsets = torch.tensor([0] * (EXPERTS - 1) + [row, row + ROWS], dtype=torch.int32)
    order = put(row, torch.randperm(ROWS, generator=torch.Generator().manual_seed(0)).int() + row)
    x, weights = put(row, drawn(ROWS, DIM, seed=1)), put(row, drawn(ROWS, seed=2))
    up_bias, down_bias = drawn(EXPERTS, 2, HIDDEN, seed=3), drawn(EXPERTS, DIM, seed=4)
    hidden, grad_activated = put(row, drawn(ROWS, 2, HIDDEN, seed=5)), put(row, drawn(ROWS, HIDDEN, seed=6))
    made = {"rows": empty(DIM), "activated": empty(HIDDEN), "out": empty(DIM), "grad_rows": empty(DIM)}
    made |= {"grad_weights": empty(), "grad_hidden": empty(2, HIDDEN), "again": empty(HIDDEN)}
    rows, activated, out, grad_rows, *of_through = made.values()
    grid = of.blocks(ROWS, "ROWS")
    assert row % of.module.ROWS.value == 0
    begin_at(0, row // of.module.ROWS.value)
    of.launch("gather", (*grid, 1), x, order, rows, offsets)
    of.launch("activate", (*grid, 1), up_bias, hidden, activated, offsets)
    of.launch("place", (*grid, 1), rows, down_bias, order, weights, out, offsets)
    of.launch("scatter", (*grid, 1), rows, order, grad_rows, offsets)
    given = (rows, down_bias, order, weights, of_through[0], grad_activated, hidden, *of_through[1:])
    of.launch("through", grid, *given, offsets)
    begin_at(0, 0)
    return {name: tensor[row:].clone() for name, tensor in made.items()}


def tokens_at(sparse: Sparse, begin_at: Callable[[int, int], None], token: int) -> dict[str, Tensor]:
    """A gated activation and the choice of experts, of the tokens from `token` on."""
    gated = kernels(GatedShape(hidden=HIDDEN, activation="swiglu", dtype="fp32"))
    shape = RouteShape(experts=EXPERTS, k=CHOICES, score="softmax", after=False, normalize=True, dtype="fp32")
    route, put, empty = kernels(shape), partial(placed, sparse), partial(sparse, token + ROWS)
    x, grad = put(token, drawn(ROWS, 2, HIDDEN, seed=1)), put(token, drawn(ROWS, HIDDEN, seed=2))
    logits, of_weights = put(token, drawn(ROWS, EXPERTS, seed=3)), put(token, drawn(ROWS, CHOICES, seed=4))
    made = {"gated": empty(HIDDEN), "grad_x": empty(2, HIDDEN)}
    routed = [empty(EXPERTS), empty(CHOICES), empty(CHOICES, dtype=torch.int64)]
    begin_at(0, token)
    gated.launch("gated", (ROWS, 1), x, made["gated"])
    gated.launch("gated_backward", (ROWS, 1), grad, x, made["grad_x"])
    block = route.module.BLOCK.value
    assert token % block == 0
    begin_at(0, token // block)
    route.launch("route", route.blocks(ROWS), logits, *routed, token + ROWS)
    made |= dict(zip(("probabilities", "weights", "experts"), routed, strict=True), grad_logits=empty(EXPERTS))
    given = (logits, made["probabilities"], of_weights, *routed[1:], made["grad_logits"], token + ROWS)
    route.launch("route_backward", route.blocks(ROWS), *given, OF_PROBABILITIES=True, OF_WEIGHTS=True)
    begin_at(0, 0)
    return {name: tensor[token:].clone() for name, tensor in made.items()}


def require_same(near: dict[str, Tensor], far: dict[str, Tensor]) -> None:
    assert near.keys() == far.keys()
    for name, expected in near.items():
        assert expected.count_nonzero() > expected.numel() / 4, f"{name} is hardly computed"
        assert torch.equal(far[name], expected), name


@pytest.mark.parametrize("mix", MIXES)
def test_experts_give_the_same_beyond_two_to_the_31(sparse: Sparse, begin_at: Callable, mix: str) -> None:
    near = experts_at(sparse, begin_at, 0, 0, **MIXES[mix])
    for row, expert in ((FAR_ROW, 0), (0, FAR_EXPERT)):
        require_same(near, experts_at(sparse, begin_at, row, expert, **MIXES[mix]))


def test_rows_and_places_give_the_same_beyond_two_to_the_31(sparse: Sparse, begin_at: Callable) -> None:
    near = places_at(sparse, begin_at, 0, 0)
    for row, token in ((FAR_ROW, 0), (0, FAR_ROW)):
        require_same(near, places_at(sparse, begin_at, row, token))


def test_what_surrounds_a_library_s_products_gives_the_same_beyond_two_to_the_31(
    sparse: Sparse, begin_at: Callable
) -> None:
    require_same(around_at(sparse, begin_at, 0), around_at(sparse, begin_at, FAR_ROW))


def test_gated_activations_and_routes_give_the_same_beyond_two_to_the_31(sparse: Sparse, begin_at: Callable) -> None:
    far = 2**30 + 2**10
    require_same(tokens_at(sparse, begin_at, 0), tokens_at(sparse, begin_at, far))
