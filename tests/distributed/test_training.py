"""gloo processes train as the unsharded model does."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.combinations import some
from support.plans import FOUR, moe_plan
from support.ranks.gloo_pool import GlooPool
from support.ranks.training import accumulate, backward_twice, batches, complain, train_as_rank, train_unsharded
from torch import Tensor

import moec
from moec.passes.ir import local_slices
from moec.runtime.errors import JobError
from moec.runtime.job.reference import reference

TOLERANCE = 1e-4
# At larger rates AdamW makes whole steps of gradients that are rounding noise: with lr = 1e-2 curves part at step 10,
# by 1.6e-3; with eps = 1e-5 beside it they do not (2e-6). That is no property of the sharding.

PADDED = "embedding = tokens(padding = 3)"


@cache
def unsharded(**options: Any) -> dict[str, Any]:
    return train_unsharded(dict(options))


def require_same_curve(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE)
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-3)
    losses = expected["losses"]
    same_batch = losses[(len(losses) - 1) % 3]
    assert losses[-1] < same_batch - 0.1, "the run learns nothing, so it proves nothing"


RANKS_AND_EP = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]


@pytest.mark.parametrize("degrees", some(RANKS_AND_EP, [(2, 1), (4, 4)]))
def test_any_ranks_and_ep_give_the_unsharded_loss_curve(gloo: GlooPool, degrees: tuple[int, int]):
    ranks, ep = degrees
    options = {"batch": 8, "optimizer": "adamw(lr = 3e-3)"}
    results = gloo.run(ranks, train_as_rank, {**options, "ranks": ranks, "ep": ep})
    expected = unsharded(**options)
    require_same_curve(results, expected)
    plan = moe_plan(**options, ranks=ranks, ep=ep)
    for name, data in plan.parameters.items():
        for rank, result in enumerate(results):
            index = local_slices(data.shape, data.layout, plan.meshes[data.mesh], rank)
            torch.testing.assert_close(
                result["parameters"][name], expected["parameters"][name][index], rtol=1e-2, atol=1e-3
            )


FOLDED = {
    "tp 2": (2, {"tp": 2, "ep": 1}),
    "tp 2, ep 2": (2, {"tp": 2, "ep": 2}),
    "dp 2, tp 2, ep 1": (4, {"tp": 2, "ep": 1}),
    "dp 2, tp 2, ep 2": (4, {"tp": 2, "ep": 2}),
    "dp 2, tp 2, ep 4": (4, {"tp": 2, "ep": 4}),
    "tp 4, ep 2": (4, {"tp": 4, "ep": 2}),
    "tp 4, ep 4, tokens whole": (4, {"tp": 4, "ep": 4, "sequence_parallel": False}),
    "tp 2, ep 4, tokens whole": (4, {"tp": 2, "ep": 4, "sequence_parallel": False}),
    "tp 2, shared, biases": (2, {"tp": 2, "ep": 2, "beside": "shared = swiglu(8, gated = true)", "bias": "all"}),
    "tp 2, jitter": (4, {"tp": 2, "ep": 2, "gate": "topk(2, jitter = 0.2)"}),
    "tp 2, a random second expert": (4, {"tp": 2, "ep": 2, "gate": "gshard", "balance": "[gshard_loss(0.01)]"}),
    "tp 2, noise, loads of the batch": (
        4, {
            "tp": 2, "ep": 2, "gate": "noisy_topk(2)", "beside": "group = batch", "model": PADDED,
            "balance": "[load_loss(0.01), importance_loss(0.01)]",
        }
    ),
    "tp 2, sampled experts": (4, {"tp": 2, "ep": 2, "gate": "sparsemixer(2, jitter = 0.3)"}),
    "tp 2, experts by codes": (4, {"tp": 2, "ep": 2, "gate": "dselect_k(2, entropy = 0.01)", "balance": "[]"}),
    "tp 2, heads by token": (
        4, {
            "tp": 2, "ep": 2, "model": PADDED, "gate": "noisy_topk(2)",
            "attention": "moa(heads = 4, kv_heads = 2, experts = 5, gate = noisy_topk(2), rope = rope(), bias = all, "
            "normalize = true, balance = [switch_loss(0.01), z_loss(0.001)])",
        }
    ),
    "tp 2, packed texts": (4, {"tp": 2, "ep": 2, "model": "embedding = tokens(separator = 3)"}),
    "tp 2, norm of each head": (4, {"tp": 2, "ep": 2, "qk_norm": "head"}),
    "tp 4, norm of all heads together": (4, {"tp": 4, "ep": 2, "qk_norm": "projection"}),
    "tp 4, residual, tied": (
        4, {"tp": 4, "ep": 2, "beside": "residual = gelu(8)", "model": "embedding = tokens(tied = true)"}
    ),
    "tp 2, layer norm, positions": (
        4, {"tp": 2, "ep": 4, "model": "norm = layer_norm(); embedding = tokens(positions = learned)"}
    ),
    "tp 2, ep 4, experts by ids": (
        4, {"tp": 2, "ep": 4, "gate": "hash(2)", "balance": "[]", "beside": "capacity = factor(1.0)", "model": PADDED}
    ),
    "tp 2, experts choose": (4, {"tp": 2, "ep": 2, "gate": "expert_choice(2)", "balance": "[]", "model": PADDED}),
    "tp 2, slots": (4, {"tp": 2, "ep": 4, "gate": "soft(2)", "balance": "[]", "model": PADDED}),
    "tp 2, merged experts": (4, {"tp": 2, "ep": 2, "gate": "smear", "balance": "[]", "model": PADDED}),
    "tp 2, balanced assignment": (4, {"tp": 2, "ep": 2, "gate": "base", "balance": "[]"}),
    "tp 2, reroutes at random": (
        4, {"tp": 2, "ep": 4, "beside": "capacity = factor(1.0, order = random); overflow = reroute; group = batch"}
    ),
    "tp 2, separate texts, layer norm, positions, biases, norm of each head, shared, jitter": (
        4, {
            "tp": 2, "ep": 2, "bias": "all", "qk_norm": "head", "gate": "topk(2, jitter = 0.1)",
            "beside": "shared = swiglu(8, gated = true)",
            "model": "norm = layer_norm(); embedding = tokens(separator = 3, positions = learned)",
        }
    ),
    "tp 4, norm of all heads together, residual, tied": (
        4, {
            "tp": 4, "ep": 2, "qk_norm": "projection", "beside": "residual = gelu(8)",
            "model": "embedding = tokens(tied = true)",
        }
    ),
    "tp 2, lora experts over frozen layers": (
        4, {
            "tp": 2, "ep": 2, "expert": "lora(3, alpha = 6)", "beside": "shared = swiglu(8)",
            "optimizer": "adamw(lr = 3e-3); frozen = [attention, norms, ffn, shared]",
        }
    ),
    "dp 4, tp 2, ep 8": (8, {"tp": 2, "ep": 8}),
    "dp 2, tp 4, ep 2": (8, {"tp": 4, "ep": 2}),
    "dp 2, tp 4, ep 4, a degree per layer": (8, {"tp": 4, "ep": 4, "mixtures": ((8, 2), (16, 8), (8, None))}),
}  # fmt: skip
"""Ranks and degrees; the dense parts' dp and the experts' edp follow."""

FAST = (
    "dp 2, tp 2, ep 2",
    "tp 4, ep 4, tokens whole",
    "tp 2, separate texts, layer norm, positions, biases, norm of each head, shared, jitter",
    "tp 4, norm of all heads together, residual, tied",
    "tp 2, ep 4, experts by ids",
)
"""The others are more degrees of the same mechanisms, or one feature alone: the slow part."""


@pytest.mark.parametrize("name", some(list(FOLDED), FAST))
def test_tensor_parallelism_folded_with_experts_gives_the_unsharded_loss_curve(gloo: GlooPool, name: str):
    ranks, degrees = FOLDED[name]
    model = {key: value for key, value in degrees.items() if key not in ("tp", "ep", "sequence_parallel")}
    options = {"batch": 8, "optimizer": "adamw(lr = 3e-3)", **model}
    results = gloo.run(ranks, train_as_rank, {**options, **degrees, "ranks": ranks}, timeout=120.0)
    expected = unsharded(**options)
    require_same_curve(results, expected)
    plan = moe_plan(**{**options, **degrees}, ranks=ranks)
    logits = expected["logits"].chunk(plan.data_size)
    for rank, result in enumerate(results):
        torch.testing.assert_close(result["logits"], logits[plan.data_rank(rank)], rtol=1e-2, atol=1e-3)
        for parameter, data in plan.parameters.items():
            index = local_slices(data.shape, data.layout, plan.meshes[data.mesh], rank)
            whole = expected["parameters"][parameter]
            torch.testing.assert_close(result["parameters"][parameter], whole[index], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("ranks", "degrees", "capacity"),
    [
        pytest.param(
            2, {"ep": 2, "model": PADDED, "gate": "topk(2, jitter = 0.1)"}, "dropless", marks=pytest.mark.slow
        ),
        (2, {"ep": 2, "tp": 2}, "factor(1.25)"),
        pytest.param(2, {"ep": 2}, "dropless", marks=pytest.mark.slow),
        pytest.param(2, {"ep": 2}, "dynamic(max = 1.5)", marks=pytest.mark.slow),
    ],
)
def test_compiled_graphs_with_their_collectives_train_alike(
    gloo: GlooPool, ranks: int, degrees: dict[str, Any], capacity: str
):
    options = {"batch": 8, "ranks": ranks, "beside": f"capacity = {capacity}", **degrees}
    compiled = gloo.run(ranks, train_as_rank, options, None, 4, "aot_eager", timeout=120.0)
    for ours, eager in zip(compiled, gloo.run(ranks, train_as_rank, options, None, 4), strict=True):
        assert ours["losses"] == eager["losses"]
        assert ours["norms"] == eager["norms"]
        for name, parameter in eager["parameters"].items():
            assert torch.equal(ours["parameters"][name], parameter)


@pytest.mark.parametrize(
    ("degrees", "capacity", "sizes"),
    [
        ({"ep": 4}, "dropless", [2, 0, 5, 1]),
        pytest.param({"ep": 2, "tp": 2}, "dropless", None, marks=pytest.mark.slow),
        ({"ep": 2, "tp": 2}, "factor(0.75); group = batch", None),
        pytest.param({"ep": 4}, "dynamic()", None, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_model_with_padding_trains_as_unsharded_and_its_loads_leave_padding_out(
    gloo: GlooPool, degrees: dict[str, int], capacity: str, sizes: list[int] | None
):
    options = {"batch": 8, "optimizer": "adamw(lr = 3e-3)", "beside": f"capacity = {capacity}", "model": PADDED}
    results = gloo.run(4, train_as_rank, {**options, **degrees, "ranks": 4}, sizes, timeout=120.0)
    require_same_curve(results, unsharded(**options))
    real = [int((tokens != 3).sum()) for tokens, _ in batches(32, 8, 8)]
    assert min(real) < 64, "there is no padding, so it proves nothing"
    for number, loads in zip(real, results[0]["loads"], strict=True):
        for counts in loads.values():
            assert sum(counts) <= 2 * number if "factor" in capacity else sum(counts) == 2 * number


@pytest.mark.parametrize("sizes", some([None, [2, 2, 3, 1]], [[2, 2, 3, 1]]))
def test_a_dynamic_capacity_drops_nothing_whatever_each_rank_has(gloo: GlooPool, sizes: list[int] | None):
    options = {"batch": 8, "optimizer": "adamw(lr = 3e-3)", "beside": "capacity = dynamic()"}
    results = gloo.run(4, train_as_rank, {**options, "ranks": 4, "ep": 2}, sizes)
    require_same_curve(results, unsharded(**options))
    assert all(rate == 0 for step in results[0]["drops"] for rate in step.values())


@pytest.mark.parametrize(
    ("ranks", "degrees", "capacity"),
    [
        pytest.param(2, {"ep": 2}, "factor(1.0); group = sequence", marks=pytest.mark.slow),
        (4, {"ep": 4}, "factor(0.75, min = 2); group = batch"),
        (4, {"ep": 2, "tp": 2}, "factor(1.25); group = sequence"),
        pytest.param(4, {"ep": 4, "tp": 2}, "factor(1.0); group = batch", marks=pytest.mark.slow),
        pytest.param(8, {"ep": 4, "tp": 2}, "factor(1.0); group = sequence", marks=pytest.mark.slow),
        (4, {"ep": 2, "tp": 2}, "dynamic(max = 0.8); group = sequence"),
        pytest.param(4, {"ep": 4}, "dynamic(max = 1.1); group = batch", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_capacity_drops_the_same_choices_however_it_is_sharded(
    gloo: GlooPool, ranks: int, degrees: dict[str, int], capacity: str
):
    options = {"batch": 8, "optimizer": "adamw(lr = 3e-3)", "beside": f"capacity = {capacity}"}
    results = gloo.run(ranks, train_as_rank, {**options, **degrees, "ranks": ranks}, timeout=120.0)
    require_same_curve(results, unsharded(**options))
    alone = gloo.run(1, train_as_rank, {**options, "ranks": 1, "ep": 1}, timeout=120.0)[0]
    assert all(result["drops"] == alone["drops"] for result in results)
    rates = [rate for step in alone["drops"] for rate in step.values()]
    assert any(0 < rate < 0.9 for rate in rates), "nothing is dropped, so it proves nothing"


CUT = [(1, 1, 2), (2, 2, 1), (2, 1, 2), (4, 4, 1), (4, 2, 2)]


@pytest.mark.parametrize("cut", some(CUT, [(2, 1, 2), (4, 4, 1)]))
def test_sequences_drop_the_same_choices_on_any_ranks_and_in_micro_batches(gloo: GlooPool, cut: tuple[int, int, int]):
    ranks, ep, micro_batches = cut
    options = {"batch": 8, "beside": "capacity = factor(1.0); group = sequence"}
    (alone,) = gloo.run(1, accumulate, {**options, "ranks": 1, "ep": 1}, 1)
    assert any(rate > 0.05 for rate in alone["drops"].values()), "nothing is dropped, so it proves nothing"
    plan = moe_plan(**options, ranks=ranks, ep=ep)
    for rank, found in enumerate(gloo.run(ranks, accumulate, {**options, "ranks": ranks, "ep": ep}, micro_batches)):
        assert found["drops"] == pytest.approx(alone["drops"], abs=1e-12)
        assert found["loss"] == pytest.approx(alone["loss"], abs=1e-5)
        for name, gradient in found["gradients"].items():
            data = plan.parameters[name]
            index = local_slices(data.shape, data.layout, plan.meshes[data.mesh], rank)
            torch.testing.assert_close(gradient, alone["gradients"][name][index], rtol=1e-4, atol=1e-6)


def test_a_rank_drops_other_choices_where_there_are_more(gloo: GlooPool):
    options = {"batch": 8, "beside": "capacity = factor(1.0); group = rank"}
    alone, spread = (gloo.run(ranks, accumulate, {**options, "ranks": ranks, "ep": 1}, 1)[0] for ranks in (1, 4))
    assert alone["drops"] != pytest.approx(spread["drops"], abs=1e-3)


@pytest.mark.slow
def test_a_gate_that_prefers_near_experts_trains_as_its_reference_of_the_same_ranks(gloo: GlooPool):
    near = {"gate": "topology(2, weight = 0.1, share = 0.2)", "balance": "[]", "model": PADDED, "levels": FOUR}
    options = {"batch": 8, "optimizer": "adamw(lr = 3e-3)", "ranks": 4, "tp": 2, "ep": 4, "microbatches": 1, **near}
    require_same_curve(gloo.run(4, train_as_rank, options, timeout=120.0), unsharded(**options))


def evaluated_as_rank(options: dict[str, Any]) -> list[Tensor]:
    """The logits of a rank's part of one batch, in training and in evaluation."""
    torch.set_num_threads(1)
    with moec.launch(moe_plan(**options), device="cpu") as job, torch.no_grad():
        model = job.build(seed=1)
        tokens, _ = batches(32, 8, 8, steps=1)[0]
        mine = tokens.chunk(job.data_size)[job.data_rank]
        return [job.whole_logits(model.train(mode)(mine)) for mode in (True, False)]


