"""ZeRO on gloo ranks: training as the unsharded model trains, with a rank's parts only."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from support.plans import moe_plan
from support.ranks import contract
from support.ranks.gloo_pool import GlooPool
from support.ranks.training import gradients_of, train_as_rank, train_unsharded
from test_contract import BOUNDS, CLAIMS
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.multiprocessing.reductions import StorageWeakRef

import moec
from moec.passes.ir import local_slices
from moec.runtime.errors import JobError
from moec.runtime.job.gathering import Gathering
from moec.runtime.job.groups import plain_name
from moec.runtime.job.reference import reference
from moec.runtime.job.watch import collective

TOLERANCE = 1e-4


@cache
def unsharded(**options: Any) -> dict[str, Any]:
    return train_unsharded(dict(options))


def require_same_training(results: list[dict[str, Any]], expected: dict[str, Any], plan: Any) -> None:
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE)
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-3)
    assert expected["losses"][-1] < expected["losses"][1] - 0.1, "the run learns nothing, so it proves nothing"
    for name, data in plan.parameters.items():
        whole = expected["parameters"][name]
        for rank, result in enumerate(results):
            index = local_slices(data.shape, data.master, plan.meshes[data.mesh], rank)
            torch.testing.assert_close(result["parameters"][name], whole[index], rtol=1e-2, atol=1e-3)


DEGREES: dict[str, dict[str, Any]] = {
    "dp 2": {"ranks": 2, "ep": 1},
    "edp 2, ep 2": {"ranks": 4, "ep": 2},
    "dp 2, tp 2, ep 2": {"ranks": 4, "tp": 2, "ep": 2},
}


@pytest.mark.parametrize(
    ("zero", "degrees"),
    [
        (2, "dp 2, tp 2, ep 2"),  # test_twenty_steps.py has stages 1 and 3
        pytest.param(1, "edp 2, ep 2", marks=pytest.mark.slow),
        pytest.param(3, "dp 2, tp 2, ep 2", marks=pytest.mark.slow),
        pytest.param(3, "dp 2", marks=pytest.mark.slow),
        pytest.param(3, "edp 2, ep 2", marks=pytest.mark.slow),
    ],
)
def test_every_stage_gives_the_unsharded_loss_curve(gloo: GlooPool, zero: int, degrees: str):
    options = {"batch": 8, "optimizer": "adamw(lr = 3e-3)"}
    sharded = {**options, **DEGREES[degrees], "zero": zero}
    results = gloo.run(sharded["ranks"], train_as_rank, sharded)
    require_same_training(results, unsharded(**options), moe_plan(**sharded))


MORE: dict[str, dict[str, Any]] = {
    "odd sizes": {"ranks": 4, "ep": 2, "dim": 24, "expert": "swiglu(7)", "ffn": "gelu(30)", "bias": "all"},
    "nothing to cut": {"ranks": 3, "ep": 1, "batch": 6, "dim": 16},
    "tied, positions": {"ranks": 4, "ep": 2, "model": "embedding = tokens(tied = true, positions = learned)"},
    "a degree per layer": {"ranks": 4, "tp": 2, "ep": 4, "mixtures": ((8, 2), (4, 4), (8, 1))},
    "repeated kv heads": {"ranks": 8, "tp": 4, "ep": 2},
    "dp 4, tp 2": {"ranks": 8, "tp": 2, "ep": 4, "sequence_parallel": False},
    "jitter": {"ranks": 4, "ep": 2, "gate": "topk(2, jitter = 0.2)"},
    "frozen layers": {
        "ranks": 4,
        "tp": 2,
        "ep": 2,
        "expert": "lora(3, alpha = 6)",
        "beside": "shared = swiglu(8)",
        "optimizer": "adamw(lr = 3e-3); frozen = [attention, norms, ffn, shared]",
    },
    "capacity": {"ranks": 4, "ep": 2, "beside": "capacity = factor(1.25); group = sequence"},
}


@pytest.mark.slow
@pytest.mark.parametrize("degrees", MORE)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_every_stage_gives_the_unsharded_loss_curve_at_length(gloo: GlooPool, zero: int, degrees: str):
    model = {name: value for name, value in MORE[degrees].items() if name not in DEGREE_WORDS}
    options = {"batch": 8, "optimizer": "adamw(lr = 3e-3)", **model}
    sharded = {**options, **MORE[degrees], "zero": zero}
    results = gloo.run(sharded["ranks"], train_as_rank, sharded, timeout=120.0)
    require_same_training(results, unsharded(**options), moe_plan(**sharded))


DEGREE_WORDS = ("ranks", "tp", "ep", "sequence_parallel")


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_compiled_model_trains_with_zero(gloo: GlooPool, zero: int):
    options = {"batch": 8, "optimizer": "adamw(lr = 3e-3)"}
    sharded = {**options, "ranks": 2, "ep": 1, "zero": zero}
    results = gloo.run(2, train_as_rank, sharded, None, 4, "aot_eager", timeout=120.0)
    for result in results:
        assert result["losses"] == pytest.approx(unsharded(**options)["losses"][:4], abs=TOLERANCE)


OFTEN = ("a step after an exception in backward", "accumulation by hand")
"""Claims that are tried at stage 1 too; `make test-slow` tries all of them at every stage."""

PLAINEST = (
    "a plain backward pass",
    "torch.autograd.grad, which leaves .grad alone",
    "a loss by hand, with the balance terms",
)
"""Loss curves have these at every stage, by `job.step`; they are tried in the slow part alone."""


def often(claim: str, zero: int) -> bool:
    return claim not in PLAINEST if zero == 3 else zero == 1 and claim in OFTEN


TRIED = [
    pytest.param(claim, zero, marks=() if often(claim, zero) else pytest.mark.slow)
    for claim in CLAIMS
    for zero in (1, 2, 3)
]


@pytest.mark.parametrize(("claim", "zero"), TRIED)
def test_a_job_with_zero_behaves_as_any_module(gloo: GlooPool, claim: str, zero: int):
    options = {**contract.FOUR, "zero": zero}
    errors = gloo.run(4, contract.off, options, CLAIMS[claim], initialize=False)
    assert max(errors) < BOUNDS["fp32"]


def gradients_of_one_token(options: dict[str, Any]) -> float:
    """The error of a job's gradients where every token of the batch has one id, and so one expert."""
    torch.set_num_threads(1)
    plan = moe_plan(**options)
    tokens = torch.full(contract.BATCH, 3)
    model = reference(plan.spec, seed=1)
    model(tokens, tokens).loss.backward()
    with moec.launch(plan, device="cpu") as job:
        sharded = job.build(seed=1)
        for microbatches in (1, 2):
            sharded.zero_grad()
            job.step(sharded, *contract.mine(job, tokens, tokens), microbatches=microbatches)
        wanted = contract.parts_of(gradients_of(model), job)
        return contract.distance(gradients_of(sharded), wanted)


