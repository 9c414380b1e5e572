"""`moec tune` in the interpreter: the whole search, on tiny shapes. Its times mean nothing; all else is real.

`test_interpreted.py` runs it, in its own process.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from interpreted import TINY
from support.combinations import some
from torch import Tensor

import moec
from moec.cli import app
from moec.codegen.kernels.kernel_shape import KernelShape
from moec.codegen.kernels.plan_kernels import products_of
from moec.codegen.kernels.product_shapes import ProductShape
from moec.codegen.kernels.stored_tiles import Entry, StoredTiles
from moec.codegen.kernels.tiles import KERNELS, ROW_KERNELS, Kernel, Tile, Ways
from moec.codegen.plan import Plan
from moec.grammar.diagnostics import DiagnosticError
from moec.runtime.backends.triton import triton_experts, triton_tiles
from moec.runtime.backends.triton.libraries.library_rows import Around
from moec.runtime.backends.triton.product_clock import Call, timed
from moec.runtime.backends.triton.triton_launch import Kernels
from moec.runtime.backends.triton.triton_launch import kernels_of as kernels_of_shape
from moec.runtime.tune import tune_trial
from moec.runtime.tune.tune_layer import TunedLayer, agree, random_counts
from moec.runtime.tune.tune_trial import libraries_of
from moec.runtime.tune.tuning import bench_for, tune

assert os.environ.get("TRITON_INTERPRET") == "1"

TOY = 'device "toy" { kind = cuda; memory = 80GB; bandwidth = 1TB/s; peak { fp32 = 1TFLOPS; bf16 = 1TFLOPS } }\n'
OTHER = Ways.parse(
    "up=32x16x16w2s3 down=32x16x16w4s3 down_backward=32x16x16w1s3 down_weights=16x16x16w2s2 "
    "up_backward=32x16x16w2s4 up_weights=16x16x32w1s1"
)
"""Not the default, which has 64 rows."""


ON_TOY = TOY + TINY.replace("device = cpu", 'device = "toy"')


@pytest.fixture
def plan() -> Plan:
    """Of two ranks, whose experts get rows from both."""
    return moec.compile(ON_TOY)


@pytest.fixture
def alone() -> Plan:
    """Of one rank, which this process can be."""
    return moec.compile(ON_TOY.replace("size = 2", "size = 1").replace("ep = 2", "ep = 1"))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[Tile]:
    """Records the tiles of products that run from here on."""
    seen: set[Tile] = set()

    def noted(shape: KernelShape, x: Tensor) -> Kernels:
        if isinstance(shape, ProductShape):
            seen.update(tile for tile in (shape.tile, shape.backward, shape.weights) if tile)
        return kernels_of_shape(shape, x)

    monkeypatch.setattr(triton_experts, "kernels_of", noted)
    return seen


@pytest.fixture
def one_height(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of the default's height alone are tried."""
    monkeypatch.setattr(tune_trial, "heights", lambda default: (default.rows,))


def with_tiles(plan: Plan, device: str = "interpreter", ways: Ways = OTHER) -> Plan:
    entries = tuple(Entry.of(one.key, ways, None) for one in products_of(plan))
    return replace(plan, tiles=StoredTiles(device=device, triton=None, entries=entries))


def tiles_of(ways: Ways) -> set[Tile]:
    return {tile for tile in map(ways.tile, KERNELS) if tile is not None}


def step(plan: Plan) -> None:
    """One training step of the only rank."""
    with moec.launch(plan, device="cpu") as job:
        model = job.build()
        tokens = torch.arange(8).view(2, 4)
        job.step(model, tokens, tokens)