def test_evaluation_has_its_own_capacity_on_every_rank(gloo: GlooPool):
    options: dict[str, Any] = {"batch": 8, "beside": "capacity = factor(0.5, eval = 1.5); group = batch"}
    sharded = gloo.run(4, evaluated_as_rank, {**options, "ranks": 4, "ep": 4, "tp": 2})
    (alone,) = gloo.run(1, evaluated_as_rank, {**options, "ranks": 1, "ep": 1})
    for logits, whole in zip(zip(*sharded, strict=True), alone, strict=True):
        for rank, part in enumerate(logits):
            torch.testing.assert_close(part, whole.chunk(2)[rank // 2], rtol=1e-4, atol=1e-5)
    assert (alone[0] - alone[1]).abs().max() > 1e-3


def test_unequal_batches_with_a_capacity_are_refused_on_every_rank(gloo: GlooPool):
    options = {"batch": 8, "beside": "capacity = factor(1.0)", "ranks": 2, "ep": 2}
    with pytest.raises(JobError, match=r"MOE0702.*shapes from \[2, 8\] to \[6, 8\]"):
        gloo.run(2, train_as_rank, options, [2, 6])


def test_a_degree_per_layer_gives_the_unsharded_loss_curve(gloo: GlooPool):
    mixtures = ((8, 2), (16, 4), (32, 1), (8, None))
    options = {"batch": 8, "optimizer": "adamw(lr = 3e-3)", "mixtures": mixtures}
    results = gloo.run(4, train_as_rank, {**options, "ranks": 4, "ep": 4})
    require_same_curve(results, unsharded(**options))
    assert all(
        load.numel() == count for load, (count, _) in zip(results[0]["loads"][0].values(), mixtures, strict=True)
    )


@pytest.mark.parametrize("sizes", [[0, 3, 4, 1], [8, 0, 0, 0]])
def test_ranks_without_any_token_change_nothing(gloo: GlooPool, sizes: list[int]):
    options = {"batch": 8, "optimizer": "adamw(lr = 3e-3)"}
    results = gloo.run(4, train_as_rank, {**options, "ranks": 4, "ep": 2}, sizes)
    require_same_curve(results, unsharded(**options))


def test_an_expert_that_nobody_uses_changes_nothing(gloo: GlooPool):
    options = {"batch": 4, "sequence": 2, "gate": "topk(1)", "optimizer": "adamw(lr = 3e-3)"}
    results = gloo.run(4, train_as_rank, {**options, "ranks": 4, "ep": 4})
    require_same_curve(results, unsharded(**options))
    loads = [loads for step in results[0]["loads"] for loads in step.values()]
    assert all(load.sum().item() == 4 * 2 for load in loads)
    assert any((load == 0).any() for load in loads)


GATES = ["topk(3, score = sigmoid, normalize = true)", "topk(2, order = after)"]


@pytest.mark.parametrize("gate", some(GATES, GATES[:1]))
def test_other_gates_give_the_unsharded_curve_too(gloo: GlooPool, gate: str):
    options = {"batch": 8, "gate": gate, "expert": "gelu(16)", "optimizer": "adamw(lr = 3e-3)"}
    require_same_curve(gloo.run(4, train_as_rank, {**options, "ranks": 4, "ep": 2}), unsharded(**options))


def test_dense_paths_beside_experts_and_a_tied_embedding_give_the_unsharded_curve(gloo: GlooPool):
    options = {
        "batch": 8,
        "expert": "geglu(16)",
        "beside": "residual = gelu(8); shared = relu2(8, gated = true)",
        "model": "norm = layer_norm; embedding = tokens(tied = true, positions = learned)",
        "optimizer": "adamw(lr = 3e-3)",
    }
    require_same_curve(gloo.run(4, train_as_rank, {**options, "ranks": 4, "ep": 2}), unsharded(**options))


def test_plain_backward_accumulates_as_it_does_without_ranks(gloo: GlooPool):
    options = {"ranks": 4, "ep": 2}
    results = gloo.run(4, backward_twice, options)
    plan = moe_plan(**options)
    model = reference(plan.spec, seed=1)
    for tokens, labels in batches(plan.spec.model.vocab, 8, 8, 2):
        model(tokens, labels).loss.backward()
    for name, parameter in model.named_parameters():
        data = plan.parameters[name]
        for rank, gradients in enumerate(results):
            index = local_slices(data.shape, data.layout, plan.meshes[data.mesh], rank)
            torch.testing.assert_close(gradients[name], parameter.grad[index], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bad_rank", [0, 3])
def test_a_bad_batch_on_one_rank_is_refused_by_all_in_the_same_words(gloo: GlooPool, bad_rank: int):
    results = gloo.run(4, complain, {"ranks": 4, "ep": 2}, bad_rank)
    words = f"rank {bad_rank}: tokens contain the id 99, and the vocabulary is 0 to 31"
    assert results == [(words, "(1, 4, 32)")] * 4


def test_a_world_of_another_size_is_refused_on_every_rank(gloo: GlooPool):
    with pytest.raises(Exception, match=r"MOE0701.*the plan is for 4 ranks, but this job has 2"):
        gloo.run(2, train_as_rank, {"ranks": 4, "ep": 2})


SCRIPT = """
import sys, torch, moec
plan = moec.load(sys.argv[1])
with moec.launch(plan, device="cpu") as job:
    model = job.build(seed=1)
    tokens = torch.arange(64).reshape(8, 8) % int(sys.argv[2])
    mine = tokens.chunk(job.data_size)[job.data_rank]
    loss = job.step(model, mine, mine)
    if job.rank == 0:
        print(f"loss {loss.item():.6f}", flush=True)
"""


def torchrun(folder: Path, *arguments: str, processes: int, **environment: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command, given = [*launcher, str(script), *arguments], {**os.environ, **environment}
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=120, cwd=folder)


@pytest.mark.slow  # test_readme.py runs one too
def test_torchrun_runs_a_saved_plan(tmp_path: Path):
    options = {"ranks": 2, "ep": 2}
    plan = str(moe_plan(**options).save(tmp_path / "tiny.plan"))
    right = torchrun(tmp_path, plan, "32", processes=2)
    assert right.returncode == 0, right.stderr
    tokens = torch.arange(64).reshape(8, 8) % 32
    loss = reference(moe_plan(**options).spec, seed=1)(tokens, tokens).loss
    assert float(right.stdout.split()[-1]) == pytest.approx(loss.item(), abs=1e-5)


@pytest.mark.parametrize(
    ("vocab", "processes", "environment", "said"),
    [
        pytest.param("40", 2, {}, "MOE0702", marks=pytest.mark.slow),
        pytest.param("32", 1, {}, "MOE0701", marks=pytest.mark.slow),
        pytest.param("32", 2, {"MOEC_BACKEND": "nonsense"}, "MOE0707", marks=pytest.mark.slow),
    ],
)
def test_under_torchrun_each_mistake_is_said_once(
    tmp_path: Path, vocab: str, processes: int, environment: dict[str, str], said: str
):
    plan = str(moe_plan(ranks=2, ep=2).save(tmp_path / "tiny.plan"))
    wrong = torchrun(tmp_path, plan, vocab, processes=processes, **environment)
    assert wrong.returncode == 1
    assert wrong.stderr.count(said) == 1
    assert "Traceback" not in wrong.stderr.split(said)[0]
    assert said != "MOE0701" or "torchrun --standalone --nproc-per-node 2" in wrong.stderr
