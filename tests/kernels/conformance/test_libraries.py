"""Experts whose products a library computes, all of them or some, against the definition."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import COUNTS, MIXTURES, Case, experts, mixture
from places import INTERPRETED, NO_CUDA, PLACES, TOLERANCE, Numbers, Place
from support.combinations import diagonals, some
from torch.nn.functional import grouped_mm

from moec.codegen.kernels.tile_rule import tiles_for
from moec.codegen.kernels.tiles import KERNELS, Ways
from moec.runtime.backends import Backend
from moec.runtime.backends.torch import torch_backend
from moec.runtime.backends.triton.libraries import library_grouped_mm

WIDTHS = (24, 16)

ROUNDINGS = 8
"""Of 16-bit results: three between inputs and a result, and the library's own before each pass around it."""

CASES: dict[str, Case] = {
    **{f"experts, {name}": partial(experts, counts=counts, activation="swiglu") for name, counts in COUNTS.items()},
    "experts with weights": partial(experts, counts=COUNTS["uneven"], activation="relu", weighted=True),
    "experts with weights and biases, four sources": partial(
        experts, counts=COUNTS["four sources"], activation="swiglu", bias=True, weighted=True
    ),
    "experts with biases": partial(experts, counts=COUNTS["more than one tile"], activation="gelu", bias=True),
    "experts with a clamp": partial(
        experts, counts=COUNTS["uneven"], activation="swiglu", bias=True, parameters=(None, 1.702)
    ),
    **{f"mixture, {name}": partial(mixture, shape=shape) for name, shape in MIXTURES.items() if name != "many experts"},
    "mixture with biases, some dropped": partial(mixture, shape=(2, 20, 5, 2), dropped=0.3, bias=True),
    "mixture, all dropped": partial(mixture, shape=(1, 9, 4, 2), dropped=1.0),
}

TILES = tiles_for("fp32", 100, 4, WIDTHS, True, "hopper")
ALL = Ways(*("grouped_mm" for _ in KERNELS))
ALL_BUT_ONE = {f"all but {kernel} by the library": ALL.with_way(kernel, TILES.of(kernel)) for kernel in KERNELS}
ONE = {f"{kernel} alone by the library": TILES.with_way(kernel, "grouped_mm") for kernel in KERNELS}
MIXED = ALL_BUT_ONE | ONE
RUNS = {kernel: 1 if kernel in ("up", "down") else 2 for kernel in KERNELS}
"""How often a case runs each product: backward at once, and in two parts."""
MIXES = ("experts with weights and biases, four sources", "mixture with biases, some dropped")

ARGUMENTS = {
    "expert_mlp": 8, "expert_mlp_backward": 11, "expert_mlp_backward_split": 11,
    "mixture_mlp": 8, "mixture_mlp_backward": 12, "mixture_mlp_backward_split": 12,
}  # fmt: skip
"""Of each operator, before the activation's two parameters."""


@pytest.fixture(autouse=True)
def _as_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """`MOEC_BACKEND=triton`, with which the interpreter's tests run, would force our products."""
    monkeypatch.delenv("MOEC_BACKEND", raising=False)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of what the library computes from now on."""
    found: list[torch.Size] = []

    def noted(*operands: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        out = grouped_mm(*operands, offs=offs)
        found.append(out.shape)
        return out

    monkeypatch.setattr(library_grouped_mm, "grouped_mm", noted)
    return found


class InWays:
    """A backend whose experts' products are computed in these ways."""

    def __init__(self, backend: Backend, ways: Ways) -> None:
        for name, number in ARGUMENTS.items():
            setattr(self, name, self._in_ways(getattr(backend, name), number + 2, str(ways)))

    @staticmethod
    def _in_ways(function: Callable[..., Any], number: int, ways: str) -> Callable[..., Any]:
        return lambda *given: function(*given[:number], *(None,) * (number - len(given)), ways)


def _places() -> list[object]:
    found = [pytest.param(place, id=place.name) for place in PLACES if place.name.startswith("triton")]
    reason = NO_CUDA or "no kernels run here"
    return found or [pytest.param(None, id="on cuda", marks=pytest.mark.skip(reason=reason))]


@pytest.fixture(params=_places())
def kernels(request: pytest.FixtureRequest) -> Place:
    """Rendered kernels on a device: in bf16 on CUDA, in fp32 in the interpreter."""
    place = request.param
    assert isinstance(place, Place)
    return place


def require_agreement(place: Place, case: Case, ways: Ways) -> None:
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    ours = case(InWays(place.backend, ways), Numbers(dtype, place.device), widths=WIDTHS)  # type: ignore[arg-type, call-arg]
    exact = case(torch_backend, Numbers(dtype, exact=True), widths=WIDTHS)  # type: ignore[call-arg]
    for number, (one, other) in enumerate(zip(ours, exact, strict=True)):
        if not one.dtype.is_floating_point:
            assert torch.equal(one.cpu(), other), number
        elif one.numel():
            scale = max(1.0, float(other.abs().max()))
            error = float((one.cpu().double() - other).abs().max()) / scale
            assert error <= TOLERANCE[dtype] * (1 if INTERPRETED else ROUNDINGS / 3), number


FAST = ("experts, four sources", "experts with a clamp", "mixture, no tokens", "mixture, all dropped", *MIXES)


@pytest.mark.parametrize("name", some(list(CASES), FAST))
def test_products_all_by_a_library_give_what_the_definition_gives(
    kernels: Place, name: str, products: list[torch.Size]
) -> None:
    require_agreement(kernels, CASES[name], ALL)
    assert len(products) == (0 if " no " in name else sum(RUNS.values()))


@pytest.mark.parametrize(
    ("ways", "name"),
    [
        *diagonals(list(ALL_BUT_ONE), MIXES),
        *(pytest.param(ways, name, marks=pytest.mark.slow) for ways in ONE for name in MIXES),
    ],
)
def test_products_may_be_computed_in_different_ways(
    kernels: Place, ways: str, name: str, products: list[torch.Size]
) -> None:
    require_agreement(kernels, CASES[name], MIXED[ways])
    assert len(products) == sum(RUNS[kernel] for kernel in KERNELS if MIXED[ways].tile(kernel) is None)
