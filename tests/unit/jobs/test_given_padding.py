"""Padding that a batch marks: it takes no place in routing, capacity or balance, whatever its ids and labels are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.plans import moe_plan, moe_spec
from support.verified import require_equal
from support.ways_to_run import require_every_way_alike

import moec
from moec.codegen.plan import Plan
from moec.runtime.errors import JobError
from moec.runtime.host.reference import reference
from moec.runtime.job import step_agreement
from moec.runtime.job.job import Job

GIVEN = "embedding = tokens(padding = given)"
PADDED = torch.rand(8, 8, generator=torch.Generator().manual_seed(6)) < 0.3
TOKENS, LABELS = torch.randint(1, 32, (2, 8, 8), generator=torch.Generator().manual_seed(5))


def padded(**options: Any) -> Plan:
    return moe_plan(**{"model": GIVEN, **options})


@pytest.mark.parametrize("beside", ["", "capacity = factor(0.5)", "capacity = dynamic(max = 0.6); group = batch"])
def test_it_is_what_a_padding_id_is(beside: str) -> None:
    by_id, by_mask = (
        reference(moe_spec(ranks=1, ep=1, model=f"embedding = tokens(padding = {word})", beside=beside), seed=1)
        for word in ("0", "given")
    )
    tokens = TOKENS.masked_fill(PADDED, 0)
    expected, found = by_id(tokens, LABELS), by_mask(tokens, LABELS, padding=PADDED)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.aux_loss, expected.aux_loss)
    for layer, counts in by_id.expert_counts.items():
        assert torch.equal(by_mask.expert_counts[layer], counts)
    expected.loss.backward()
    found.loss.backward()
    for name, parameter in by_id.named_parameters():
        assert torch.equal(by_mask.get_parameter(name).grad, parameter.grad), name


def test_an_ignored_label_is_no_padding() -> None:
    model = reference(moe_spec(ranks=1, ep=1, model=GIVEN), seed=1)
    ignored = LABELS.masked_fill(PADDED, -100)
    model(TOKENS, LABELS)
    rows = sum(int(counts.sum()) for counts in model.expert_counts.values())
    model(TOKENS, ignored)
    assert sum(int(counts.sum()) for counts in model.expert_counts.values()) == rows == 2 * 2 * 64
    model(TOKENS, ignored, padding=PADDED)
    assert sum(int(counts.sum()) for counts in model.expert_counts.values()) == 2 * 2 * int((~PADDED).sum())


def test_bools_and_numbers_are_alike_and_none_is_no_padding() -> None:
    model = reference(moe_spec(ranks=1, ep=1, model=GIVEN), seed=1)
    of_bools, of_numbers = (model(TOKENS, LABELS, padding=mask).loss for mask in (PADDED, PADDED.long()))
    assert torch.equal(of_bools, of_numbers)
    assert torch.equal(model(TOKENS).logits, model(TOKENS, padding=torch.zeros_like(PADDED)).logits)


@pytest.mark.parametrize(
    "options",
    [
        {"tp": 2, "ep": 2, "microbatches": 2, "recompute": "layer", "beside": "capacity = factor(0.5)"},
        {"ep": 4, "model": "embedding = tokens(padding = given, segments = true)", "beside": "capacity = factor(1)"},
        {"tp": 2, "ep": 4, "sequence_parallel": False, "optimizer": "adamw(); replay = true", "dtype": "bf16"},
    ],
    ids=["tp", "segments", "replay"],
)  # fmt: skip
def test_plans_equal_the_unsharded_model(options: dict[str, Any]) -> None:
    require_equal(padded(**options), float32=False)


@pytest.fixture
def job() -> Iterator[Job]:
    with moec.launch(padded(ranks=1, ep=1), device="cpu") as launched:
        yield launched


def test_steps_micro_batches_custom_losses_and_accumulation_hand_padding_through(job: Job) -> None:
    model = job.build(seed=1)
    require_every_way_alike(job, model, TOKENS, LABELS, padding=PADDED)
    with pytest.raises(JobError, match="given padding and balance terms"), job.accumulate(model, LABELS):
        pass


WRONG = {
    "dtype": (PADDED.float(), "torch.bool, or torch.int64"),
    "shape": (PADDED[:, 1:], "have shape|padding"),
    "no tensor": (PADDED.tolist(), "class list"),
    "values": (2 * PADDED.long(), "contains 2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_padding_is_one_error_before_anything_is_computed(job: Job, name: str) -> None:
    model, (padding, words) = job.build(seed=1), WRONG[name]
    for act in (
        lambda: model(TOKENS, LABELS, padding=padding),
        lambda: job.step(model, TOKENS, LABELS, padding=padding),
    ):
        with pytest.raises(JobError, match=words) as error:
            act()
        assert error.value.diagnostics[0].code == "MOE0728"


def test_a_model_with_another_padding_takes_none() -> None:
    plan = moe_plan(ranks=1, ep=1, model="embedding = tokens(padding = 0)")
    with moec.launch(plan, device="cpu") as job, pytest.raises(JobError, match="takes none") as error:
        job.step(job.build(), TOKENS, LABELS, padding=PADDED)
    assert "padding = given" in error.value.diagnostics[0].help


@pytest.mark.parametrize("word", ["given", "0"])
def test_a_device_that_counts_tokens_itself_leaves_padding_out_as_the_host_does(
    monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    """Off the CPU the host does not wait for the counts: here for tensors that are on it after all."""
    found = []
    tokens, inputs = (TOKENS, {"padding": PADDED}) if word == "given" else (TOKENS.masked_fill(PADDED, 0), {})
    plan = moe_plan(ranks=1, ep=1, model=f"embedding = tokens(padding = {word})")
    with moec.launch(plan, device="cpu") as job:
        for device in ("cpu", "cuda"):
            monkeypatch.setattr(step_agreement, "device_of", lambda _, device=device: torch.device(device))
            model = job.build(seed=1)
            loss = job.step(model, tokens, LABELS, **inputs)
            found.append({"loss": loss, **{name: p.grad for name, p in model.named_parameters()}})
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)
