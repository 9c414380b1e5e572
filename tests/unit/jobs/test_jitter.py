"""Jitter of a router's input: drawn by token, alike on any ranks, in any micro-batches and again in recomputation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.combinations import some
from support.plans import BODY, layer_text, moe_plan, moe_spec, moe_text
from support.verified import require_equal
from support.ways_to_run import gradients
from support.wrong_plans import bypass, change_op, op_giving
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import moec
from moec.codegen.plan import Plan
from moec.grammar import load_text
from moec.grammar.diagnostics import DiagnosticError, InternalError
from moec.passes.ir.texts.parse import parse_program
from moec.passes.ir.texts.text import print_program
from moec.passes.ir.verifier import check_program
from moec.passes.lower.lower_model import lower
from moec.runtime import ops
from moec.runtime.backends.torch import torch_random
from moec.runtime.errors import JobError
from moec.runtime.host.reference import reference
from moec.runtime.model.module import PlanModule
from moec.runtime.verify.cluster import virtual
from moec.runtime.verify.verification import verify

JITTER = {"gate": "topk(2, jitter = 0.3)"}
DEGREES: list[dict[str, Any]] = [
    {"ranks": 1, "ep": 1},
    {"ep": 4},
    {"ep": 2, "tp": 2},
    {"ep": 4, "tp": 2, "sequence_parallel": False},
    {"ep": 2, "tp": 4, "ranks": 8},
    {"ep": 4, "dtype": "bf16"},
    {"ep": 2, "tp": 2, "beside": "capacity = factor(0.7, eval = 1.2)"},
    {"ep": 2, "model": "embedding = tokens(padding = 3, separator = 2)"},
]


def drawn(x: Tensor, step: int = 0, seed: int = 0, layer: int = 0, stream: int = 0, amount: float = 1.0) -> Tensor:
    """`jitter` of x [B, S, dim], whose sequences are the first of their step."""
    ids, numbers = torch.zeros(x.shape[:2], dtype=torch.int64), torch.arange(len(x))
    keys = ops.token_keys(ids, numbers, torch.tensor(seed), torch.tensor(step))
    found: Tensor = ops.jitter(x, keys, torch.tensor(1), torch.tensor(layer), amount, stream)
    return found


def batch(sequences: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(32, (2, sequences, 8), generator=generator)
    return tokens, labels


# ---- the numbers -----------------------------------------------------------------------------------------


def test_numbers_are_uniform_and_independent() -> None:
    numbers = drawn(torch.ones(8, 256, 64, dtype=torch.float64)) - 1
    assert -1 <= numbers.min() < -0.9999
    assert 0.9999 < numbers.max() < 1
    assert abs(numbers.mean()) < 5e-3  # 131,072 numbers: three standard deviations are 4.8e-3
    assert abs(numbers.var() - 1 / 3) < 5e-3
    flat = numbers.flatten(0, 1)
    for dim in (0, 1):  # neighbours in tokens, and in elements of one token
        first, second = flat.narrow(dim, 0, flat.shape[dim] - 1), flat.narrow(dim, 1, flat.shape[dim] - 1)
        assert abs((first * second).mean()) < 5e-3
    counts = torch.histc(numbers, 32, -1, 1)
    assert ((counts - counts.mean()).abs() < 5 * counts.mean().sqrt()).all()


@pytest.mark.parametrize("other", [{"step": 1}, {"seed": 1}, {"layer": 1}, {"stream": 1}, {"step": 2**32}])
def test_another_step_seed_layer_or_op_draws_other_numbers(other: dict[str, int]) -> None:
    x = torch.ones(2, 16, 64)
    assert (drawn(x) == drawn(x, **other)).float().mean() < 0.01


def test_every_sequence_and_place_has_other_numbers() -> None:
    rows = drawn(torch.ones(4, 16, 64)).flatten(0, 1)
    assert len({tuple(row.tolist()) for row in rows}) == 64


def test_a_part_of_the_tokens_draws_what_the_whole_draws() -> None:
    x = torch.randn(4, 8, 10)
    ids, numbers, zero = torch.zeros(4, 8, dtype=torch.int64), torch.arange(4), torch.tensor(0)
    keys = ops.token_keys(ids, numbers, zero, zero)
    assert torch.equal(ops.token_keys(ids[2:], numbers[2:], zero, zero), keys[2:])
    whole = ops.jitter(x, keys, torch.tensor(1), zero, 0.5, 0)
    part = ops.jitter(x[1:3, 4:], keys[1:3, 4:], torch.tensor(1), zero, 0.5, 0)
    assert torch.equal(part, whole[1:3, 4:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_many_tokens_are_drawn_in_parts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 7, 6).to(dtype)
    whole = drawn(x, amount=0.25)
    monkeypatch.setattr(torch_random, "CHUNK", 13)
    assert torch.equal(drawn(x, amount=0.25), whole)
    assert whole.dtype == torch.promote_types(dtype, torch.float32)


def test_the_gradient_is_multiplied_by_the_same_factors() -> None:
    x = torch.randn(2, 3, 5, requires_grad=True)
    drawn(x).backward(torch.ones_like(x))
    torch.testing.assert_close(x.grad, drawn(torch.ones(2, 3, 5)))
    narrow = torch.randn(2, 3, 5).bfloat16().requires_grad_()
    drawn(narrow).sum().backward()
    assert narrow.grad is not None
    assert narrow.grad.dtype == torch.bfloat16


def test_empty_batches_are_allowed() -> None:
    assert drawn(torch.ones(0, 4, 8)).shape == (0, 4, 8)
    assert drawn(torch.ones(2, 0, 8)).shape == (2, 0, 8)


# ---- models ----------------------------------------------------------------------------------------------


def test_evaluation_draws_nothing() -> None:
    model, plain = reference(moe_spec(**JITTER), seed=1), reference(moe_spec(gate="topk(2)"), seed=1)
    tokens, _ = batch()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(tokens).logits, plain.eval()(tokens).logits)
    assert not torch.equal(model.train()(tokens).logits, plain.train()(tokens).logits)


def test_a_forward_pass_in_training_is_a_step_of_its_own() -> None:
    model = reference(moe_spec(**JITTER), seed=1)
    tokens, _ = batch()
    first, second = model(tokens).logits, model(tokens).logits
    assert not torch.equal(first, second)
    assert model.settings == {"seed": 1, "step": 2}
    model.eval()(tokens)
    assert model.settings["step"] == 2
    model.train().set(step=0)
    assert torch.equal(model(tokens).logits, first)
    model.set(step=0, seed=2)
    assert not torch.equal(model(tokens).logits, first)


def test_a_copy_has_settings_of_its_own() -> None:
    model = reference(moe_spec(**JITTER))
    other = copy.deepcopy(model)
    other.set(step=5)
    assert model.settings["step"] == 0


@pytest.mark.parametrize("microbatches", [2, 3, 4])
def test_micro_batches_draw_what_the_whole_batch_draws(microbatches: int) -> None:
    plan = moe_plan(ranks=1, ep=1, dtype="fp32", **JITTER)
    tokens, labels = batch()
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        whole = job.step(model, tokens, labels)
        expected = gradients(model)
        model.set(step=0)
        parts = job.step(model, tokens, labels, microbatches=microbatches)
        assert model.settings["step"] == 1
        torch.testing.assert_close(parts, whole)
        torch.testing.assert_close(gradients(model), expected)
        model.set(step=0)
        cut = list(zip(tokens.tensor_split(microbatches), labels.tensor_split(microbatches), strict=True))
        with job.accumulate(model, *(each for _, each in cut)):
            for part in cut:
                model(*part).loss.backward()
        assert model.settings["step"] == 1
        torch.testing.assert_close(gradients(model), expected)


def test_a_step_that_fails_is_not_counted() -> None:
    plan = moe_plan(ranks=1, ep=1, **JITTER)
    tokens, labels = batch()

    def fail(*arguments: Any, **inputs: Any) -> Tensor:
        raise RuntimeError("of the user")

    with moec.launch(plan, device="cpu") as job:
        model = job.build()
        with pytest.raises(moec.JobError, match="of the user"):
            job.step(model, tokens, labels, loss=fail)
        assert model.settings["step"] == 0


class Checkpointed(torch.nn.Module):
    """A layer that is computed again in backward."""

    def __init__(self, layer: torch.nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, *inputs: Tensor) -> Any:
        return checkpoint(self.layer, *inputs, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_draw_the_same_numbers(reentrant: bool) -> None:
    tokens, labels = batch()
    models = [reference(moe_spec(balance="[]", **JITTER), seed=1, dtype=torch.float64) for _ in range(2)]
    for index, layer in enumerate(models[1].layers):
        models[1].layers[index] = Checkpointed(layer, reentrant)
    found = []
    for model in models:
        losses = [model(tokens, labels).loss for _ in range(2)]  # two steps before their backward passes
        sum(losses).backward()
        found.append({name.replace(".layer.", "."): grad for name, grad in gradients(model).items()})
    torch.testing.assert_close(found[1], found[0])


def test_a_model_that_is_computed_again_whole_is_refused() -> None:
    model = reference(moe_spec(**JITTER))
    tokens, labels = batch()
    loss = checkpoint(lambda: model(tokens, labels).loss, use_reentrant=False)
    with pytest.raises(JobError, match=r"(?s)MOE0713.*would draw other random numbers"):
        loss.backward()


def test_plans_without_jitter_are_as_before() -> None:
    program = lower(moe_spec(gate="topk(2, jitter = 0)"))
    assert [value.role for value in program.block("forward").inputs] == ["tokens"]
    assert not program.settings


def test_the_file_of_one_layer_is_refused() -> None:
    found = load_text(layer_text(gate="topk(2, jitter = 0.1)"), name="ffn.moe").unwrap()
    with pytest.raises(DiagnosticError) as error:
        lower(found)
    (diagnostic,) = error.value.diagnostics
    assert diagnostic.code == "MOE0202"
    assert diagnostic.message.startswith("moec cannot compile `jitter` in the file of one `layer`")
    assert diagnostic.span


# ---- settings --------------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"step": -1}, "`step` is -1, and must be a whole number from 0 to 4611686018427387904"),
    ({"seed": 2**62 + 1}, "`seed` is 4611686018427387905, and must"),
    ({"step": 1.0}, "`step` is 1.0, and must be a whole number"),
    ({"step": True}, "`step` is True, and must be a whole number"),
    ({"steps": 1}, "there is no setting `steps`"),
    ({"training": 0}, "`training` is the module's mode, not a setting"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_a_wrong_setting_is_refused_and_changes_nothing(changes: dict[str, Any], message: str) -> None:
    model = reference(moe_spec(**JITTER))
    with pytest.raises(JobError, match="MOE0715") as error:
        model.set(**changes)
    assert message in str(error.value)
    assert model.settings == {"seed": 0, "step": 0}


@pytest.mark.parametrize("seed", [-1, 2**62 + 1, 2**63])
def test_a_seed_that_is_no_setting_is_refused_for_every_new_module(seed: int) -> None:
    one = {"ranks": 1, "ep": 1}
    message = f"MOE0715.* `seed` is {seed}, and must be a whole number from 0 to"
    with moec.launch(moe_plan(**one), device="cpu") as job, pytest.raises(JobError, match=message):
        job.build(seed=seed)
    for source in (moe_text(**one), layer_text(ranks=1)):
        with pytest.raises(JobError, match=message):
            moec.reference(source, seed=seed)
    with pytest.raises(JobError, match=message):
        moec.layer(layer_text(ranks=1), seed=seed)


def test_the_largest_seed_is_kept() -> None:
    assert reference(moe_spec(**JITTER), seed=2**62).settings == {"seed": 2**62, "step": 0}


@pytest.mark.parametrize("text", ["setting $steps: int64[] = 0 in 0..1", "setting $seed: int64[] = 0 in 0..1"])
def test_a_program_with_another_setting_is_refused(text: str) -> None:
    printed = print_program(moe_plan(**JITTER).program)
    line = "setting $training: int64[] @ replicate = 1 in 0..1"
    assert line in printed
    changed = printed.replace(line, f"{text.replace('[] =', '[] @ replicate =')}\n    {line}", 1)
    with pytest.raises(InternalError, match=r"no setting"):
        check_program(parse_program(changed))


# ---- plans -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", some(range(len(DEGREES)), [3, 5, 6, 7]))
def test_plans_are_the_unsharded_model(place: int) -> None:
    require_equal(moe_plan(**JITTER, **DEGREES[place]))


FAULTS: dict[str, Any] = {
    "another stream": lambda plan: change_op(plan, BODY, jittered(plan), stream=1),
    "a larger amount": lambda plan: change_op(plan, BODY, jittered(plan), amount=0.31),
    "no jitter": lambda plan: bypass(plan, BODY, jittered(plan)),
}


def jittered(plan: Plan) -> str:
    """The value that jitter gives."""
    (op,) = (op for op in plan.program.block(BODY).ops if op.mnemonic == "jitter")
    return op.results[0].name


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_plans_are_found(fault: str) -> None:
    plan = moe_plan(ep=2, tp=2, **JITTER)
    wrong = FAULTS[fault](plan)
    assert op_giving(plan, BODY, jittered(plan)) not in wrong.program.block(BODY).ops
    assert not verify(wrong).ok


def test_ranks_that_number_their_sequences_alike_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lockstep = virtual.Lockstep
    monkeypatch.setattr(virtual, "Lockstep", lambda *a, **k: lockstep(*a, **k | {"data_ranks": None}))
    assert not verify(moe_plan(ep=2, **JITTER)).ok


# ---- copies, and steps in steps --------------------------------------------------------------------------


def test_a_copy_made_inside_of_a_step_belongs_to_no_step() -> None:
    plan = moe_plan(ranks=1, ep=1, **JITTER)
    tokens, labels = batch()
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        expected = copy.deepcopy(model)
        halves = list(zip(tokens.chunk(2), labels.chunk(2), strict=True))
        with job.accumulate(model, *(half for _, half in halves)):
            for index, half in enumerate(halves):
                model(*half).loss.backward()
                if index == 0:
                    inside = copy.deepcopy(model)
        inside.zero_grad()
        for each in (expected, inside):
            each.set(step=0)
            each(tokens, labels).loss.backward()
        assert inside.settings == {"seed": 1, "step": 1}
        torch.testing.assert_close(gradients(inside), gradients(expected))


def test_a_copy_made_between_micro_batches_has_no_collected_gradients() -> None:
    plan = moe_plan(ranks=1, ep=1, gate="topk(2)")
    tokens, labels = batch()
    copies: list[PlanModule] = []

    def copied(logits: Tensor, labels: Tensor) -> Tensor:
        copies.append(copy.deepcopy(model))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        expected = copy.deepcopy(model)
        job.step(model, tokens, labels, microbatches=2, loss=copied)
        job.step(expected, tokens, labels)
        wanted = gradients(expected)
        for each in copies:
            each.zero_grad()
            job.step(each, tokens, labels)
            torch.testing.assert_close(gradients(each), wanted)


WRONG_LABELS = {
    "stacked": lambda labels: (torch.stack(labels.chunk(2)),),
    "one row": lambda labels: (labels.reshape(1, -1),),
    "flat": lambda labels: (labels.flatten(),),
    "of more sequences": lambda labels: (labels.reshape(-1, 4),),
}


@pytest.mark.parametrize("how", WRONG_LABELS)
def test_labels_that_do_not_number_the_sequences_are_refused(how: str) -> None:
    tokens, labels = batch()
    with moec.launch(moe_plan(ranks=1, ep=1, **JITTER), device="cpu") as job:
        model = job.build()

        def accumulated() -> None:
            with job.accumulate(model, *WRONG_LABELS[how](labels)):
                for half in zip(tokens.chunk(2), labels.chunk(2), strict=True):
                    model(*half).loss.backward()

        with pytest.raises(JobError, match="MOE0713"):
            accumulated()
        assert model.settings["step"] == 0


def test_passes_without_a_gradient_take_no_numbers() -> None:
    tokens, labels = batch()
    with moec.launch(moe_plan(ranks=1, ep=1, **JITTER), device="cpu") as job:
        model = job.build(seed=1)
        job.step(model, tokens, labels)
        expected = gradients(model)
        model.set(step=0)
        with job.accumulate(model, *labels.chunk(2)):
            for half in zip(tokens.chunk(2), labels.chunk(2), strict=True):
                with torch.no_grad():
                    model(tokens)
                model(*half).loss.backward()
        torch.testing.assert_close(gradients(model), expected)


def test_a_step_inside_of_another_is_refused() -> None:
    tokens, labels = batch()
    with moec.launch(moe_plan(ranks=1, ep=1, **JITTER), device="cpu") as job:
        model = job.build()
        with pytest.raises(JobError, match=r"(?s)MOE0713.*one step at a time"), job.accumulate(model, labels):
            job.step(model, tokens, labels)
        assert job.step(model, tokens, labels) > 0


@pytest.mark.parametrize("gate", ["topk(2, jitter = 0.1)", "topk(2, noise = 0.1)", "gshard", "sparsemixer(2)"])
def test_a_program_whose_draws_take_another_setting_for_training_is_refused(gate: str) -> None:
    text = print_program(lower(moe_spec(gate=gate)))
    block = text[text.index("%keys") :]
    drawn = next(line for line in block.splitlines() if "$training" in line and "setting" not in line)
    changed = text.replace(drawn, drawn.replace("$training", "$other")).replace(
        "    setting $training", "    setting $other: int64[] = 1 in 0..1\n    setting $training"
    )
    with pytest.raises(InternalError, match=r"\$training"):
        check_program(parse_program(changed))
