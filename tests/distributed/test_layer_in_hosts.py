"""`moec.layer` in DDP, FSDP2 and a host that sums: gradients are those of the unsharded model."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from support.plans import layer_text
from support.ranks.gloo_pool import GlooPool
from support.ranks.hosts import (
    Host,
    Transformer,
    batch,
    clipped,
    in_compiled_ddp,
    in_ddp,
    in_fsdp,
    summed_by_hand,
    worst_error,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

import moec
from moec.runtime.errors import JobError

FP32 = 2e-5
"""Sums in another order; a gradient with a wrong factor is off by its whole size."""


def require_equal(found: list[dict[str, float]], bound: float = FP32) -> None:
    for rank, errors in enumerate(found):
        assert len(errors) > 10
        wrong = {name: error for name, error in errors.items() if not error <= bound}
        assert not wrong, f"rank {rank}: {wrong}"


HOSTS: dict[Host, str] = {in_ddp: "mean", in_fsdp: "mean", summed_by_hand: "sum"}
"""How each reduces the gradients of its ranks."""


@pytest.mark.parametrize(
    ("host", "ranks", "ep"),
    [
        (in_ddp, 4, 2),
        *((host, 2, 2) for host in (in_fsdp, summed_by_hand)),
        *(pytest.param(host, 4, 4, marks=pytest.mark.slow) for host in HOSTS),
        *(pytest.param(host, 4, 2, marks=pytest.mark.slow) for host in (in_fsdp, summed_by_hand)),
    ],
)
def test_gradients_are_the_unsharded_models(gloo: GlooPool, host: Host, ranks: int, ep: int) -> None:
    require_equal(gloo.run(ranks, worst_error, host, {"ep": ep}, 1, HOSTS[host]))


@pytest.mark.parametrize(
    "options",
    [
        {"ep": 2, "beside": "shared = swiglu(8, gated = true); residual = gelu(8)"},
        {"ep": 2, "beside": "capacity = factor(1.0); group = batch"},
        pytest.param({"ep": 2, "beside": "capacity = factor(1.0); group = sequence"}, marks=pytest.mark.slow),
        {"ep": 2, "beside": "capacity = dynamic()", "expert": "gelu(16, bias = true)"},
        {"ep": 1},
        {},
    ],
    ids=["beside", "batch", "sequence", "dynamic", "data parallel", "default"],
)
def test_gradients_are_the_unsharded_models_whatever_the_mixture(gloo: GlooPool, options: dict[str, Any]) -> None:
    require_equal(gloo.run(2, worst_error, in_ddp, options))


@pytest.mark.slow
def test_gradients_of_a_compiled_model_in_ddp_are_those_of_the_unsharded_model(gloo: GlooPool) -> None:
    require_equal(gloo.run(2, worst_error, in_compiled_ddp, {"ep": 2}))


@pytest.mark.parametrize(("host", "word"), [(in_fsdp, "layer"), (in_ddp, "experts")])
def test_a_recomputed_layer_in_a_host_has_the_unsharded_gradients(gloo: GlooPool, host: Host, word: str) -> None:
    options = {"tail": f"parallel {{ ep = 2; recompute = {word} }}", "beside": "capacity = factor(1.0); group = batch"}
    require_equal(gloo.run(2, worst_error, host, options))


def test_gradients_of_several_backward_passes_add_up(gloo: GlooPool) -> None:
    require_equal(gloo.run(2, worst_error, in_ddp, {"ep": 2}, 3))


@pytest.mark.parametrize(
    ("ranks", "host", "max_norm"),
    [
        (4, in_ddp, 0.01),
        (2, in_fsdp, 100.0),
        pytest.param(4, in_ddp, 100.0, marks=pytest.mark.slow),
        *(pytest.param(4, in_fsdp, norm, marks=pytest.mark.slow) for norm in (0.01, 100.0)),
    ],
)
def test_the_norm_counts_every_expert_once_and_clips_alike_on_every_rank(
    gloo: GlooPool, ranks: int, host: Host, max_norm: float
) -> None:
    found = gloo.run(ranks, clipped, host, max_norm)
    assert len({each["norm"] for each in found}) == 1
    for each in found:
        assert each["norm"] == pytest.approx(each["whole"], rel=1e-5)
        assert each["error"] < FP32


class _Lbfgs(torch.optim.LBFGS):
    """Its step wants a closure."""

    def step(self) -> None:
        super().step(lambda: 0.0)


def optimizers_over_experts() -> list[str]:
    """What optimizers say that take experts for replicas; one over all but the experts trains."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it uses `torch.jit.script`
        from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
    said = []
    model = Transformer(lambda number: moec.layer(layer_text(ranks=2, ep=2), seed=number))
    experts = {id(parameter) for parameter in moec.expert_parameters(model).values()}
    others = [parameter for parameter in model.parameters() if id(parameter) not in experts]
    x, wanted = batch(2)

    def backward() -> None:
        ((model(x) - wanted).square().mean() + model.aux_loss()).backward()

    backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    averager = PeriodicModelAverager(period=2)
    for optimizer in (
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.0),
        _Lbfgs(model.parameters()),
        PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), averager),
    ):
        with pytest.raises(JobError) as raised:
            optimizer.step()
        said.append(str(raised.value))
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    ZeroRedundancyOptimizer(others, torch.optim.SGD, lr=0.1).step()
    return said


def of_one_rank() -> tuple[float, float]:
    """The norms that torch and moec take of a model in `fully_shard` on one rank, which ignores the experts."""
    host, _ = in_fsdp(Transformer(lambda number: moec.layer(layer_text(ranks=1), seed=number)))
    (host(batch(1)[0]).clone().square().sum() + host.aux_loss()).backward()
    return float(torch.nn.utils.clip_grad_norm_(host.parameters(), 1e9)), float(moec.clip_grad_norm_(host, 1e9))


def test_torch_clips_a_model_in_fully_shard_on_one_rank(gloo: GlooPool) -> None:
    ((of_torch, of_moec),) = gloo.run(1, of_one_rank)
    assert of_torch == pytest.approx(of_moec, rel=1e-6)


def joining() -> str:
    host, _ = in_ddp(Transformer(lambda number: moec.layer(layer_text(ranks=2, ep=2), seed=number)))
    with pytest.raises(JobError) as raised, host.join():
        host(batch(2)[0])
    return str(raised.value)


def test_uneven_batches_are_refused_before_a_rank_waits_for_another(gloo: GlooPool) -> None:
    assert all(re.search(r"MOE0711.*`join\(\)` lets a rank end", said) for said in gloo.run(2, joining))


def test_optimizers_over_experts_that_take_them_for_replicas_are_refused(gloo: GlooPool) -> None:
    for zero, lbfgs, averager in gloo.run(2, optimizers_over_experts):
        assert re.search("MOE0711.*LBFGS takes dot products over all parameters", lbfgs)
        assert re.search("MOE0711.*ZeroRedundancyOptimizer broadcasts parameters over ranks", zero)
        assert re.search("MOE0711.*model_averaging averages parameters over ranks", averager)
