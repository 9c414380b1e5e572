"""gloo processes: ranks generate the tokens of the unsharded model, whatever the plan."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.combinations import some
from support.plans import moe_plan, moe_spec
from support.ranks.gloo_pool import GlooPool
from support.ranks.refusals import said
from support.recomputed_generation import livelier, recomputed, uneven
from torch import Tensor

import moec
from moec.runtime.host.reference import reference
from moec.runtime.weights.masters import local_part

LENGTHS = (6, 2, 9, 1, 5, 5, 3, 7)
NEW = 6

MLA = "mla(heads = 4, kv_rank = 8, nope_dim = 4, rope_dim = 2, value_dim = 6, rope = rope())"
PLANS: dict[str, dict[str, Any]] = {
    "ep 4": {"ep": 4},
    "ep 4, zero 3": {"ep": 4, "zero": 3},
    "ep 2, zero 2": {"ep": 2, "zero": 2},
    "tp 2, ep 2": {"tp": 2, "ep": 2},
    "tp 2, ep 2, zero 3": {"tp": 2, "ep": 2, "zero": 3},
    "tp 4, tokens whole": {"tp": 4, "ep": 2, "sequence_parallel": False},
    "tp 2, ep 4, mla": {"tp": 2, "ep": 4, "attention": MLA},
    "tp 4, ep 1, kv heads repeated": {"tp": 4, "ep": 1},
    "tp 2, sinks, window, learned": {
        "tp": 2,
        "ep": 2,
        "attention": "gqa(heads = 4, kv_heads = 2, sinks = true, window = 3)",
        "model": "embedding = tokens(positions = learned, tied = true)",
    },
    "tp 2, padding": {"tp": 2, "ep": 2, "model": "embedding = tokens(padding = 3)"},
    "tp 2, given padding, separator": {
        "tp": 2,
        "ep": 4,
        "zero": 1,
        "model": "embedding = tokens(padding = given, separator = 5)",
    },
    "dynamic": {"ep": 4, "beside": "capacity = dynamic()"},
    "noisy gates": {"tp": 2, "ep": 2, "gate": "noisy_topk(2)", "balance": "[]"},
    "two ranks: tp 2, tokens whole, mla": {
        "ranks": 2, "tp": 2, "ep": 2, "sequence_parallel": False, "attention": MLA
    },
    "two ranks: tp 2, kv heads repeated, sinks, window, learned, noisy gates": {
        "ranks": 2,
        "tp": 2,
        "ep": 2,
        "attention": "gqa(heads = 4, kv_heads = 1, sinks = true, window = 3)",
        "model": "embedding = tokens(positions = learned, tied = true)",
        "gate": "noisy_topk(2)",
        "balance": "[]",
    },
    "two ranks: tp 2, given padding, separator": {
        "ranks": 2, "tp": 2, "ep": 2, "model": "embedding = tokens(padding = given, separator = 5)"
    },
    "two ranks: ep 2, zero 3, dynamic, padding": {
        "ranks": 2,
        "ep": 2,
        "zero": 3,
        "beside": "capacity = dynamic()",
        "model": "embedding = tokens(padding = 3)",
    },
    "two ranks: ep 2": {"ranks": 2, "ep": 2},
    "two ranks: ep 2, zero 3": {"ranks": 2, "ep": 2, "zero": 3},
    "two ranks: tp 2, ep 2": {"ranks": 2, "tp": 2, "ep": 2},
    "cp 2, tp 2, etp 2": {"cp": 2, "tp": 2, "ep": 2, "etp": 2, "zero": 2},
    "two ranks: cp 2, etp 2, kv heads repeated": {
        "ranks": 2, "cp": 2, "ep": 1, "etp": 2, "attention": "gqa(heads = 4, kv_heads = 1, sinks = true, window = 3)"
    },
}  # fmt: skip
FAST = ["tp 2, ep 2, zero 3", *list(PLANS)[13:17], list(PLANS)[-1]]


def options_of(plan: str) -> dict[str, Any]:
    return {"ranks": 4, "sequence": 16, **PLANS[plan]}


def prompts_of(options: dict[str, Any]) -> list[Tensor]:
    return uneven(32, LENGTHS, without=3)


def as_rank(options: dict[str, Any], how: dict[str, Any]) -> tuple[int, Tensor, Tensor, bool]:
    """This rank's part of the batch and what it generates for it, before and after a step in training."""
    with moec.launch(moe_plan(**options), device="cpu", timeout=60) as job:
        model = livelier(job.build(seed=1))
        mine = prompts_of(options)
        size = len(mine) // job.data_size
        mine = mine[job.data_rank * size : (job.data_rank + 1) * size]
        found = model.generate(mine, **how)
        tokens = torch.arange(32).view(2, 16)
        job.step(model, tokens, tokens)
        again = model.generate(mine, **how)
        same = torch.equal(found.tokens, again.tokens) and model.training
    return job.data_rank, found.tokens, found.lengths, same


