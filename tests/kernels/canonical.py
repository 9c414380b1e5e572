"""The products of the canonical layers, by the tiles of the rule: those that run where no library is taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from support.kernel_tables import LAYERS, TOKENS

from moec.codegen.kernels.model.model_tiles import ExpertLayer
from moec.codegen.kernels.product_shapes import DownShape, ProductShape, UpShape
from moec.codegen.kernels.tile_rule import in_bulk, tiles_for
from moec.codegen.kernels.tiles import Ways

__all__ = ["DEVICES", "LAYERS", "TOKENS", "products_of", "ways_on"]

DEVICES: Mapping[str, tuple[str, str]] = {"h100": ("sm_90", "hopper"), "a100": ("sm_80", "ampere")}
"""The compile target and the family of devices."""

BIASED = ("gpt-oss-120b",)


def ways_on(device: str, layer: ExpertLayer, tokens: int) -> Ways:
    """The rule's tiles for a device."""
    _, family = DEVICES[device]
    rows, widths = tokens * layer.k, (layer.dim, layer.hidden)
    return tiles_for("bf16", rows, layer.experts, widths, True, family)


def products_of(name: str, ways: Ways, gathered: bool = False, device: str = "h100") -> Iterator[ProductShape]:
    """Both projections over tokens that stay, or over weighted rows that arrived from several ranks."""
    layer = LAYERS[name]
    k = 0 if gathered else layer.k
    known = (layer.experts, layer.dim, layer.hidden, "swiglu", "bf16", gathered, k, name in BIASED)
    bulk = in_bulk("bf16", (layer.dim, layer.hidden), DEVICES[device][1])
    yield UpShape.of(*known, ways, bulk=bulk)
    yield DownShape.of(*known, ways, bulk=bulk, weighted=gathered)
