"""Packed texts that a batch marks: a text is a routing group, and every plan counts it alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.plans import moe_plan, moe_spec, moe_text
from support.verified import require_equal
from support.ways_to_run import require_every_way_alike
from support.wrong_plans import change_every

import moec
from moec.codegen.plan import Plan
from moec.grammar import load_text
from moec.grammar.diagnostics import DiagnosticError
from moec.passes.ir.ops import CountInSegments, KeepInSegments, NumberSegments
from moec.runtime.errors import JobError
from moec.runtime.host.reference import reference
from moec.runtime.job.job import Job
from moec.runtime.verify.verification import verify

PACKED = "embedding = tokens(segments = true)"
TOKENS, LABELS = torch.randint(32, (2, 8, 8), generator=torch.Generator().manual_seed(5))
SEGMENTS = torch.tensor([[0, 0, 0, 0, 0, 4, 4, 9]]).repeat(8, 1).cumsum(0)


def packed(**options: Any) -> Plan:
    return moe_plan(**{"model": PACKED, **options})


@pytest.mark.parametrize(
    "options",
    [
        {"tp": 2, "ep": 2, "microbatches": 2, "recompute": "layer", "beside": "capacity = factor(0.5)"},
        {"ep": 4, "recompute": "experts", "beside": "capacity = factor(0.75, eval = 1.5)"},
        {"tp": 2, "ep": 4, "zero": 3, "sequence_parallel": False, "beside": "capacity = dynamic(max = 0.8)"},
        {"tp": 4, "ep": 1, "model": "embedding = tokens(padding = 0, separator = 3)", "beside": "capacity = factor(1)"},
        pytest.param(
            {"ep": 2, "gate": "topk(2, score = sigmoid, bias = online(0.01), jitter = 0.1)", "dtype": "bf16"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"tp": 2, "beside": "group = batch; capacity = factor(0.5)", "optimizer": "adamw(); replay = true"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["microbatches", "evaluation", "zero", "padding", "online", "batches"],
)  # fmt: skip
def test_plans_equal_the_unsharded_model(options: dict[str, Any]) -> None:
    require_equal(packed(**options), float32=False)


@pytest.mark.parametrize("padding", [False, True])
def test_drops_and_loads_are_those_of_the_texts_alone(padding: bool) -> None:
    embedding = "embedding = tokens(segments = true" + (", padding = 0)" if padding else ")")
    model = reference(moe_spec(ranks=1, ep=1, model=embedding, beside="capacity = factor(0.5)"), seed=1)
    tokens = TOKENS.masked_fill(torch.rand(8, 8, generator=torch.Generator().manual_seed(2)) < 0.3, 0 if padding else 1)
    model(tokens, segments=SEGMENTS)
    found, summed = model.expert_counts, dict.fromkeys(model.expert_counts, 0)
    for row in tokens:
        for text in row.split([5, 2, 1]):
            model(text[None])
            summed = {layer: summed[layer] + counts for layer, counts in model.expert_counts.items()}
    for layer, counts in found.items():
        assert torch.equal(counts, summed[layer])
    model(tokens)
    assert any((model.expert_counts[layer] != counts).any() for layer, counts in found.items()), "nothing was dropped"


def test_numbers_of_segments_do_not_matter() -> None:
    """Segments may have any numbers that do not descend; a batch without them has one text in each sequence."""
    model = reference(moe_spec(ranks=1, ep=1, model=PACKED), seed=1)
    expected = model(TOKENS, segments=SEGMENTS).logits
    assert torch.equal(model(TOKENS, segments=SEGMENTS - 1000).logits, expected)
    assert torch.equal(model(TOKENS).logits, model(TOKENS, segments=torch.full_like(TOKENS, 7)).logits)
    assert not torch.equal(model(TOKENS).logits, expected)


# ---- faults ------------------------------------------------------------------------------------------------


FAULTS: dict[str, tuple[Any, Any]] = {
    "positions for segments": (KeepInSegments, lambda op: replace(op, operands=(op.operands[0], "positions"))),
    "a place too many": (KeepInSegments, lambda op: replace(op, least=op.least + 1)),
    "choices of other segments": (CountInSegments, lambda op: replace(op, operands=(op.operands[0], "positions"))),
    "segments and positions swapped": (NumberSegments, lambda op: replace(op, results=op.results[::-1])),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    kind, change = FAULTS[name]
    plan = packed(tp=2, ep=2, beside="capacity = factor(0.5)")
    report = verify(change_every(plan, kind, change), float32=False)
    assert not report.ok
    assert report.first_difference is not None


def test_a_packed_batch_has_the_balance_terms_of_its_texts() -> None:
    """mg#5996: the loss per sequence was wrong under sequence parallelism, for packed batches, for many sequences."""
    model = reference(moe_spec(ranks=1, ep=1, model=PACKED), seed=1, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 20
    whole = model(TOKENS, segments=SEGMENTS).aux_loss
    texts = [(model(text[None]).aux_loss, len(text)) for row in TOKENS for text in row.split([5, 2, 1])]
    torch.testing.assert_close(whole, sum(value * size for value, size in texts) / 64, rtol=1e-12, atol=1e-12)
    assert abs(whole - model(TOKENS).aux_loss) > 1e-6
    require_equal(packed(tp=2, ep=2))


# ---- jobs --------------------------------------------------------------------------------------------------


@pytest.fixture
def job() -> Iterator[Job]:
    with moec.launch(packed(ranks=1, ep=1, beside="capacity = factor(0.5)"), device="cpu") as launched:
        yield launched


def test_steps_micro_batches_custom_losses_and_accumulation_hand_segments_through(job: Job) -> None:
    model = job.build(seed=1)
    require_every_way_alike(job, model, TOKENS, LABELS, segments=SEGMENTS)
    rates = job.drop_rates(model)
    assert all(0 < rate < 1 for rate in rates.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks at it
def test_a_compiled_model_counts_segments(job: Job) -> None:
    model = job.build(seed=1)
    expected = model(TOKENS, LABELS, segments=SEGMENTS).loss
    torch._dynamo.reset()
    model.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(model(TOKENS, LABELS, segments=SEGMENTS).loss, expected)


def test_a_batch_of_no_sequences_runs(job: Job) -> None:
    model = job.build(seed=1)
    output = model(TOKENS[:0], segments=SEGMENTS[:0])
    assert output.logits.shape == (0, 8, 32)


WRONG = {
    "dtype": (SEGMENTS.int(), "torch.int32"),
    "shape": (SEGMENTS[:, 1:], "have shape"),
    "no tensor": (SEGMENTS.tolist(), "class list"),
    "descending": (SEGMENTS.flip(1), "descend in sequence 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_segments_are_one_error_before_anything_is_computed(job: Job, name: str) -> None:
    model, (segments, words) = job.build(seed=1), WRONG[name]
    for act in (
        lambda: model(TOKENS, LABELS, segments=segments),
        lambda: job.step(model, TOKENS, LABELS, segments=segments),
    ):
        with pytest.raises(JobError, match=words) as error:
            act()
        assert error.value.diagnostics[0].code == "MOE0727"


def test_a_model_without_segments_takes_none() -> None:
    with (
        moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job,
        pytest.raises(JobError, match="takes none") as error,
    ):
        job.step(job.build(), TOKENS, LABELS, segments=SEGMENTS)
    assert "segments = true" in error.value.diagnostics[0].help


@pytest.mark.parametrize("embedding", [PACKED, "embedding = tokens(separator = 3)"])
def test_what_cannot_count_within_texts_is_refused(embedding: str) -> None:
    exact = "capacity = factor(1.00000000001)"
    with pytest.raises(DiagnosticError) as error:
        moe_plan(model=embedding, beside=exact)
    assert [d.code for d in error.value.diagnostics] == ["MOE0202"]
    moe_plan(model=embedding, beside=f"{exact}; group = batch")


def test_segments_and_a_separator_exclude_each_other() -> None:
    text = moe_text(model="embedding = tokens(segments = true, separator = 3)")
    assert [d.code for d in load_text(text, name="a.moe").diagnostics] == ["MOE0371"]
