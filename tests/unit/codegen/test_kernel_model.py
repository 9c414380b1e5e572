"""The model of the kernels: what bounds a product, and that each constant and each count changes it as it should."""

from __future__ import annotations

from dataclasses import fields, replace
from math import inf

import pytest
from support.layer_predictions import predict_layer
from support.tables import each_row

from moec.codegen.kernels.model.model import predict, predict_schedule
from moec.codegen.kernels.model.model_choice import best_way
from moec.codegen.kernels.model.model_device import DEVICES, SOURCES, DeviceModel, complaint
from moec.codegen.kernels.model.model_libraries import LARGE, MEDIUM, SMALL, schedule_of_library
from moec.codegen.kernels.model.model_loads import Load
from moec.codegen.kernels.model.model_tiles import ExpertLayer, Schedule, estimated_blocks, step_of
from moec.codegen.kernels.tiles import KERNELS, Tile, Ways

H200 = DEVICES["h200"]
QWEN = ExpertLayer(experts=128, dim=2048, hidden=768, gated=True, dtype="bf16", k=8)
MIXTRAL = ExpertLayer(experts=8, dim=4096, hidden=14336, gated=True, dtype="bf16", k=2)
NARROW, WIDE = Tile(128, 128, 64, 8, 3), Tile(128, 256, 64, 8, 3)


def load_of(layer: ExpertLayer, tokens: int) -> Load:
    return Load.uniform(tokens, layer.experts, layer.k)


def every(tile: Tile) -> Ways:
    return Ways(*(tile for _ in KERNELS))


def test_every_constant_has_a_source() -> None:
    without = {"name", "target", "calibration"}
    assert set(SOURCES) == {field.name for field in fields(DeviceModel)} - without
    assert complaint("h200") is None
    assert complaint("toy") is not None


@each_row("kernel", KERNELS)
@each_row("tokens", [1, 100, 8192])
def test_parts_add_up_to_the_time_and_products_to_the_convention(kernel: str, tokens: int) -> None:
    load = load_of(QWEN, tokens)
    for way in (NARROW, WIDE, "grouped_mm"):
        found = predict(kernel, way, QWEN, load, H200)
        assert sum(found.parts.values()) == pytest.approx(found.seconds)
        assert min(found.parts.values()) >= 0
        assert 0 < found.padding_efficiency <= 1
        # 6 · T · k · D · F of forward are 4 of up and 2 of down; each backward product has its forward's.
        each = 4 if kernel.startswith("up") else 2
        assert found.flops == pytest.approx(each * tokens * QWEN.k * QWEN.dim * QWEN.hidden)


def test_wider_tiles_read_less_from_l2() -> None:
    narrow, wide = (predict("down", tile, MIXTRAL, load_of(MIXTRAL, 8192), H200) for tile in (NARROW, WIDE))
    assert (narrow.bound, narrow.blocks, wide.blocks) == ("L2", 2, 1)
    assert wide.seconds < narrow.seconds


def test_a_faster_l2_helps_what_l2_bounds_and_memory_what_memory_bounds() -> None:
    many, few = load_of(QWEN, 8192), load_of(QWEN, 256)
    quick_l2, quick_memory = replace(H200, l2_bandwidth=9e12), replace(H200, memory_bandwidth=8e12)
    assert predict("up", NARROW, QWEN, many, quick_l2).seconds < predict("up", NARROW, QWEN, many, H200).seconds
    assert predict("up", NARROW, QWEN, many, quick_memory).seconds == predict("up", NARROW, QWEN, many, H200).seconds
    small = Tile(64, 256, 64, 4, 3)
    assert predict("up", small, QWEN, few, H200).bound == "memory"
    assert predict("up", small, QWEN, few, quick_memory).seconds < predict("up", small, QWEN, few, H200).seconds


