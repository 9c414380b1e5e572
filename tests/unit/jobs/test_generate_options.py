"""Prompts, ends, drawn tokens and mistakes of `generate`, and the model after it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.plans import moe_plan, moe_spec
from support.recomputed_generation import livelier, lively, recomputed, uneven
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import moec
from moec.runtime.errors import JobError
from moec.runtime.host.reference import reference
from moec.runtime.model.generation.sampling import Sampling
from moec.runtime.model.module import PlanModule


def small(**options: Any) -> PlanModule:
    return lively(moec.reference(moe_spec(ranks=1, ep=1, sequence=16, **options), seed=1))


PROMPTS = uneven(32, (6, 2, 4), without=3)


def padded(side: str, fill: int) -> tuple[Tensor, Tensor]:
    """The prompts as one tensor, and which tokens are padding."""
    ids, padding = torch.full((3, 8), fill), torch.ones(3, 8, dtype=torch.bool)
    for row, prompt in enumerate(PROMPTS):
        start = 8 - len(prompt) if side == "left" else 1 if side == "both" else 0
        ids[row, start : start + len(prompt)] = prompt
        padding[row, start : start + len(prompt)] = False
    return ids, padding


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_may_be_on_any_side(side: str) -> None:
    model = small()
    expected = model.generate(PROMPTS, max_new_tokens=5).tokens
    ids, padding = padded(side, 7)
    assert torch.equal(model.generate(ids, padding=padding, max_new_tokens=5).tokens, expected)
    assert torch.equal(model.generate(ids, padding=padding.long(), max_new_tokens=5).tokens, expected)


def test_a_model_with_a_padding_id_finds_it() -> None:
    model = small(model="embedding = tokens(padding = 3)")
    expected = model.generate(PROMPTS, max_new_tokens=5).tokens
    assert torch.equal(model.generate(padded("left", 3)[0], max_new_tokens=5).tokens, expected)


def test_sequences_end_with_an_id_or_a_run_of_ids() -> None:
    model = small()
    free = model.generate(PROMPTS, max_new_tokens=6)
    assert free.lengths.tolist() == [6, 6, 6]
    end, run = int(free.tokens[0, 2]), free.tokens[1, 3:5].tolist()
    found = model.generate(PROMPTS, max_new_tokens=6, eos=[end], stop=[run], pad=30)
    for row, (tokens, length) in enumerate(zip(free.tokens.tolist(), found.lengths.tolist(), strict=True)):
        ends = [n for n in range(1, 7) if tokens[n - 1] == end or tokens[max(0, n - 2) : n] == run]
        assert length == (ends[0] if ends else 6)
        assert found.tokens[row].tolist() == tokens[:length] + [30] * (found.tokens.shape[1] - length)
    assert found.lengths[0] <= 3
    assert found.lengths[1] <= 5
    assert [each.tolist() for each in found] == [
        row[:length] for row, length in zip(free.tokens.tolist(), found.lengths.tolist(), strict=True)
    ]
    alone = model.generate(PROMPTS[:1], max_new_tokens=6, eos=end)
    assert alone.tokens.shape == (1, int(found.lengths[0])), "it stops when all sequences have ended"


def test_drawn_tokens_follow_seed_sequence_and_place_alone() -> None:
    model = small()
    how: dict[str, Any] = {"max_new_tokens": 6, "temperature": 1.5}
    first = model.generate(PROMPTS, seed=4, **how).tokens
    assert torch.equal(model.generate(PROMPTS, seed=4, **how).tokens, first)
    assert not torch.equal(model.generate(PROMPTS, seed=5, **how).tokens, first)
    backwards = model.generate(PROMPTS[::-1], seed=4, sequences=torch.tensor([2, 1, 0]), **how).tokens
    assert torch.equal(backwards, first.flip(0))
    alike = model.generate([PROMPTS[0]] * 8, seed=4, **how).tokens
    assert len({tuple(row) for row in alike.tolist()}) > 4
    with torch.no_grad():
        model.head.weight.zero_()  # every place has the same probabilities
    assert len(set(model.generate(PROMPTS[:1], seed=4, **how).tokens[0].tolist())) > 1
    model = small()
    longer = torch.cat([PROMPTS[0], first[0, :2]])
    assert torch.equal(model.generate([longer], seed=4, max_new_tokens=4, temperature=1.5).tokens[0], first[0, 2:])


LOGITS = torch.tensor([0.0, 2.0, -1.0, 1.0, -torch.inf, 1.0])


@pytest.mark.parametrize(
    ("how", "allowed"),
    [
        ({"temperature": 1.0}, [0, 1, 2, 3, 5]),
        ({"temperature": 0.5, "top_k": 2}, [1, 3, 5]),
        ({"temperature": 2.0, "top_k": 99}, [0, 1, 2, 3, 5]),
        ({"temperature": 1.0, "top_p": 0.6}, [1, 3, 5]),
        ({"temperature": 1.0, "top_p": 1e-9}, [1]),
        ({"temperature": 1.0, "top_k": 4, "top_p": 0.5}, [1]),
        ({"temperature": 1e-6}, [1]),
    ],
)
def test_tokens_are_drawn_by_the_probabilities_of_those_allowed(how: dict[str, Any], allowed: list[int]) -> None:
    count = 20_000
    chosen = Sampling(seed=7, **how).choose(LOGITS.expand(count, 6), torch.arange(count), torch.full((count,), 3))
    kept = torch.full((6,), -torch.inf).index_copy(0, torch.tensor(allowed), LOGITS[allowed])
    expected = (kept.double() / how["temperature"]).softmax(-1)
    found = torch.bincount(chosen, minlength=6) / count
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=4 * 0.5 / count**0.5)
    assert not found[expected == 0].any()


def test_the_best_token_is_the_first_of_equal_ones() -> None:
    equal = torch.tensor([[0.0, 1.0, 1.0], [2.0, 2.0, 0.0]])
    assert Sampling().choose(equal, torch.arange(2), torch.arange(2)).tolist() == [1, 0]


def test_a_model_in_training_generates_as_in_evaluation_and_stays_in_training() -> None:
    options: dict[str, Any] = {"gate": "switch(jitter = 0.3)", "beside": "capacity = factor(0.5, eval = 8.0)"}
    model = small(**options)
    expected = recomputed(model, PROMPTS, 5)
    found = model.generate(PROMPTS, max_new_tokens=5).tokens
    assert torch.equal(found, expected)
    assert model.training
    assert not found.is_inference()
    model.eval()
    assert torch.equal(model.generate(PROMPTS, max_new_tokens=5).tokens, expected)
    assert not model.training


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_generation_between_steps_has_the_weights_of_the_last_one(dtype: str) -> None:
    plan = moe_plan(ranks=1, ep=1, sequence=16, dtype=dtype, optimizer="adamw(lr = 0.05)")
    other = reference(moe_spec(ranks=1, ep=1, sequence=16, dtype=dtype), seed=9)
    tokens = torch.randint(32, (4, 16), generator=torch.Generator().manual_seed(2))
    seen = []
    with moec.launch(plan, device="cpu") as job:
        model = livelier(job.build(seed=1))
        optimizer = job.optimizer(model)
        for _ in range(3):
            job.step(model, tokens, tokens.roll(-1, 1))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(model.generate(PROMPTS, max_new_tokens=8).tokens)
            other.load_state_dict(dict(model.state_dict()))
            assert torch.equal(other.generate(PROMPTS, max_new_tokens=8).tokens, seen[-1])
        with job.accumulate(model, tokens):
            model.generate(PROMPTS, max_new_tokens=2)
            model(tokens, tokens).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    assert not torch.equal(seen[0], seen[2])


def test_copies_and_wrapped_layers_generate() -> None:
    model = small()
    expected = model.generate(PROMPTS, max_new_tokens=5).tokens
    other = lively(copy.deepcopy(model), seed=6)
    assert not torch.equal(other.generate(PROMPTS, max_new_tokens=5).tokens, expected)
    assert other._decoding.emitted() is model._decoding.emitted()
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    assert torch.equal(model.generate(PROMPTS, max_new_tokens=5).tokens, expected)
    model.layers[1] = torch.nn.Identity()
    with pytest.raises(JobError, match=r"MOE0741.*layer 1 was replaced by a module of class Identity"):
        model.generate(PROMPTS, max_new_tokens=5)


def test_a_batch_of_no_prompts_gives_no_tokens() -> None:
    found = small().generate(torch.empty(0, 3, dtype=torch.int64), max_new_tokens=4)
    assert found.tokens.shape[0] == found.lengths.shape[0] == 0


def test_after_an_error_the_model_trains_and_generates() -> None:
    model = small()
    expected = model.generate(PROMPTS, max_new_tokens=3).tokens
    gate = model.get_parameter("layers.1.moe.gate.weight").data
    held = gate.clone()
    gate[0] = torch.nan
    with pytest.raises(JobError, match=r"MOE0708.*layer 1 "):
        model.generate(PROMPTS, max_new_tokens=3)
    gate.copy_(held)
    tokens = torch.arange(32).view(2, 16)
    model(tokens, tokens).loss.backward()
    assert torch.equal(model.generate(PROMPTS, max_new_tokens=3).tokens, expected)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no new tokens": ({"max_new_tokens": 0}, "MOE0740.*max_new_tokens"),
    "half a token": ({"max_new_tokens": 1.5}, "MOE0740.*max_new_tokens"),
    "beyond the context": ({"max_new_tokens": 11}, "MOE0742.*6 tokens.*11 new.*16"),
    "a negative temperature": ({"temperature": -1.0}, "MOE0740.*temperature"),
    "a word for a temperature": ({"temperature": "hot"}, "MOE0740.*temperature"),
    "nan": ({"temperature": float("nan")}, "MOE0740.*temperature"),
    "top_k of 0": ({"temperature": 1.0, "top_k": 0}, "MOE0740.*top_k"),
    "top_p of 2": ({"temperature": 1.0, "top_p": 2.0}, "MOE0740.*top_p"),
    "top_p without a temperature": ({"top_p": 0.5}, "MOE0740.*temperature"),
    "a seed that is none": ({"seed": -1}, "MOE0740.*seed"),
    "an end beyond the vocabulary": ({"eos": 32}, "MOE0740.*32"),
    "an end that is no id": ({"eos": "."}, "MOE0740"),
    "a run that is no list": ({"stop": [3, 2]}, "MOE0740.*must be a list of lists of ids"),
    "an empty run": ({"stop": [[]]}, "MOE0740"),
    "a run of words": ({"stop": [["a"]]}, "MOE0740"),
    "a pad beyond the vocabulary": ({"pad": -1}, "MOE0740"),
    "numbers of other sequences": ({"sequences": torch.arange(2)}, "MOE0740.*sequences"),
    "negative numbers": ({"sequences": torch.arange(3) - 1}, "MOE0740.*sequences"),
    "padding beside a list": ({"padding": torch.zeros(3, 6)}, "MOE0728"),
    "floats": ({"tokens": torch.rand(3, 4)}, "MOE0702.*float32"),
    "one dim": ({"tokens": torch.arange(4)}, "MOE0702"),
    "ids beyond the vocabulary": ({"tokens": torch.full((1, 2), 32)}, "MOE0702.*32"),
    "nothing": ({"tokens": None}, "MOE0702"),
    "no prompts": ({"tokens": []}, "MOE0702"),
    "an empty prompt": ({"tokens": [torch.arange(3), torch.arange(0)]}, "MOE0740.*prompt 1"),
    "prompts of strings": ({"tokens": ["ab"]}, "MOE0702.*prompt 0"),
    "only padding": ({"tokens": torch.ones(1, 2).long(), "padding": torch.ones(1, 2).bool()}, "MOE0740.*prompt 0"),
    "padding in the middle": (
        {"tokens": torch.ones(1, 3).long(), "padding": torch.tensor([[False, True, False]])},
        "MOE0740.*prompt 0 has padding between",
    ),
    "padding of another shape": ({"tokens": torch.ones(1, 3).long(), "padding": torch.zeros(3).bool()}, "MOE0728"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_prompts_and_options_are_coded_errors(mistake: str) -> None:
    given, message = WRONG[mistake]
    given = {"tokens": PROMPTS, "max_new_tokens": 3, **given}
    with pytest.raises(JobError, match=f"(?s){message}"):
        small().generate(given.pop("tokens"), **given)
