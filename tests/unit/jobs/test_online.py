"""`bias = online(rate)`: plans, planted faults, and when a state moves: once per training step, and never otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.combinations import diagonals
from support.inspected_text import inspected
from support.plans import BODY, moe_plan, moe_spec, moe_text
from support.verified import require_equal
from support.wrong_plans import bypass, change_block, change_op
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import moec
from moec.codegen.kernels.plan_kernels import kernels_of
from moec.codegen.kernels.shapes import RouteShape
from moec.codegen.plan import Plan
from moec.driver import compile as compile_source
from moec.grammar import load_text
from moec.runtime.errors import JobError
from moec.runtime.host.reference import reference
from moec.runtime.model.module import PlanModule
from moec.runtime.verify.verification import verify

RATE, UPDATE = 0.01, "update[1..2]"
GATE = f"topk(2, score = sigmoid, normalize = true, bias = online({RATE}))"
BIASED: dict[str, Any] = {"gate": GATE}
ONE: dict[str, Any] = {"ranks": 1, "ep": 1, **BIASED}
NAMES = ["layers.1.moe.gate.bias", "layers.2.moe.gate.bias"]
DEGREES: list[dict[str, Any]] = [
    {"ep": 1},
    {"ep": 4},
    {"ep": 2, "tp": 2},
    {"ep": 4, "tp": 2, "sequence_parallel": False},
    {"ep": 2, "tp": 4},
    {"ranks": 4, "tp": 2, "ep": 4, "mixtures": ((8, 2), (16, None), (8, 1))},
]
CAPACITIES = ["", "capacity = factor(0.7, eval = 1.2)", "capacity = dynamic(max = 0.8)"]
PADDED = "embedding = tokens(padding = 3)"


def batch(seed: int = 0, sequences: int = 8) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(32, (sequences, 8), generator=draw) for _ in range(2))
    return tokens, labels


def biases(model: PlanModule) -> list[Tensor]:
    return [model.get_buffer(name).clone() for name in NAMES]


def moved(bias: Tensor, loads: Tensor) -> Tensor:
    """What the rule makes of a bias."""
    return bias + RATE * (loads.double().mean() - loads).sign().float()


# ---- plans -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "capacity", "degrees"), diagonals(["", PADDED], CAPACITIES, DEGREES))
def test_plans_equal_the_unsharded_model(model: str, capacity: str, degrees: dict[str, Any]) -> None:
    require_equal(moe_plan(model=model, beside=capacity, **BIASED, **degrees))


@pytest.mark.parametrize("gate", ["topk(2, bias = online())", "topk(3, order = after, bias = online(1e-2))"])
def test_plans_of_other_scores_equal_the_unsharded_model_in_bf16_too(gate: str) -> None:
    require_equal(moe_plan(gate=gate, ep=2, tp=2, dtype="bf16"))


def test_a_plan_is_verified_at_toy_widths_too() -> None:
    require_equal(moe_plan(**BIASED), scale=True)


FAULTS: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "a rank updates by its own rows": (lambda p: bypass(bypass(p, UPDATE, "loads.2"), UPDATE, "loads.1"), "move_bias"),
    "ranks of tp are left out": (lambda p: bypass(p, UPDATE, "loads.2"), "move_bias"),
    "ranks of dp are left out": (lambda p: bypass(p, UPDATE, "loads.1"), "move_bias"),
    "another rate": (lambda p: change_op(p, UPDATE, "moved", rate=2 * RATE), "move_bias"),
    "the bias is forgotten": (lambda p: change_op(p, BODY, "p", operands=("logits",), optional=()), "route"),
    "nothing updates": (lambda p: change_block(p, BODY, update=None), ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    plant, op = FAULTS[fault]
    report = verify(plant(moe_plan(ep=2, tp=2, **BIASED)), float32=False)
    assert not report.ok
    assert report.first_difference is not None
    if op:
        assert (report.first_difference.op, report.first_difference.layer[:8]) == (op, "layers.1")
        assert report.first_difference.span == "tiny.moe:11"


def test_the_update_and_the_kernel_that_takes_biases_are_listed(tmp_path: Path) -> None:
    path = moe_plan(ep=2, tp=2, **BIASED).save(tmp_path / "p.plan")
    text = inspected(path)
    assert "all_reduce %loads.1" in text[text.index(UPDATE) :]
    assert f"moe.gate.bias            fp32[8]  updated by {UPDATE}" in inspected(path, 0)
    assert moec.load(path) == moe_plan(ep=2, tp=2, **BIASED)

    def biased(gate: str) -> set[bool]:
        text = moe_text(gate=gate, dim=64, expert="swiglu(64)").replace("device = cpu", "device = h100")
        shapes = {kernel.shape for kernel in kernels_of(compile_source(load_text(text).unwrap()))}
        return {shape.biased for shape in shapes if isinstance(shape, RouteShape)}

    assert biased(GATE.replace(f", bias = online({RATE})", "")) == {False}
    assert biased(GATE) == {False, True}  # backward needs no biases


# ---- when a state moves ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("microbatches", "custom_loss"), diagonals([1, 3, 8], [False, True]))
def test_a_step_moves_each_bias_once_by_the_rows_of_all_its_micro_batches(microbatches: int, custom_loss: bool) -> None:
    with moec.launch(moe_plan(**ONE), device="cpu") as job:
        model = job.build(seed=1)
        before = biases(model)
        for step in range(3):
            tokens, labels = batch(step)
            probe = copy.deepcopy(model).eval()
            probe(tokens)
            loss = (lambda logits, labels: logits.float().square().sum()) if custom_loss else None
            job.step(model, tokens, labels, microbatches=microbatches, loss=loss)
            wanted = [moved(b, probe.expert_counts[layer]) for layer, b in enumerate(before, start=1)]
            before = biases(model)
            assert all(torch.equal(found, want) for found, want in zip(before, wanted, strict=True))
        assert not torch.equal(*before)


def test_accumulating_by_hand_moves_them_once_at_its_end() -> None:
    with moec.launch(moe_plan(**ONE), device="cpu") as job:
        model, (tokens, labels) = job.build(seed=1), batch()
        other = copy.deepcopy(model)
        job.step(other, tokens, labels, microbatches=2)
        with job.accumulate(model, *labels.chunk(2)):
            for part in zip(tokens.chunk(2), labels.chunk(2), strict=True):
                model(*part).loss.backward()
                assert not any(bias.any() for bias in biases(model))
            with pytest.raises(JobError, match=r"MOE0713.*or job\.accumulate, which update states at their end"):
                job.update_states(model)
        assert all(torch.equal(a, b) for a, b in zip(biases(model), biases(other), strict=True))
        with pytest.raises(JobError, match=r"MOE0713.*no forward pass in training came since"):
            job.update_states(model)


def test_a_loop_of_ones_own_says_when_a_step_ends_and_cannot_end_it_twice() -> None:
    with moec.launch(moe_plan(**ONE), device="cpu") as job:
        model, (tokens, labels) = job.build(seed=1), batch()
        other = copy.deepcopy(model)
        job.step(other, tokens, labels, microbatches=2)
        for part in zip(tokens.chunk(2), labels.chunk(2), strict=True):
            model(*part).loss.backward()
        assert not any(bias.any() for bias in biases(model))
        job.update_states(model)
        assert all(torch.equal(a, b) for a, b in zip(biases(model), biases(other), strict=True))
        with pytest.raises(JobError, match=r"MOE0713.*no forward pass in training came since"):
            job.update_states(model)
        job.step(model, tokens, labels)
        with pytest.raises(JobError, match="MOE0713"):
            job.update_states(model)
        model(tokens, labels).loss.backward()
        job.step(model, tokens, labels)  # drops what was counted before it
        with pytest.raises(JobError, match="MOE0713"):
            job.update_states(model)


def test_loads_of_passes_before_a_state_dict_is_loaded_are_dropped() -> None:
    with moec.launch(moe_plan(**ONE), device="cpu") as job:
        model, (tokens, labels) = job.build(seed=1), batch()
        model(tokens, labels).loss.backward()
        model.load_state_dict(model.state_dict())
        with pytest.raises(JobError, match=r"MOE0713.*no forward pass in training came since"):
            job.update_states(model)
        copied = copy.deepcopy(model)
        model(tokens, labels).loss.backward()
        with pytest.raises(JobError, match="MOE0713"):
            job.update_states(copied)


def test_a_model_without_states_needs_no_update() -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build()
        assert not list(model.buffers())
        job.update_states(model)


def test_evaluation_and_passes_without_a_gradient_leave_them() -> None:
    with moec.launch(moe_plan(**ONE), device="cpu") as job:
        model, (tokens, labels) = job.build(seed=1), batch()
        model.eval()
        model(tokens, labels)
        with pytest.warns(UserWarning, match=r"without updates of `online` biases; call `model.train\(\)`"):
            job.step(model, tokens, labels)
        with job.accumulate(model, labels):
            model(tokens, labels).loss.backward()
        model.train()
        with torch.no_grad():
            model(tokens, labels)
        with pytest.raises(JobError, match="MOE0713"):
            job.update_states(model)
        assert not any(bias.any() for bias in biases(model))
        # The bias counts in evaluation too: it was trained to.
        first = model.eval()(tokens).logits
        for name in NAMES:
            model.get_buffer(name).copy_(torch.linspace(-2, 2, 8))
        assert not torch.equal(model(tokens).logits, first)
        assert model.expert_counts[1].tolist()[:6] == [0] * 6


@pytest.mark.parametrize(("whole", "reentrant"), [(False, False), (False, True), (True, False)])
def test_what_a_checkpoint_computes_again_counts_once(whole: bool, reentrant: bool) -> None:
    plan = moe_plan(**ONE)
    with moec.launch(plan, device="cpu") as job:
        model, (tokens, labels) = job.build(seed=1), batch()
        other = copy.deepcopy(model)
        job.step(other, tokens, labels)
        if whole:
            loss = checkpoint(lambda ids: model(ids, labels).loss, tokens, use_reentrant=False)
            loss.backward()
            job.update_states(model)
        else:
            for layer in model.layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=reentrant)
            job.step(model, tokens, labels)
        assert all(torch.equal(a, b) for a, b in zip(biases(model), biases(other), strict=True))


def test_a_whole_model_under_a_reentrant_checkpoint_updates_its_biases_only_in_accumulate() -> None:
    with moec.launch(moe_plan(balance="[]", **ONE), device="cpu") as job:
        model, (tokens, labels) = job.build(seed=1), batch()
        other = copy.deepcopy(model)
        job.step(other, tokens, labels)
        scale = torch.ones((), requires_grad=True)  # without it a reentrant checkpoint has no backward pass

        def backward() -> None:
            checkpoint(lambda x: model(tokens, labels).loss * x, scale, use_reentrant=True).backward()

        backward()
        with pytest.raises(JobError, match="MOE0713"):
            job.update_states(model)
        assert not any(bias.any() for bias in biases(model))
        model.zero_grad()
        with job.accumulate(model, labels):
            backward()
        assert all(torch.equal(a, b) for a, b in zip(biases(model), biases(other), strict=True))


def test_a_step_that_fails_leaves_them_and_the_next_is_right() -> None:
    with moec.launch(moe_plan(**ONE), device="cpu") as job:
        model, (tokens, labels) = job.build(seed=1), batch()
        other = copy.deepcopy(model)

        def fails(logits: Tensor, labels: Tensor) -> Tensor:
            raise MemoryError

        with pytest.raises(MemoryError):
            job.step(model, tokens, labels, loss=fails)
        assert not any(bias.any() for bias in biases(model))
        for each in (model, other):
            each.zero_grad()
            job.step(each, *batch(1))
        assert all(torch.equal(a, b) for a, b in zip(biases(model), biases(other), strict=True))


# ---- buffers -----------------------------------------------------------------------------------------------


def test_biases_are_fp32_buffers_under_the_plans_names_and_come_back_with_a_state_dict(tmp_path: Path) -> None:
    plan = moe_plan(dtype="bf16", **ONE)
    assert list(plan.states) == NAMES
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        assert {name: b.dtype for name, b in model.named_buffers()} == dict.fromkeys(NAMES, torch.float32)
        assert not {name for name, _ in model.named_parameters()} & set(NAMES)
        optimizer = job.optimizer(model)
        for step in range(3):
            job.step(model, *batch(step))
            optimizer.step()
            optimizer.zero_grad()
        torch.save(model.state_dict(), tmp_path / "state.pt")
        other = job.build(seed=2)
        other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert all(torch.equal(a, b) for a, b in zip(biases(model), biases(other), strict=True))
        assert all(bias.any() for bias in biases(other))
        tokens, labels = batch(9)
        assert torch.equal(model(tokens).logits, other(tokens).logits)
        copied = copy.deepcopy(model)
        job.step(copied, tokens, labels)
        assert all(torch.equal(a, b) for a, b in zip(biases(model), biases(other), strict=True))
        assert not torch.equal(biases(copied)[0], biases(model)[0])
        meta = job.build(device="meta")
        assert all(buffer.is_meta for buffer in meta.buffers())
        whole = reference(plan.spec, seed=3)
        whole.load_state_dict(model.state_dict())
        assert torch.equal(biases(whole)[1], biases(model)[1])


def test_a_narrowed_bias_is_refused() -> None:
    model = reference(moe_spec(**ONE))
    for gate in (layer.get_submodule("moe.gate") for layer in model.layers[1:]):
        gate.bias = gate.bias.bfloat16()
    with pytest.raises(JobError, match=r"MOE0710.*moe\.gate\.bias is torch\.bfloat16, and a state is float32"):
        model(batch()[0])


def test_a_layer_in_a_wrapper_updates_its_bias() -> None:
    with moec.launch(moe_plan(**ONE), device="cpu") as job:
        model, (tokens, labels) = job.build(seed=1), batch()
        other = copy.deepcopy(model)
        job.step(other, tokens, labels)

        class Wrapper(torch.nn.Module):
            def __init__(self, inner: torch.nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, *inputs: Tensor) -> Any:
                return self.inner(*inputs)

        model.layers[1] = Wrapper(model.layers[1])
        job.step(model, tokens, labels)
        assert torch.equal(model.layers[1].inner.get_buffer("moe.gate.bias"), biases(other)[0])
        assert torch.equal(model.get_buffer(NAMES[1]), biases(other)[1])


def test_a_module_of_the_users_in_a_layers_place_has_no_bias_and_the_other_layers_are_updated() -> None:
    class Other(torch.nn.Module):
        """Gives what the layer gives, and has none of its buffers."""

        def __init__(self, layer: torch.nn.Module) -> None:
            super().__init__()
            self.call = layer.forward  # a function, not a submodule

        def forward(self, *inputs: Tensor) -> Any:
            return self.call(*inputs)

    with moec.launch(moe_plan(**ONE), device="cpu") as job:
        model, (tokens, labels) = job.build(seed=1), batch()
        other = copy.deepcopy(model)
        job.step(other, tokens, labels)
        inner = model.layers[1]
        model.layers[1] = Other(inner)
        job.step(model, tokens, labels)
        assert list(dict(model.named_buffers())) == NAMES[1:]
        assert not inner.get_buffer("moe.gate.bias").any()
        assert torch.equal(model.get_buffer(NAMES[1]), biases(other)[1])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_graph_chooses_and_moves_alike() -> None:
    torch._dynamo.reset()
    with moec.launch(moe_plan(**ONE), device="cpu") as job:
        model = job.build(seed=1)
        other = copy.deepcopy(model)
        model.compile(fullgraph=True, backend="aot_eager")
        for step in range(2):
            for each in (model, other):
                job.step(each, *batch(step))
        assert all(torch.equal(a, b) for a, b in zip(biases(model), biases(other), strict=True))


# ---- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_bias_that_is_not_finite_is_refused_before_a_pass(number: float) -> None:
    model = reference(moe_spec(**ONE), seed=1)
    model(*batch())
    model.get_buffer(NAMES[1])[3] = number
    with pytest.raises(JobError, match=f"MOE0708.*the state {NAMES[1]} is NaN or infinite"):
        model(*batch())
