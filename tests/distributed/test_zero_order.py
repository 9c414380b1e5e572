"""ZeRO on gloo ranks: which weights are in memory when, and the order of collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.plans import moe_plan
from support.ranks import contract
from support.ranks.contract import MIXED
from support.ranks.gloo_pool import GlooPool
from torch.multiprocessing.reductions import StorageWeakRef

import moec
from moec.runtime.ranks.groups import plain_name
from moec.runtime.ranks.watch import collective
from moec.runtime.weights.gathering import Gathering

FOUR = {"ranks": 4, "ep": 2}


class Gathers:
    """Notes the weights that jobs of this process gather, by weak references: how many are in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.storages: list[StorageWeakRef] = []
        self.begun, self.most = 0, 0
        finish, begin = Gathering.finish, Gathering.__init__

        def finishing(gathering: Gathering) -> list[torch.Tensor]:
            weights = finish(gathering)
            cut = (w for w, spec in zip(weights, gathering._specs, strict=True) if spec.zero is not None)
            self.storages += [StorageWeakRef(weight.untyped_storage()) for weight in cut]
            self.most = max(self.most, self.alive())
            return weights

        def beginning(gathering: Gathering, *arguments: Any) -> None:
            self.begun += 1
            begin(gathering, *arguments)

        monkeypatch.setattr(Gathering, "finish", finishing)
        monkeypatch.setattr(Gathering, "__init__", beginning)

    def alive(self) -> int:
        return sum(not storage.expired() for storage in self.storages)


def gathers_of_passes(options: dict[str, Any]) -> dict[str, Any]:
    """How many weights are in memory at several times, and how many gathers were begun."""
    found: dict[str, Any] = {}
    with moec.launch(moe_plan(**options), device="cpu") as job, pytest.MonkeyPatch.context() as monkeypatch:
        model = job.build(seed=1)
        found["layer"] = sum(spec.zero is not None for spec in model.layers[1]._weights.specs)
        given = contract.mine(job, *contract.batch())
        gathers = Gathers(monkeypatch)
        loss = contract.plain(model, *given)
        found["after forward"], found["in forward"], gathers.most = gathers.alive(), gathers.most, 0
        found["begun in forward"], gathers.begun = gathers.begun, 0
        loss.backward()
        found["after backward"], found["in backward"], gathers.most = gathers.alive(), gathers.most, 0
        found["begun in backward"], gathers.begun = gathers.begun, 0
        with torch.no_grad():
            model(given[0])
        found["without gradients"], found["begun without gradients"] = gathers.most, gathers.begun
        gathers.begun = 0
        job.step(model, *given, microbatches=2)
        found["begun in a step of two"], found["after a step"] = gathers.begun, gathers.alive()
    return found


@pytest.mark.parametrize("zero", [1, 3])
def test_stage_3_keeps_two_layers_at_most_and_stage_1_gathers_once_per_step(gloo: GlooPool, zero: int):
    options = {"ranks": 2, "ep": 1, "zero": zero, "mixtures": ((8, None),) * 6}
    found = gloo.run(2, gathers_of_passes, options, initialize=False)[0]
    units = 9  # the embedding, seven layers, the last norm with the head
    assert found["begun in forward"] == found["begun without gradients"] == units
    assert found["after backward"] == found["after a step"] == 0
    assert found["without gradients"] <= 2 * found["layer"]
    if zero == 1:
        assert found["after forward"] > 6 * found["layer"]
        assert found["begun in backward"] == 0
        assert found["begun in a step of two"] == units
    else:
        assert found["after forward"] == 0
        assert max(found["in forward"], found["in backward"]) <= 2 * found["layer"]
        # Backward needs no weight of the embedding: a gather of ids saves none.
        assert found["begun in backward"] == units - 1
        assert found["begun in a step of two"] == 2 * (2 * units - 1)


class Skipping(torch.nn.Module):
    """A layer that runs only in every other pass."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer, self.passes = layer, 0

    def forward(self, *inputs: Any) -> Any:
        self.passes += 1
        return self.layer(*inputs) if self.passes % 2 else (inputs[0], *self.nothing)


class Elsewhere(torch.nn.Module):
    """A user's module in a dense layer's place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5


def order_of_collectives(options: dict[str, Any]) -> dict[str, Any]:
    """Every collective that this rank begins or waits for, while layers are replaced, skipped or raise errors."""
    order: list[tuple[str, str, bool]] = []
    with moec.launch(moe_plan(**options), device="cpu") as job, pytest.MonkeyPatch.context() as monkeypatch:
        enter = collective.__enter__

        def entering(self: collective) -> Any:
            order.append((self._name, plain_name(self._group), self._begins))
            return enter(self)

        monkeypatch.setattr(collective, "__enter__", entering)
        model = job.build(seed=1)
        given = contract.mine(job, *contract.batch())
        model.layers[0] = Elsewhere()
        job.step(model, *given, microbatches=2)
        undisturbed = len(order)
        handle = model.layers[2].register_forward_hook(lambda *_: raise_out_of_memory())
        with pytest.raises(torch.OutOfMemoryError):
            job.step(model, *given)
        handle.remove()
        skipping = Skipping(model.layers[1])
        with torch.no_grad():
            results = model.layers[1](torch.zeros(*given[0].shape, 16))
            skipping.nothing = tuple(torch.zeros_like(each) for each in results[1:])
        model.layers[1] = skipping
        for _ in range(3):
            model.zero_grad()
            job.step(model, *given)
        for parameter in model.layers[2].parameters():
            parameter.requires_grad_(False)
        loss = job.step(model, *given).item()
    ahead = most = 0
    for name, group, begins in order[:undisturbed]:
        if (name, group) == ("all_gather", "dp"):
            ahead += 1 if begins else -1
            most = max(most, ahead)
    return {"order": order, "most": most, "loss": loss}


def raise_out_of_memory() -> None:
    raise torch.OutOfMemoryError("boom")


@pytest.mark.parametrize(
    ("options", "zero"),
    [
        ({**MIXED, "mixtures": ((8, 2), (8, 1), (8, 2))}, 2),
        ({**FOUR, "depth": 4}, 3),
        pytest.param({**FOUR, "depth": 4}, 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_all_ranks_call_collectives_in_one_order_and_at_most_one_layer_ahead(
    gloo: GlooPool, options: dict[str, Any], zero: int
) -> None:
    found = gloo.run(options["ranks"], order_of_collectives, {**options, "zero": zero}, initialize=False)
    assert len(found[0]["order"]) > 200
    assert all(each["order"] == found[0]["order"] for each in found)
    assert len({each["loss"] for each in found}) == 1
    assert found[0]["most"] == 2  # the layer that computes and the next one
