"""ZeRO on gloo ranks: training as the unsharded model trains, with a rank's parts only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.combinations import some
from support.plans import moe_plan
from support.ranks import contract
from support.ranks.contract import MIXED
from support.ranks.gloo_pool import GlooPool
from support.ranks.training import STEPS, gradients_of, require_same_training, train_as_rank, unsharded
from torch.distributed.checkpoint.state_dict import get_state_dict

import moec
from moec.runtime.errors import JobError
from moec.runtime.host.reference import reference
from moec.runtime.weights import weights
from moec.runtime.weights.gradients import Bucket, SummedGradient

FOUR = {"ranks": 4, "ep": 2}


MORE: dict[str, dict[str, Any]] = {
    "odd sizes": {"ranks": 4, "ep": 2, "dim": 24, "expert": "swiglu(7)", "ffn": "gelu(30)", "bias": "all"},
    "nothing to cut": {"ranks": 3, "ep": 1, "batch": 6, "dim": 16},
    "tied, positions": {"ranks": 4, "ep": 2, "model": "embedding = tokens(tied = true, positions = learned)"},
    "a degree per layer": {"ranks": 4, "tp": 2, "ep": 4, "mixtures": ((8, 2), (4, 4), (8, 1))},
    "repeated kv heads": {"ranks": 8, "tp": 4, "ep": 2},
    "dp 4, tp 2": {"ranks": 8, "tp": 2, "ep": 4, "sequence_parallel": False},
    "jitter": {"ranks": 4, "ep": 2, "gate": "topk(2, jitter = 0.2)"},
    "frozen layers": {
        "ranks": 4, "tp": 2, "ep": 2, "expert": "lora(3, alpha = 6)", "beside": "shared = swiglu(8)",
        "optimizer": "adamw(lr = 3e-3); frozen = [attention, norms, ffn, shared]",
    },
    "capacity": {"ranks": 4, "ep": 2, "beside": "capacity = factor(1.25); group = sequence"},
    "dp 2": {"ranks": 2, "ep": 1},
    "edp 2, ep 2": FOUR,
    "dp 2, tp 2, ep 2": {"ranks": 4, "tp": 2, "ep": 2},
    "ep 2 and 1, odd sizes": {
        **MIXED, "dim": 24, "expert": "swiglu(7)", "ffn": "gelu(30)", "bias": "all",
        "model": "embedding = tokens(tied = true)",
    },
}  # fmt: skip
DEGREE_WORDS = ("ranks", "tp", "ep", "sequence_parallel")
FAST = "ep 2 and 1, odd sizes"


@pytest.mark.parametrize(
    ("degrees", "zero"),
    [
        pytest.param(degrees, zero, marks=() if degrees == FAST else pytest.mark.slow)
        for degrees in MORE
        for zero in (1, 2, 3)
    ],
)
def test_every_stage_gives_the_unsharded_loss_curve(gloo: GlooPool, zero: int, degrees: str):
    model = {name: value for name, value in MORE[degrees].items() if name not in DEGREE_WORDS}
    options = {"batch": 8, "optimizer": "adamw(lr = 3e-3)", **model}
    plan = moe_plan(**{**options, **MORE[degrees], "zero": zero})
    results = gloo.run(plan.world_size, train_as_rank, plan, STEPS)
    require_same_training(results, unsharded(**options), plan)


def gradients_of_one_token(options: dict[str, Any]) -> float:
    """The error of a job's gradients where every token of the batch has one id, and so one expert."""
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


@pytest.mark.parametrize(("ranks", "zero"), [(2, 2), (2, 3), pytest.param(4, 3, marks=pytest.mark.slow)])
def test_zero_does_not_wait_for_unused_experts(gloo: GlooPool, ranks: int, zero: int):
    """ds#4966: ranks without an expert's tokens did not gather its weights, and the others waited."""
    options = {**(MIXED if ranks == 2 else FOUR), "zero": zero, "gate": "hash(1)", "balance": "[]"}
    assert max(gloo.run(ranks, gradients_of_one_token, options, initialize=False)) < 2e-5


def placements_of(options: dict[str, Any]) -> dict[str, Any]:
    """What `get_state_dict` gives of the model and of its optimizer: placements and whole values."""
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


@pytest.mark.parametrize("zero", some([1, 2, 3], [3]))
def test_state_dicts_hold_dtensors_of_the_masters_and_the_same_values_at_every_stage(gloo: GlooPool, zero: int):
    options: dict[str, Any] = {"ranks": 4, "tp": 2, "ep": 2, "depth": 2}
    whole, cut = (gloo.run(4, placements_of, {**options, "zero": stage}, initialize=False)[0] for stage in (0, zero))
    assert cut["placements"] == cut["moments"]
    assert cut["placements"]["layers.1.attention.q.weight"] == ("S(1)", "S(0)")  # dp, tp
    assert whole["placements"]["layers.1.attention.q.weight"] == ("R", "S(0)")
    assert cut["placements"]["layers.1.moe.experts.up.weight"] == ("S(2)", "S(0)")  # edp, ep
    for name, tensor in whole["whole"].items():
        torch.testing.assert_close(cut["whole"][name], tensor, rtol=0, atol=1e-6)