@pytest.mark.usefixtures("one_height")
def test_tuning_stores_the_winner_in_the_plan_and_a_training_step_runs_it(
    alone: Plan, tmp_path: Path, launched: set[Tile]
) -> None:
    folder, out = alone.save(tmp_path / "toy.plan"), tmp_path / "tuned.plan"
    done = CliRunner().invoke(app, ["tune", str(folder), "--output", str(out), "--tries", "2"])
    assert done.exit_code == 0, done.output
    assert "4 × 8 × 8 gated, fp32, few rows" in done.stdout
    assert len(launched) > 2
    assert moec.load(folder) == alone

    tuned = moec.load(out, trust_nothing=True)
    assert tuned.tiles is not None
    (entry,) = tuned.tiles.entries
    assert tuned.tiles.device == "interpreter"
    assert entry.measured is not None
    assert entry.measured.rows == 16
    assert entry.measured.ms <= entry.measured.default_ms
    assert tiles_of(entry.ways) <= launched

    launched.clear()
    step(tuned)
    assert launched == tiles_of(entry.ways)


@pytest.mark.usefixtures("one_height")
def test_a_plan_is_tuned_in_place_and_again(plan: Plan, tmp_path: Path) -> None:
    folder = with_tiles(plan).save(tmp_path / "toy.plan")
    done = CliRunner().invoke(app, ["tune", str(folder), "--tries", "1"])
    assert done.exit_code == 0, done.output
    again = moec.load(folder).tiles
    assert again is not None
    # The default is the untuned tile, not the last tuning's.
    (found,) = tune(with_tiles(plan), max_tiles=1).results
    assert found.default.rows == 64
    assert again.entries[0].measured is not None


@pytest.mark.usefixtures("one_height")
@pytest.mark.parametrize("ep", some([1, 2], [2]))
def test_experts_with_biases_are_tuned_with_them(ep: int) -> None:
    plan = moec.compile(ON_TOY.replace("swiglu(8)", "swiglu(8, bias = true)").replace("ep = 2", f"ep = {ep}"))
    (products,) = products_of(plan)
    results = TunedLayer(products, torch.device("cpu")).results(OTHER)
    experts = 4 // ep
    assert [tuple(grad.shape) for grad in results[-2:]] == [(experts, 2, 8), (experts, 8)]
    assert all(grad.abs().min() > 0 for grad in results[-2:])
    (found,) = tune(plan, max_tiles=2).results
    assert found.tried("up") > 1
    assert found.wrong == 0


def test_a_plans_tiles_are_in_force_while_its_job_runs_and_not_beyond(alone: Plan, launched: set[Tile]) -> None:
    step(alone)
    untuned = set(launched)
    assert not untuned & tiles_of(OTHER)
    launched.clear()
    step(with_tiles(alone))
    assert launched == tiles_of(OTHER)
    launched.clear()
    step(alone)
    assert launched == untuned


def test_each_of_two_models_that_train_in_turns_runs_its_own_tiles(alone: Plan, launched: set[Tile]) -> None:
    tokens = torch.arange(8).view(2, 4)
    with moec.launch(alone, device="cpu") as job, moec.launch(with_tiles(alone), device="cpu") as tuned_job:
        model, tuned = job.build(), tuned_job.build()
        launched.clear()
        loss, tuned_loss = (one(tokens, tokens).loss for one in (model, tuned))
        untuned = launched - tiles_of(OTHER)
        assert launched == untuned | tiles_of(OTHER)
        launched.clear()
        loss.backward()
        assert launched == untuned
        launched.clear()
        tuned_loss.backward()
        assert launched == tiles_of(OTHER)


def test_a_model_that_was_built_on_meta_runs_its_own_tiles(alone: Plan, launched: set[Tile]) -> None:
    with moec.launch(with_tiles(alone), device="cpu") as job:
        model = job.build("meta").to_empty(device="cpu")
        for state in (*model.parameters(), *model.buffers()):
            state.detach().zero_()  # fresh memory may hold NaN
        launched.clear()
        model(torch.arange(8).view(2, 4))
    assert launched == tiles_of(OTHER)


def test_tiles_of_another_device_are_not_taken(alone: Plan, launched: set[Tile]) -> None:
    triton_tiles._warn_of_other_device.cache_clear()
    with pytest.warns(UserWarning, match="tuned on h100, and this device is interpreter"):
        step(with_tiles(alone, device="h100"))
    assert launched
    assert not launched & tiles_of(OTHER)


