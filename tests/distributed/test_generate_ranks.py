"""gloo processes: ranks generate the tokens of the unsharded model, whatever the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from generated import livelier, recomputed, uneven
from gloo_pool import GlooPool
from models import moe_plan, moe_spec
from torch import Tensor

import moec
from moec.runtime.job.reference import reference

LENGTHS = (6, 2, 9, 1, 5, 5, 3, 7)
NEW = 6

PLANS: dict[str, dict[str, Any]] = {
    "ep 4": {"ep": 4},
    "ep 4, zero 3": {"ep": 4, "zero": 3},
    "ep 2, zero 2": {"ep": 2, "zero": 2},
    "tp 2, ep 2": {"tp": 2, "ep": 2},
    "tp 2, ep 2, zero 3": {"tp": 2, "ep": 2, "zero": 3},
    "tp 4, tokens whole": {"tp": 4, "ep": 2, "sequence_parallel": False},
    "tp 2, ep 4, mla": {
        "tp": 2,
        "ep": 4,
        "attention": "mla(heads = 4, kv_rank = 8, nope_dim = 4, rope_dim = 2, value_dim = 6, rope = rope())",
    },
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
    "bf16": {"ep": 4, "zero": 1, "dtype": "bf16"},
    "dynamic": {"ep": 4, "beside": "capacity = dynamic()"},
    "noisy gates": {"tp": 2, "ep": 2, "gate": "noisy_topk(2)", "balance": "[]"},
}


def options_of(plan: str) -> dict[str, Any]:
    return {"ranks": 4, "sequence": 16, **PLANS[plan]}


def prompts_of(options: dict[str, Any]) -> list[Tensor]:
    return uneven(32, LENGTHS, without=3)


def as_rank(options: dict[str, Any], how: dict[str, Any]) -> tuple[int, Tensor, Tensor, bool]:
    """This rank's part of the batch and what it generates for it, before and after a step in training."""
    torch.set_num_threads(1)
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


@pytest.mark.parametrize("plan", PLANS)
def test_ranks_generate_the_tokens_of_full_recomputation(gloo: GlooPool, plan: str) -> None:
    options = options_of(plan)
    results = gloo.run(4, as_rank, options, {"max_new_tokens": NEW})
    model = livelier(reference(moe_spec(**options), seed=1))
    if options.get("dtype") == "bf16":  # recomputation of a whole sequence rounds otherwise
        expected = model.generate(prompts_of(options), max_new_tokens=NEW).tokens
    else:
        expected = recomputed(model, prompts_of(options), NEW)
    assert len({tuple(row) for row in expected.tolist()}) > 2
    assert torch.equal(of_all(results)[0], expected)


@pytest.mark.parametrize("plan", ["ep 4", "tp 2, ep 2", "ep 4, zero 3"])
@pytest.mark.parametrize("how", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "seed": 3}])
def test_ranks_step_together_until_the_last_sequence_ends(gloo: GlooPool, plan: str, how: dict[str, Any]) -> None:
    options = options_of(plan)
    alone = livelier(reference(moe_spec(**options), seed=1))
    prompts = prompts_of(options)
    free = alone.generate(prompts, max_new_tokens=NEW, **how).tokens
    how = {**how, "max_new_tokens": NEW, "eos": [int(free[0, 1]), int(free[3, 3])], "stop": [free[5, 2:4].tolist()]}
    expected = alone.generate(prompts, **how, pad=31)
    assert expected.lengths.amin() < expected.lengths.amax()
    tokens, lengths = of_all(gloo.run(4, as_rank, options, {**how, "pad": 31}))
    assert torch.equal(lengths, expected.lengths)
    assert torch.equal(tokens, expected.tokens)