def of_all(results: list[tuple[int, Tensor, Tensor, bool]]) -> tuple[Tensor, Tensor]:
    """The tokens and lengths of the whole batch; ranks of a tp group agree."""
    by_rank: dict[int, tuple[Tensor, Tensor]] = {}
    for rank, tokens, lengths, same in results:
        assert same
        known = by_rank.setdefault(rank, (tokens, lengths))
        assert torch.equal(known[0], tokens)
    parts = [by_rank[rank] for rank in sorted(by_rank)]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([lengths for _, lengths in parts])


@pytest.mark.parametrize("plan", some(list(PLANS), FAST))
def test_ranks_generate_the_tokens_of_full_recomputation(gloo: GlooPool, plan: str) -> None:
    options = options_of(plan)
    results = gloo.run(options["ranks"], as_rank, options, {"max_new_tokens": NEW})
    model = livelier(reference(moe_spec(**options), seed=1))
    expected = recomputed(model, prompts_of(options), NEW)
    assert len({tuple(row) for row in expected.tolist()}) > 2
    assert torch.equal(of_all(results)[0], expected)


def test_ranks_generate_in_bf16_what_one_process_does_but_for_ties_of_routers(gloo: GlooPool) -> None:
    """Products of other shapes round otherwise, and so a token at a tie goes to another expert on some processors."""
    options = {"ranks": 2, "sequence": 16, "ep": 2, "zero": 1, "dtype": "bf16"}
    found, _ = of_all(gloo.run(2, as_rank, options, {"max_new_tokens": NEW}))
    model, prompts = livelier(reference(moe_spec(**options), seed=1)), prompts_of(options)
    expected = torch.cat([model.generate(prompts[i : i + 4], max_new_tokens=NEW).tokens for i in range(0, 8, 4)])
    assert len({tuple(row) for row in expected.tolist()}) > 2
    assert (found == expected).all(dim=1).sum() >= 6


HOW = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "seed": 3}]


@pytest.mark.parametrize(
    ("plan", "how"),
    [
        ("two ranks: ep 2, zero 3", HOW[1]),
        ("two ranks: tp 2, ep 2", HOW[2]),
        *(
            pytest.param(plan, how, marks=pytest.mark.slow)
            for plan in ("ep 4", "tp 2, ep 2", "ep 4, zero 3")
            for how in HOW
        ),
    ],
    ids=str,
)
def test_ranks_step_together_until_the_last_sequence_ends(gloo: GlooPool, plan: str, how: dict[str, Any]) -> None:
    options = options_of(plan)
    alone = livelier(reference(moe_spec(**options), seed=1))
    prompts = prompts_of(options)
    free = alone.generate(prompts, max_new_tokens=NEW, **how).tokens
    how = {**how, "max_new_tokens": NEW, "eos": [int(free[0, 1]), int(free[3, 3])], "stop": [free[5, 2:4].tolist()]}
    expected = alone.generate(prompts, **how, pad=31)
    assert expected.lengths.amin() < expected.lengths.amax()
    tokens, lengths = of_all(gloo.run(options["ranks"], as_rank, options, {**how, "pad": 31}))
    assert torch.equal(lengths, expected.lengths)
    assert torch.equal(tokens, expected.tokens)


def uneven_batches(options: dict[str, Any]) -> list[list[int]]:
    """What this rank generates for as many prompts as its data rank's number and one, none on the last."""
    with moec.launch(moe_plan(**options), device="cpu", timeout=60) as job:
        model = livelier(job.build(seed=1))
        mine = own_prompts(job.data_rank, job.data_size)
        return model.generate(mine, max_new_tokens=NEW).tokens.tolist()


def own_prompts(rank: int, ranks: int) -> Tensor:
    whole = torch.randint(32, (4, 3 + rank), generator=torch.Generator().manual_seed(rank))
    return whole[: 0 if rank == ranks - 1 else rank + 1]


