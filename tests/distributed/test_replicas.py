"""Every rank names replicas that drift apart; equal replicas raise nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.plans import moe_plan
from support.ranks.gloo_pool import GlooPool
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import moec
from moec.runtime.errors import JobError
from moec.runtime.ranks.replicas import bit_hash, replicas
from moec.runtime.weights.masters import local_part

FOLDED = {"ranks": 4, "tp": 2, "ep": 2, "depth": 2}
EXPERT, DENSE, SHARDED = "edp", "replicated on all", "tp"


def names(kind: str) -> list[str]:
    """One parameter each that is sharded over ep, replicated, and sharded over tp."""
    found = []
    for name, data in moe_plan(**FOLDED).parameters.items():
        lies = EXPERT if data.mesh != "dense" else SHARDED if "tp:shard" in str(data.layout) else DENSE
        if lies == kind:
            found.append(name)
    return found


CASES: dict[str, tuple[str | None, int]] = {
    "alike": (None, 1),
    **{kind: (names(kind)[0], 2) for kind in (EXPERT, DENSE, SHARDED)},
    "never": (names(DENSE)[0], 0),
    "every third step": (names(DENSE)[0], 3),
}
"""The parameter that rank 3 changes, and how often a job compares."""


def flip() -> dict[str, str]:
    """Of each case this rank's error: one training step, one bit changed on rank 3, another step."""
    plan, found = moe_plan(**FOLDED), {}
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    for case, (name, every) in CASES.items():
        with moec.launch(plan, device="cpu", check_replicas=every) as job:
            model = job.build(seed=1)
            optimizer = job.optimizer(model)
            job.step(model, tokens, tokens)
            optimizer.step()
            if name and job.rank == 3:
                local_part(model.get_parameter(name)).view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
            found[case] = "alike"
            try:
                job.step(model, tokens, tokens)
            except moec.DiagnosticError as error:
                found[case] = f"{error.diagnostics[0].code} {error.diagnostics[0].message}"
    return found


@pytest.fixture(scope="module")
def said(gloo: GlooPool) -> dict[str, str]:
    """What every rank says, by case."""
    first, *others = gloo.run(4, flip)
    assert all(other == first for other in others)
    return dict(first)


def test_replicas_that_train_alike_pass(said: dict[str, str]):
    assert said["alike"] == "alike"


@pytest.mark.parametrize("kind", [EXPERT, DENSE, SHARDED])
def test_one_changed_bit_on_one_rank_is_named(said: dict[str, str], kind: str):
    name = names(kind)[0]
    (peers,) = (ranks for ranks in replicas(moe_plan(**FOLDED), name) if 3 in ranks)
    assert len(peers) == (4 if kind == DENSE else 2)
    drift = "rank 3 differs from ranks 0, 1, 2" if kind == DENSE else "rank 1 and rank 3 differ from each other"
    assert said[kind] == f"MOE0704 {name}: {drift}"


@pytest.mark.parametrize("case", ["never", "every third step"])
def test_steps_between_checks_are_not_checked(said: dict[str, str], case: str):
    assert said[case] == "alike"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_hash_sees_a_swap_and_a_signed_zero(dtype: torch.dtype):
    x = torch.tensor([1.0, 2.0, 0.0], dtype=dtype)
    assert torch.equal(bit_hash(x), bit_hash(x.clone()))
    assert not torch.equal(bit_hash(x), bit_hash(x[[1, 0, 2]]))
    assert not torch.equal(bit_hash(x), bit_hash(x * torch.tensor([1.0, 1.0, -1.0], dtype=dtype)))


ONLINE = {"ranks": 2, "ep": 2, "gate": "topk(2, score = sigmoid, normalize = true, bias = online(1e-3))"}
BIAS = "layers.2.moe.gate.bias"


class Around(nn.Module):
    """Calls a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inside = layer

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.inside(*inputs)


def with_wrapped_layers(kind: str) -> tuple[list[float], str, str]:
    """Gradient norms of two steps, and what the job says of an expert and of a bias that rank 1 has changed."""
    tokens = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(0))
    with moec.launch(moe_plan(**ONLINE), device="cpu", check_replicas=1) as job:
        model, norms = job.build(seed=1), []
        last = model.layers[2]
        for number in range(3) if kind != "plain" else ():
            model.layers[number] = {"checkpoint": checkpoint_wrapper, "module": Around}[kind](model.layers[number])
        optimizer = job.optimizer(model)
        mine = tokens.chunk(job.data_size)[job.data_rank]
        for _ in range(2):
            job.step(model, mine, mine.roll(-1, 1))
            norms.append(float(job.clip_grad_norm_(model, 0.1)))
            optimizer.step()
            optimizer.zero_grad()
        found = []
        for tensor in (last.get_buffer("moe.gate.bias"), last.get_parameter("attention.q.weight")):
            part = local_part(tensor)
            if job.rank == 1:
                part.view(-1)[-1:] += 1
            with pytest.raises(JobError) as drifted:
                job.check_replicas(model)
            found.append(drifted.value.diagnostics[0].message)
            if job.rank == 1:
                part.view(-1)[-1:] -= 1
            part.zero_()
    return norms, found[0], found[1]


@pytest.mark.parametrize("kind", ["checkpoint", "module"])
def test_wrapped_layers_train_and_are_compared_as_plain_ones(gloo: GlooPool, kind: str):
    """Norms count experts of both ranks; a state inside of a wrapper is compared too."""
    plain, wrapped = (gloo.run(2, with_wrapped_layers, each) for each in ("plain", kind))
    assert wrapped == plain
    for norms, bias, weight in wrapped:
        assert norms == wrapped[0][0]
        assert bias == f"{BIAS}: rank 0 and rank 1 differ from each other"
        assert weight == "layers.2.attention.q.weight: rank 0 and rank 1 differ from each other"