@pytest.mark.parametrize("zero", [2, 3])
def test_zero_does_not_wait_for_unused_experts(gloo: GlooPool, zero: int):
    """ds#4966: ranks without an expert's tokens did not gather its weights, and the others waited."""
    options = {"ranks": 4, "ep": 2, "zero": zero, "gate": "hash(1)", "balance": "[]"}
    assert max(gloo.run(4, gradients_of_one_token, options, initialize=False)) < BOUNDS["fp32"]


# ---- what is kept, and the order of collectives ------------------------------------------------------


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
    torch.set_num_threads(1)
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
    options = {"ranks": 4, "ep": 2, "zero": zero, "mixtures": ((8, None),) * 6}
    found = gloo.run(4, gathers_of_passes, options, initialize=False)[0]
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
    torch.set_num_threads(1)
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


@pytest.mark.parametrize("zero", [2, 3])
def test_all_ranks_call_collectives_in_one_order_and_at_most_one_layer_ahead(gloo: GlooPool, zero: int):
    options = {"ranks": 4, "ep": 2, "zero": zero, "depth": 4}
    found = gloo.run(4, order_of_collectives, options, initialize=False)
    assert len(found[0]["order"]) > 300
    assert all(each["order"] == found[0]["order"] for each in found)
    assert len({each["loss"] for each in found}) == 1
    assert found[0]["most"] == 2  # the layer that computes and the next one


def placements_of(options: dict[str, Any]) -> dict[str, Any]:
    """What `get_state_dict` gives of the model and of its optimizer: placements and whole values."""
    torch.set_num_threads(1)
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        job.step(model, *contract.mine(job, *contract.batch()))
        optimizer.step()
        states, optimizers = get_state_dict(model, optimizer)
        return {
            "placements": {name: tuple(map(str, tensor.placements)) for name, tensor in states.items()},
            "moments": {
                name: tuple(map(str, state["exp_avg"].placements)) for name, state in optimizers["state"].items()
            },
            "whole": {name: tensor.full_tensor() for name, tensor in states.items()},
        }


def test_state_dicts_hold_dtensors_of_the_masters_and_the_same_values_at_every_stage(gloo: GlooPool):
    options: dict[str, Any] = {"ranks": 4, "tp": 2, "ep": 2}
    found = {zero: gloo.run(4, placements_of, {**options, "zero": zero}, initialize=False)[0] for zero in (0, 1, 3)}
    assert found[1]["placements"] == found[1]["moments"] == found[3]["placements"]
    assert found[1]["placements"]["layers.1.attention.q.weight"] == ("S(1)", "S(0)")  # dp, tp
    assert found[0]["placements"]["layers.1.attention.q.weight"] == ("R", "S(0)")
    assert found[1]["placements"]["layers.1.moe.experts.up.weight"] == ("S(1)", "S(0)")  # edp, ep
    for name, tensor in found[0]["whole"].items():
        for zero in (1, 3):
            torch.testing.assert_close(found[zero]["whole"][name], tensor, rtol=0, atol=1e-6)