def test_memory_moves_every_expert_s_matrix_and_every_row_once() -> None:
    # 128 matrices of 768 x 2048, activated rows, and rows of the model's width, all in bf16: all small beside L2.
    load = Load(counts=(64,) * 128)
    found = predict("down", NARROW, QWEN, load, H200)
    assert found.moved == 2 * (128 * 768 * 2048 + 64 * 128 * (768 + 2048))
    # Tokens are gathered: read once each, not once for each of 8 choices.
    up = predict("up", NARROW, QWEN, load, H200)
    assert up.moved == 2 * (2 * 128 * 768 * 2048 + 64 * 128 * (2048 / 8 + 3 * 768))
    copied = predict("up", NARROW, replace(QWEN, k=0), load, H200)
    assert copied.moved - up.moved == 2 * 64 * 128 * 2048 * 7 / 8


def test_tokens_that_l2_cannot_keep_are_read_again() -> None:
    small, large = load_of(QWEN, 4096), load_of(QWEN, 65_536)

    def of_rows(load: Load) -> float:
        without = replace(QWEN, k=1), predict("up", WIDE, QWEN, load, H200).moved
        rows = load.rows * QWEN.width * QWEN.hidden * 3 + 2 * 2 * 128 * 768 * 2048
        return (without[1] - rows) / (load.rows * QWEN.dim * QWEN.width)

    assert of_rows(small) == pytest.approx(1 / 8, rel=0.01)
    assert of_rows(large) > 0.5


def test_a_tile_that_does_not_fit_is_never_chosen() -> None:
    huge = Tile(256, 256, 128, 8, 4)
    found = predict("down", huge, QWEN, load_of(QWEN, 8192), H200)
    assert (found.seconds, found.bound, found.blocks) == (inf, "does not fit", 0)
    usual, wide = (predict("down", way, QWEN, load_of(QWEN, 8192), H200).seconds for way in (NARROW, WIDE))
    best = best_way("down", NARROW, (huge, WIDE), QWEN, load_of(QWEN, 8192), H200, margin=1.1)
    assert (best.way, best.gain) == (WIDE, usual / wide)


def test_a_way_that_is_hardly_faster_does_not_replace_the_usual_one() -> None:
    usual, wide = (predict("down", way, QWEN, load_of(QWEN, 8192), H200).seconds for way in (NARROW, WIDE))
    for margin, way in ((0.999 * usual / wide, WIDE), (1.001 * usual / wide, NARROW)):
        assert best_way("down", NARROW, (WIDE,), QWEN, load_of(QWEN, 8192), H200, margin=margin).way == way


def test_blocks_per_multiprocessor_are_those_that_compiling_showed() -> None:
    def blocks(kernel: str, tile: Tile, bulk: bool = False) -> int:
        return estimated_blocks(kernel, Schedule.of(tile, bulk), QWEN, H200)

    deep = Tile(128, 128, 64, 8, 4)
    assert [blocks("down", tile) for tile in (deep, NARROW, WIDE)] == [1, 2, 1]
    assert [blocks("up_backward", tile) for tile in (deep, NARROW, WIDE)] == [1, 2, 1]
    assert blocks("up", Tile(128, 256, 64, 8, 4)) == 1
    assert blocks("down", WIDE, bulk=True) == 1
    assert blocks("up_weights", NARROW) == 2


def test_fewer_buffers_expose_a_load_s_latency_and_blocks_hide_it() -> None:
    def latency(buffers: int, blocks: int) -> float:
        loop = Schedule(rows=128, columns=128, depth=64, warps=8, buffers=buffers)
        return step_of(loop, QWEN, H200, 132, blocks).latency

    assert latency(2, 1) == H200.load_latency == 2 * latency(3, 1) == 2 * latency(2, 2)


def test_the_instruction_s_width_decides_what_shared_memory_must_deliver() -> None:
    """At the matrix units' peak, 64 x 256 instructions read 80 bytes a clock, and those of 64 x 128 read 96."""
    one, two = (Schedule(rows=128, columns=256, depth=64, warps=8, buffers=4, dots=dots) for dots in (1, 2))
    peak = 2 * 128 * 256 * 64 / 4096
    fills = (128 + 256) * 64 * 2
    clocks = [step_of(loop, QWEN, H200, 132, 1).shared * H200.shared_width - fills for loop in (one, two)]
    assert clocks == [80 * peak, 96 * peak]