@pytest.mark.parametrize(
    "plan",
    some(
        ["ep 4", "tp 2, ep 2", "ep 4, zero 3", "ep 2, zero 2", "two ranks: ep 2, zero 3", "two ranks: ep 2"],
        ["two ranks: ep 2, zero 3"],
    ),
)
def test_ranks_may_have_different_numbers_of_prompts(gloo: GlooPool, plan: str) -> None:
    options = options_of(plan)
    alone = livelier(reference(moe_spec(**options), seed=1))
    tp, ranks = options.get("tp", 1), options["ranks"]
    for rank, found in enumerate(gloo.run(ranks, uneven_batches, options)):
        prompts = own_prompts(rank // tp, ranks // tp)
        assert found == alone.generate(prompts, max_new_tokens=NEW).tokens.tolist()


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "more tokens": ({"max_new_tokens": 3}, r"MOE0740.*different options"),
    "another end": ({"eos": 3}, r"MOE0740.*different options"),
    "another temperature": ({"temperature": 0.5}, r"MOE0740.*different options"),
    "another seed": ({"seed": 5}, r"MOE0740.*different options"),
    "a wrong option": ({"temperature": 1.0, "top_k": 0}, r"MOE0740.*rank LAST.*`top_k` is 0"),
    "a wrong id": ({"tokens": torch.full((2, 4), 32)}, r"MOE0702.*rank LAST.*the id 32"),
    "too long a prompt": ({"tokens": torch.ones(2, 16).long()}, r"MOE0742.*rank LAST.*16 tokens"),
    "a router of NaN": ({"nan": True}, r"MOE0708.*layer 1"),
}
"""What the last rank does otherwise, and what every rank says."""


def mistakes(options: dict[str, Any]) -> dict[str, str]:
    """What this rank says of each mistake of the last rank, and what it generates after all of them."""
    found = {}
    with moec.launch(moe_plan(**options), device="cpu", timeout=60) as job:
        model = livelier(job.build(seed=1))
        gate = local_part(model.get_parameter("layers.1.moe.gate.weight"))
        held, last = gate.clone(), job.rank == job.world_size - 1
        right = {"tokens": torch.arange(8).view(2, 4) + job.data_rank, "max_new_tokens": 4}
        for name, (changed, _) in MISTAKES.items():
            given = right | (changed if last else {})
            if given.pop("nan", False):
                gate.fill_(torch.nan)
            found[name] = said(lambda given=given: model.generate(**given))
            gate.copy_(held)
        found["right"] = str(model.generate(**right).tokens.tolist())
    return found


@pytest.mark.parametrize("plan", some(["ep 4", "ep 4, zero 3", "two ranks: ep 2, zero 3"], ["two ranks: ep 2, zero 3"]))
def test_one_ranks_mistake_is_one_error_of_all_ranks(gloo: GlooPool, plan: str) -> None:
    options = options_of(plan)
    alone = livelier(reference(moe_spec(**options), seed=1))
    for rank, found in enumerate(gloo.run(options["ranks"], mistakes, options)):
        for name, (_, message) in MISTAKES.items():
            assert re.search(message.replace("LAST", str(options["ranks"] - 1)), found[name]), (rank, name, found[name])
        tokens = torch.arange(8).view(2, 4) + rank
        assert found["right"] == str(alone.generate(tokens, max_new_tokens=4).tokens.tolist())


def batches_that_draw(sizes: list[int]) -> str:
    with moec.launch(moe_plan(ranks=2, ep=2), device="cpu", timeout=60) as job:
        model = job.build(seed=1)
        tokens = torch.ones(sizes[job.rank], 3, dtype=torch.int64)
        return said(lambda: model.generate(tokens, max_new_tokens=2, temperature=1.0))


def test_ranks_that_draw_for_different_numbers_of_prompts_need_their_numbers(gloo: GlooPool) -> None:
    message = "MOE0740 ranks 0 and 1 draw tokens for batches of different sizes: give `sequences`, their numbers"
    assert gloo.run(2, batches_that_draw, [1, 2]) == [message, message]


def places_of_a_capacity(sizes: list[int]) -> str:
    plan = moe_plan(ranks=2, ep=2, beside="capacity = factor(1.0, eval = 4.0); group = batch")
    with moec.launch(plan, device="cpu", timeout=60) as job:
        model = job.build(seed=1)
        tokens = torch.ones(sizes[job.rank], 3, dtype=torch.int64)
        return said(lambda: model.generate(tokens, max_new_tokens=2))


def test_ranks_whose_places_follow_from_their_tokens_need_prompts_of_one_shape(gloo: GlooPool) -> None:
    assert gloo.run(2, places_of_a_capacity, [2, 2]) == ["nothing", "nothing"]
    message = "MOE0702 prompts have shapes from [1, 3] to [2, 3] on the ranks, and must have one"
    assert all(each.startswith(message) for each in gloo.run(2, places_of_a_capacity, [1, 2]))