def losses_around_a_load(options: dict[str, Any]) -> tuple[float, str]:
    """The loss of a pass after other weights were loaded in `job.accumulate`; what a load before backward says."""
    torch.set_num_threads(1)
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model, other = job.build(seed=1), job.build(seed=2)
        tokens, labels = contract.mine(job, *contract.batch())
        with job.accumulate(model, labels, labels):
            model(tokens, labels).loss.backward()
            model.load_state_dict(other.state_dict())
            output = model(tokens, labels)
            output.loss.backward()
        words, late = "", model(tokens, labels).loss
        model.load_state_dict(other.state_dict())
        try:
            late.backward()
        except JobError as error:
            words = str(error)
        return output.loss.item(), words


def test_weights_that_are_loaded_between_passes_are_those_of_the_next_pass(gloo: GlooPool):
    options: dict[str, Any] = {"ranks": 2, "ep": 1}
    found = {zero: gloo.run(2, losses_around_a_load, {**options, "zero": zero})[0] for zero in (0, 1, 3)}
    assert found[1][0] == pytest.approx(found[0][0], abs=1e-6)
    assert found[3][0] == pytest.approx(found[0][0], abs=1e-6)
    assert "MOE0722" in found[0][1]
    assert "MOE0722" in found[3][1]


def words_of_late_backward(options: dict[str, Any], change: str) -> str:
    """What backward says after `change` of the parameters since its forward pass."""
    torch.set_num_threads(1)
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        tokens, labels = contract.mine(job, *contract.batch())
        job.step(model, tokens, labels)
        late = model(tokens, labels).loss
        if change == "step":
            optimizer.step()
        else:
            with torch.no_grad():
                model.get_parameter("layers.1.attention.q.weight").add_(1.0)
        try:
            late.backward()
        except (JobError, RuntimeError) as error:
            return str(error)
        return ""


@pytest.mark.parametrize("change", ["step", "add_"])
@pytest.mark.parametrize(("zero", "dtype"), [(0, "fp32"), (3, "fp32"), (3, "bf16"), (0, "bf16")])
def test_backward_notices_steps_and_changes_where_it_would_use_other_weights(
    gloo: GlooPool, zero: int, dtype: str, change: str
) -> None:
    """Neither fused optimizers nor changes of DTensors change autograd's count of a rank's part."""
    options = {"ranks": 2, "ep": 1, "zero": zero, "dtype": dtype}
    for words in gloo.run(2, words_of_late_backward, options, change):
        assert ("MOE0722" in words) == (words != "") == (zero == 3 or dtype == "fp32"), words


def running_sums_after_backward(options: dict[str, Any]) -> int:
    """The reduce_scatters that the model refers to after a backward pass outside of `job.step`."""
    torch.set_num_threads(1)
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model = job.build(seed=1)
        tokens, labels = contract.mine(job, *contract.batch())
        model(tokens, labels).loss.backward()
        return len(model._microbatches.scattering)


def test_a_backward_pass_leaves_no_sum_in_memory(gloo: GlooPool) -> None:
    assert gloo.run(2, running_sums_after_backward, {"ranks": 2, "ep": 1, "zero": 2}) == [0, 0]


def words_of_hooks_on_one_rank(microbatches: int) -> str:
    torch.set_num_threads(1)
    with moec.launch(moe_plan(ranks=2, ep=2), device="cpu", timeout=60) as job:
        model = job.build(seed=1)
        tokens, labels = contract.mine(job, *contract.batch())
        if job.rank == 1:
            model.get_parameter("layers.1.attention.q.weight").register_hook(lambda gradient: None)
        try:
            job.step(model, tokens, labels, microbatches=microbatches)
        except JobError as error:
            return str(error)
        return ""


def test_a_hook_of_a_parameter_on_one_rank_is_refused_where_it_changes_the_order_of_sums(gloo: GlooPool) -> None:
    assert gloo.run(2, words_of_hooks_on_one_rank, 1) == ["", ""]
    for words in gloo.run(2, words_of_hooks_on_one_rank, 2):
        assert "MOE0713" in words
        assert "ranks differ in which parameters have hooks" in words


def backward_of_changed(which: str) -> str:
    """What backward raises after the tokens or the labels of its forward pass were changed in place."""
    plan = moe_plan(ranks=2, ep=1, zero=3)
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        tokens = torch.arange(16).reshape(2, 8)
        labels = tokens + 1
        loss = model(tokens, labels).loss
        {"tokens": tokens, "labels": labels}[which].zero_()
        with pytest.raises(RuntimeError) as raised:
            loss.backward()
    return str(raised.value)


@pytest.mark.parametrize("which", ["tokens", "labels"])
def test_a_batch_that_is_changed_before_backward_is_an_error(which: str, gloo: GlooPool) -> None:
    for said in gloo.run(2, backward_of_changed, which):
        assert "modified by an inplace operation" in said
