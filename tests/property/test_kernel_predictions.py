"""The model of the kernels over random layers: times are finite, and their parts add up to them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.layer_predictions import predict_layer
from zipf_loads import zipf

from moec.codegen.kernels.model.model_device import DEVICES
from moec.codegen.kernels.model.model_loads import Load
from moec.codegen.kernels.model.model_tiles import ExpertLayer
from moec.codegen.kernels.stored_tiles import choose
from moec.codegen.kernels.tiles import KERNELS, Ways

FAMILIES = {"sm_80": "ampere", "sm_90": "hopper", "sm_100": "hopper"}
WIDTHS = st.integers(1, 8192)


@examples(60, 1000)
@given(
    experts=st.sampled_from((1, 2, 3, 8, 60, 256)),
    k=st.integers(1, 8),
    widths=st.tuples(WIDTHS, WIDTHS),
    tokens=st.sampled_from((0, 1, 2, 17, 1000, 8192, 100_000)),
    gated=st.booleans(),
    gathers=st.booleans(),
    dtype=st.sampled_from(("bf16", "fp16", "fp32", "fp64")),
    is_zipf=st.booleans(),
    device=st.sampled_from(sorted(DEVICES)),
    library=st.booleans(),
    bulk=st.booleans(),
)
def test_times_are_finite_and_their_parts_add_up(
    experts: int,
    k: int,
    widths: tuple[int, int],
    tokens: int,
    gated: bool,
    gathers: bool,
    dtype: str,
    is_zipf: bool,
    device: str,
    library: bool,
    bulk: bool,
) -> None:
    k, model = min(k, experts), DEVICES[device]
    layer = ExpertLayer(
        experts=experts, dim=widths[0], hidden=widths[1], gated=gated, dtype=dtype, k=k if gathers else 0
    )
    load = zipf(tokens, experts, k) if is_zipf else Load.uniform(tokens, experts, k)
    family = FAMILIES[model.target]
    ways = choose(dtype, max(1, tokens * k), experts, widths, gated, device="", family=family, tuned={}).ways
    if library:
        ways = Ways(*("grouped_mm" for _ in KERNELS))
    for each in predict_layer(ways, layer, load, model, bulk=bulk).kernels:
        found = each.prediction
        assert math.isfinite(found.seconds), "a tile of the rule does not fit the device"
        assert sum(found.parts.values()) == pytest.approx(found.seconds)
        assert min(found.parts.values()) >= 0
        assert 0 <= found.padding_efficiency <= 1 + 1e-9