def test_verify_proves_a_plan_with_its_own_tiles(plan: Plan, launched: set[Tile]) -> None:
    report = moec.verify(with_tiles(plan))
    assert report.ok
    # float64 runs the rule's; the report in float32 has run the plan's own, forward and backward.
    assert launched > tiles_of(OTHER)
    assert report.rounding is not None
    assert report.rounding.ok


@pytest.mark.usefixtures("one_height")
def test_a_way_that_gives_other_numbers_never_wins(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    product, others = TunedLayer.product, []

    def other_numbers(self: TunedLayer, ways: Ways, kernel: Kernel) -> tuple[float, tuple[Tensor, ...]]:
        taken, (out, *gradients) = product(self, ways, kernel)
        if ways == self.default():
            return taken, (out, *gradients)
        others.append(ways)
        return taken / 10, (out + 0.01, *gradients)

    monkeypatch.setattr(TunedLayer, "product", other_numbers)
    (found,) = tune(plan, max_tiles=2).results
    assert found.best == found.default
    assert found.wrong == len(others) == 6
    assert [found.tried(kernel) for kernel in KERNELS] == [1] * 6


def test_ties_are_the_defaults_and_the_fastest_of_the_rest_wins(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    (products,) = products_of(plan)
    layer = TunedLayer(products, torch.device("cpu"))
    default, exact = layer.default(), layer.results(layer.default())
    monkeypatch.setattr(tune_trial, "heights", lambda _: (64, 32))
    monkeypatch.setattr(tune_trial, "around", lambda kernel, d, rows, *_: nearby(default, kernel, rows))
    winner = replace(OTHER, down_weights=default.down_weights, up_weights=default.up_weights)
    for faster, wins in ((1.0, False), (0.99, False), (0.5, True)):

        def alone(_: TunedLayer, ways: Ways, kernel: Kernel, faster: float = faster) -> tuple[float, Any]:
            return faster if ways.of(kernel) == winner.of(kernel) != default.of(kernel) else 1.0, exact

        def whole(_: TunedLayer, ways: Ways, faster: float = faster) -> float:
            return faster if ways == winner else 1.0

        monkeypatch.setattr(TunedLayer, "product", alone)
        monkeypatch.setattr(TunedLayer, "milliseconds", whole)
        (found,) = tune(plan).results
        assert found.best == (winner if wins else default)
        assert (found.default_ms, found.best_ms) == (1.0, faster if wins else 1.0)


def test_each_product_gets_the_tile_that_is_fastest_for_it_alone(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    (products,) = products_of(plan)
    layer = TunedLayer(products, torch.device("cpu"))
    exact = layer.results(layer.default())

    def wide_or_narrow(self: TunedLayer, ways: Ways, kernel: Kernel) -> tuple[float, tuple[Tensor, ...]]:
        tile = ways.tile(kernel)
        assert tile is not None
        # Products of up run best with many buffers, those of down with few; 32 rows are best for both.
        taken = tile.stages if kernel.startswith("down") else 10 - tile.stages
        return taken + abs(tile.rows - 32) * (kernel in ROW_KERNELS) + 1.0, exact

    monkeypatch.setattr(TunedLayer, "product", wide_or_narrow)
    monkeypatch.setattr(TunedLayer, "milliseconds", lambda self, ways: 2.0 if ways == self.default() else 1.0)
    (found,) = tune(plan, max_tiles=2).results
    tiles = {kernel: found.best.tile(kernel) for kernel in KERNELS}
    assert all(tile is not None for tile in tiles.values())
    assert {tile.rows for kernel, tile in tiles.items() if tile and kernel in ROW_KERNELS} == {32}
    assert all(
        found.times[kernel, tile] == min(of for (other, _), of in found.times.items() if other == kernel)
        for kernel, tile in tiles.items()
        if tile
    )
    assert len({tile.stages for tile in tiles.values() if tile}) > 1


def test_the_clock_of_a_product_gets_that_product_alone(plan: Plan) -> None:
    (products,) = products_of(plan)
    layer = TunedLayer(products, torch.device("cpu"))
    exact = layer.results(layer.default())
    for kernel in KERNELS:
        calls: list[Call] = []

        def thrice(call: Call, calls: list[Call] = calls) -> None:
            calls += [call] * 3
            for _ in range(3):
                call()

        with timed(kernel, thrice):
            assert all(map(torch.equal, layer.results(layer.default()), exact))
        assert len(calls) == 3


def test_a_librarys_product_is_timed_with_the_copy_of_its_rows(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOEC_BACKEND")
    (products,) = products_of(plan)
    layer, copies = TunedLayer(products, torch.device("cpu")), []
    ways = Ways(*["grouped_mm"] * 6)
    exact, gather = layer.results(ways), Around.gather
    monkeypatch.setattr(Around, "gather", lambda self, rows: copies.append(1) or gather(self, rows))
    layer.results(ways)
    once = len(copies)
    for kernel, more in (("up", 2), ("down", 0), ("down_weights", 3)):  # up makes the first copy itself
        copies.clear()
        with timed(kernel, lambda call: [call() for _ in range(3)]):
            assert all(map(torch.equal, layer.results(ways), exact))
        assert len(copies) == once + more


def nearby(default: Ways, kernel: Kernel, rows: int | None) -> list[Tile]:
    """`OTHER`'s tile if its height is tried, else the default's."""
    tile = (OTHER if kernel in ROW_KERNELS and rows == 32 else default).tile(kernel)
    assert tile is not None
    return [tile]


@pytest.mark.usefixtures("one_height")
def test_libraries_are_tried_and_the_fastest_is_stored(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOEC_BACKEND")
    (products,) = products_of(plan)
    bench = bench_for(plan)
    libraries = libraries_of(products, bench.device)
    assert "grouped_mm" in libraries
    product = TunedLayer.product

    def by_library(self: TunedLayer, ways: Ways, kernel: Kernel) -> tuple[float, tuple[Tensor, ...]]:
        _, results = product(self, ways, kernel)
        return 1.0 if kernel == "down" and ways.down == "grouped_mm" else 2.0, results

    monkeypatch.setattr(TunedLayer, "product", by_library)
    monkeypatch.setattr(TunedLayer, "milliseconds", lambda self, ways: 2.0 if ways == self.default() else 1.0)
    (found,) = tune(plan, max_tiles=1).results
    assert found.wrong == 0
    assert all((kernel, library) in found.times for kernel in KERNELS for library in libraries)
    assert found.best == found.default.with_way("down", "grouped_mm")
    assert found.entry.down == "grouped_mm"

    # Around a library that is the default, tiles are tried too.
    monkeypatch.setattr(TunedLayer, "default", lambda _: found.best)
    (again,) = tune(plan, max_tiles=1).results
    assert again.tried("down") > len(libraries)


def test_where_one_library_is_forced_nothing_is_measured(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEC_BACKEND", "grouped_mm")
    with pytest.raises(DiagnosticError, match=r"MOE0706.*every product computed by it"):
        tune(plan)


def test_agreement_is_within_rounding_and_never_with_nan() -> None:
    (exact,) = (torch.tensor([1.0, -4.0]),)
    four = (exact, exact, exact, exact)
    assert agree((exact + 3e-5, exact, exact, exact), four, "fp32")
    assert not agree((exact, exact, exact, exact + 5e-5), four, "fp32")
    assert agree((exact, exact + 0.06, exact, exact), four, "bf16")
    assert not agree((exact, exact, torch.tensor([1.0, torch.nan]), exact), four, "bf16")


def test_loads_are_random_but_the_same_each_time_and_add_up() -> None:
    first, second = (random_counts(4096, 2, 4, torch.Generator().manual_seed(0)) for _ in range(2))
    assert first.equal(second)
    assert first.shape == (2, 4)
    assert first.sum() == 4096
    assert first.unique().numel() > 4
    assert (first - 512).abs().max() < 128


def test_bf16_is_not_tuned_in_the_interpreter() -> None:
    other = moec.compile(ON_TOY.replace("fp32\n", "bf16\n"))
    with pytest.raises(DiagnosticError, match=r"MOE0706.*interpreter computes bf16 wrongly"):
        tune(other)