def test_few_tiles_leave_multiprocessors_idle() -> None:
    found = predict("down", WIDE, replace(QWEN, experts=1, k=1), Load(counts=(128,)), H200)
    # 8 tiles on 132 multiprocessors.
    assert found.parts["waves"] > found.parts["matrix"]


def test_one_large_expert_bounds_a_gradient_of_weights() -> None:
    layer = replace(QWEN, experts=16, hidden=256, dim=256, k=1)
    even, odd = Load(counts=(1024,) * 16), Load(counts=(16_384 - 15 * 16, *(16,) * 15))
    times = [predict("down_weights", NARROW, layer, load, H200).seconds for load in (even, odd)]
    assert times[1] > 5 * times[0]


def test_a_library_s_tile_is_that_of_pytorch_s_dispatch() -> None:
    assert [schedule_of_library("up", QWEN, load_of(QWEN, tokens)) for tokens in (1024, 2048, 4096)] == [
        SMALL,
        MEDIUM,
        LARGE,
    ]
    assert schedule_of_library("up_weights", QWEN, load_of(QWEN, 64)) == LARGE


def test_a_library_s_product_needs_passes_around_it() -> None:
    load = load_of(QWEN, 8192)
    launches = {kernel: predict(kernel, "grouped_mm", QWEN, load, H200).launches for kernel in KERNELS}
    assert launches == {"up": 3, "down": 1, "down_backward": 3, "down_weights": 2, "up_backward": 1, "up_weights": 2}
    assert predict("down_weights", "grouped_mm", QWEN, load, H200, rows_at_hand=True).launches == 1
    copied = replace(QWEN, k=0)
    assert predict("up", "grouped_mm", copied, load, H200).launches == 2


def test_a_library_s_product_and_its_passes_move_whole_tensors() -> None:
    load, rows = Load(counts=(64,) * 128), 64 * 128
    matrix, tokens, copied, hidden, activated = (
        2 * 128 * 768 * 2048,
        rows / 8 * 2048,
        rows * 2048,
        rows * 1536,
        rows * 768,
    )
    found = predict("up", "grouped_mm", QWEN, load, H200).moved
    assert found == 2 * (tokens + copied + (copied + matrix + hidden) + hidden + activated)
    found = predict("down_weights", "grouped_mm", QWEN, load, H200, rows_at_hand=True).moved
    assert found == 2 * (copied + activated + matrix / 2)


def test_libraries_gain_most_where_the_hidden_width_is_large() -> None:
    """Gathers and activations are linear in the hidden width, products grow with both widths."""

    def gain(layer: ExpertLayer) -> float:
        load = load_of(layer, 8192)
        ours, theirs = (predict("up", way, layer, load, H200, bulk=True).seconds for way in (WIDE, "grouped_mm"))
        return ours / theirs

    assert gain(MIXTRAL) > 1.1 > gain(QWEN)


def test_without_a_graph_a_small_layer_takes_as_long_as_its_launches() -> None:
    small = replace(QWEN, experts=8, dim=256, hidden=128, k=2)
    layer = predict_layer(every(NARROW), small, load_of(small, 64), H200)
    launches = sum(each.prediction.launches for each in layer.kernels if each.direction == "forward")
    assert launches == 9
    assert layer.seconds("forward", graph=False) == pytest.approx(launches * H200.host_launch)
    assert layer.seconds("forward") < layer.seconds("forward", graph=False)


def test_flops_of_a_layer_are_those_of_the_convention() -> None:
    layer = predict_layer(every(WIDE), MIXTRAL, load_of(MIXTRAL, 8192), H200)
    assert layer.flops("forward") == pytest.approx(6 * 8192 * 2 * 4096 * 14336)
    assert layer.flops("backward") == pytest.approx(12 * 8192 * 2 * 4096 * 14336)
    products = sum(each.prediction.flops for each in layer.kernels)
    assert products == pytest.approx(layer.flops("forward") + layer.flops("backward"))


def test_loops_and_tiles_predict_the_same() -> None:
    load = load_of(QWEN, 1024)
    assert predict_schedule("up", Schedule.of(WIDE), QWEN, load, H200) == predict("up", WIDE, QWEN, load, H200)