def losses_around_a_load(options: dict[str, Any]) -> tuple[float, str]:
    """The loss of a pass after other weights were loaded in `job.accumulate`; what a load before backward says."""
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


def gradients_after_inference(zero: int) -> float:
    """The error of the gradients of a step whose first forward pass is in inference mode."""
    with moec.launch(moe_plan(ranks=2, ep=1, zero=zero), device="cpu") as job:
        model, other = job.build(seed=1), job.build(seed=1)
        tokens, labels = contract.mine(job, *contract.batch())
        model._open_step.keeps_weights = True
        with torch.inference_mode():
            model(tokens)
        for each in (model, other):
            each(tokens, labels).loss.backward()
        return contract.distance(gradients_of(model), gradients_of(other))


@pytest.mark.parametrize("zero", [1, 2])
def test_weights_that_inference_mode_has_gathered_serve_no_later_pass(gloo: GlooPool, zero: int):
    assert gloo.run(2, gradients_after_inference, zero, initialize=False) == [0, 0]


def words_of_late_backward(options: dict[str, Any]) -> dict[str, str]:
    """What backward says after each change of the parameters since its forward pass."""
    words = {}
    with moec.launch(moe_plan(**options), device="cpu") as job:
        for change in ("step", "add_"):
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
            words[change] = ""
            try:
                late.backward()
            except (JobError, RuntimeError) as error:
                words[change] = str(error)
    return words


@pytest.mark.parametrize(("zero", "dtype"), [(0, "fp32"), (3, "fp32"), (3, "bf16"), (0, "bf16")])
def test_backward_notices_steps_and_changes_where_it_would_use_other_weights(
    gloo: GlooPool, zero: int, dtype: str
) -> None:
    """Neither fused optimizers nor changes of DTensors change autograd's count of a rank's part."""
    options = {"ranks": 2, "ep": 1, "zero": zero, "dtype": dtype, "depth": 2}
    for found in gloo.run(2, words_of_late_backward, options):
        for words in found.values():
            assert ("MOE0722" in words) == (words != "") == (zero == 3 or dtype == "fp32"), words


def running_sums_after_backward(options: dict[str, Any]) -> int:
    """The reduce_scatters that the model refers to after a backward pass outside of `job.step`."""
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model = job.build(seed=1)
        tokens, labels = contract.mine(job, *contract.batch())
        model(tokens, labels).loss.backward()
        return len(model._open_step.scattering)


def test_a_backward_pass_leaves_no_sum_in_memory(gloo: GlooPool) -> None:
    assert gloo.run(2, running_sums_after_backward, {"ranks": 2, "ep": 1, "zero": 2}) == [0, 0]


def words_of_hooks_on_one_rank(microbatches: int) -> str:
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


def backward_of_changed() -> list[str]:
    """What backward raises after the tokens or the labels of its forward pass were changed in place."""
    words = []
    with moec.launch(moe_plan(ranks=2, ep=1, zero=3), device="cpu") as job:
        for which in range(2):
            given = torch.arange(16).reshape(2, 8), torch.arange(1, 17).reshape(2, 8)
            loss = job.build(seed=1)(*given).loss
            given[which].zero_()
            with pytest.raises(RuntimeError) as raised:
                loss.backward()
            words.append(str(raised.value))
    return words


def test_tokens_or_labels_that_are_changed_before_backward_are_an_error(gloo: GlooPool) -> None:
    for said in gloo.run(2, backward_of_changed):
        assert all("modified by an inplace operation" in words for words in said)


def sums_of_narrow_gradients(zero: int) -> tuple[set[torch.dtype], list[Any]]:
    """The dtypes in which a step in bf16 sums gradients, and the sum of one that rank 0 alone has."""
    found = set[torch.dtype]()

    class Noted(Bucket):
        def begin(self, gradients: Any) -> Any:
            found.add(self.dtype)
            return super().begin(gradients)

    options = {**MIXED, "zero": zero, "dtype": "bf16"}
    with moec.launch(moe_plan(**options), device="cpu") as job, pytest.MonkeyPatch.context() as patch:
        model = job.build(seed=1)
        patch.setattr(weights, "Bucket", Noted)
        job.step(model, *contract.mine(job, *contract.batch()))
        specs = [spec for each in model.all_weights() for spec in each.specs]
        groups = next(spec.groups or (spec.zero.group,) for spec in specs if spec.groups or spec.zero)
        members = [SummedGradient(0, (2,), groups), SummedGradient(1, (2,), groups)]
        bucket = Bucket(members, "here", torch.float32, torch.device("cpu"))
        bucket.begin([torch.ones(2) if job.rank == 0 else None, None])
        return found, bucket.finish()


@pytest.mark.parametrize("zero", [0, 3])
def test_sums_are_wide_and_all_ranks_have_the_gradient_of_one(gloo: GlooPool, zero: int) -> None:
    for dtypes, (of_one, of_none) in gloo.run(2, sums_of_narrow_gradients, zero, initialize=False):
        assert dtypes == {torch.float32}
        assert of_one is not None
        assert of_one.tolist() == [1.0, 1.0]
        assert of_none is None
