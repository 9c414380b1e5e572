"""gloo processes train as the unsharded model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.combinations import some
from support.plans import FOUR, moe_plan
from support.ranks.gloo_pool import GlooPool
from support.ranks.patchwork import patchwork
from support.ranks.training import (
    STEPS,
    batches_of,
    gradients_of,
    own_part,
    parts_of_rank,
    require_same_training,
    require_the_unsharded_training,
    train_as_rank,
    train_unsharded,
)
from torch import Tensor

import moec
from moec.codegen.plan import Plan
from moec.runtime.host.reference import reference

PADDED = "embedding = tokens(padding = 3)"
MODEL: dict[str, Any] = {"batch": 8, "optimizer": "adamw(lr = 3e-3)"}


PATCHWORK = {
    "dp 2, tp 2, edp 2, ep 2, zero 3": (4, "tp = 2; ep = 2; zero = 3"),
    "tp 4, ep 4, tokens whole": (4, "tp = 4; ep = 4; sequence_parallel = false"),
    "dp 2, tp 2, ep 2": (4, "tp = 2; ep = 2"),
    "tp 2, ep 4, zero 3": (4, "tp = 2; ep = 4; zero = 3; layers 3..5 { ep = 2 }"),
    "ep 2, zero 2, recompute": (2, "ep = 2; zero = 2; recompute = layer"),
    "dp 2, tp 4, ep 8": (8, "tp = 4; ep = 8"),
}
"""In the first one, parameters are cut over two axes, and gradients are summed over one and scattered over another."""


@pytest.mark.parametrize("degrees", some(list(PATCHWORK), list(PATCHWORK)[:2]))
def test_a_model_with_every_gate_and_attention_trains_as_unsharded(gloo: GlooPool, degrees: str) -> None:
    plan = moec.compile(patchwork(*PATCHWORK[degrees]))
    expected = train_unsharded(moec.compile(patchwork()).spec, STEPS // 2)
    results = gloo.run(plan.world_size, train_as_rank, plan, STEPS // 2)
    require_same_training(results, expected, plan)


RANKS_AND_EP = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]


@pytest.mark.parametrize("degrees", some(RANKS_AND_EP, [(2, 1)]))
def test_any_ranks_and_ep_give_the_unsharded_loss_curve(gloo: GlooPool, degrees: tuple[int, int]):
    require_the_unsharded_training(gloo, {}, {"ranks": degrees[0], "ep": degrees[1]})


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

FAST = ("tp 2", "tp 2, shared, biases", "tp 4, norm of all heads together, residual, tied")
"""The others are more degrees, or one feature alone of those that `patchwork` has together."""


@pytest.mark.parametrize("name", some(list(FOLDED), FAST))
def test_tensor_parallelism_folded_with_experts_gives_the_unsharded_loss_curve(gloo: GlooPool, name: str):
    ranks, options = FOLDED[name]
    model = {key: value for key, value in options.items() if key not in ("tp", "ep", "sequence_parallel")}
    require_the_unsharded_training(gloo, model, {"ranks": ranks, **options})


COMPILED: dict[str, dict[str, Any]] = {
    "tp 2, ep 2 and 1, zero 3, capacity": {
        "tp": 2, "ep": 2, "mixtures": ((8, 2), (8, 1)), "zero": 3, "beside": "capacity = factor(1.25)"
    },
    "ep 2": {"ep": 2},
    "ep 2, padding, jitter": {"ep": 2, "model": PADDED, "gate": "topk(2, jitter = 0.1)"},
    "ep 2, dynamic": {"ep": 2, "beside": "capacity = dynamic(max = 1.5)"},
    "dp 2, zero 1": {"ep": 1, "zero": 1},
    "dp 2, zero 3": {"ep": 1, "zero": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", some(list(COMPILED), list(COMPILED)[:1]))
def test_compiled_graphs_with_their_collectives_train_alike(gloo: GlooPool, name: str):
    ranks, plan = 2, moe_plan(batch=8, ranks=2, **COMPILED[name])
    compiled = gloo.run(ranks, train_as_rank, plan, 2, None, "aot_eager")
    for ours, eager in zip(compiled, gloo.run(ranks, train_as_rank, plan, 2), strict=True):
        assert ours["losses"] == eager["losses"]
        assert ours["norms"] == eager["norms"]
        for name, parameter in eager["parameters"].items():
            assert torch.equal(ours["parameters"][name], parameter)


@pytest.mark.slow
def test_a_gate_that_prefers_near_experts_trains_as_its_reference_of_the_same_ranks(gloo: GlooPool):
    near = {"gate": "topology(2, weight = 0.1, share = 0.2)", "balance": "[]", "model": PADDED, "levels": FOUR}
    require_the_unsharded_training(gloo, {"ranks": 4, "tp": 2, "ep": 4, "microbatches": 1, **near}, {})


@pytest.mark.parametrize(
    ("ranks", "mixtures"),
    [
        (2, ((8, 2), (16, 1), (8, None))),
        pytest.param(4, ((8, 2), (16, 4), (32, 1), (8, None)), marks=pytest.mark.slow),
    ],
)
def test_a_degree_per_layer_gives_the_unsharded_loss_curve(
    gloo: GlooPool, ranks: int, mixtures: tuple[tuple[int, int | None], ...]
) -> None:
    results = require_the_unsharded_training(gloo, {"mixtures": mixtures}, {"ranks": ranks, "ep": ranks})
    assert all(
        load.numel() == count for load, (count, _) in zip(results[0]["loads"][0].values(), mixtures, strict=True)
    )


@pytest.mark.parametrize("sizes", some([[0, 8], [0, 3, 4, 1], [8, 0, 0, 0]], [[0, 8]]))
def test_ranks_without_any_token_change_nothing(gloo: GlooPool, sizes: list[int]):
    require_the_unsharded_training(gloo, {}, {"ranks": len(sizes), "ep": 2}, sizes)


@pytest.mark.parametrize("ranks", some([2, 4], [2]))
def test_an_expert_that_nobody_uses_changes_nothing(gloo: GlooPool, ranks: int):
    plan = moe_plan(batch=4, sequence=2, gate="topk(1)", optimizer="adamw(lr = 3e-3)", ranks=ranks, ep=ranks)
    results = gloo.run(ranks, train_as_rank, plan, STEPS)
    require_same_training(results, train_unsharded(plan.spec, STEPS), plan)
    loads = [loads for step in results[0]["loads"] for loads in step.values()]
    assert all(load.sum().item() == 4 * 2 for load in loads)
    assert any((load == 0).any() for load in loads)


GATES = ["topk(3, score = sigmoid, normalize = true)", "topk(2, order = after)"]


@pytest.mark.parametrize(
    ("ranks", "gate"), [(2, GATES[0]), *(pytest.param(4, g, marks=pytest.mark.slow) for g in GATES)]
)
def test_dense_paths_beside_experts_and_a_tied_embedding_give_the_unsharded_curve(
    gloo: GlooPool, ranks: int, gate: str
) -> None:
    model = {
        "gate": gate,
        "expert": "geglu(16)",
        "beside": "residual = gelu(8); shared = relu2(8, gated = true)",
        "model": "norm = layer_norm; embedding = tokens(tied = true, positions = learned, separator = 5)",
    }
    require_the_unsharded_training(gloo, model, {"ranks": ranks, "ep": 2})


def backward_twice(plan: Plan) -> dict[str, Tensor]:
    """Gradients after two plain backward passes without clearing, this rank's part of each batch."""
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        for tokens, labels in batches_of(plan.spec, 2):
            model(*own_part(job, tokens, labels)).loss.backward()
        return gradients_of(model)


@pytest.mark.parametrize("ranks", some([2, 4], [2]))
def test_plain_backward_accumulates_as_it_does_without_ranks(gloo: GlooPool, ranks: int):
    plan = moe_plan(ranks=ranks, ep=2)
    results = gloo.run(ranks, backward_twice, plan)
    model = reference(plan.spec, seed=1)
    for tokens, labels in batches_of(plan.spec, 2):
        model(tokens, labels).loss.backward()
    whole = {name: parameter.grad for name, parameter in model.named_parameters()}
    for rank, gradients in enumerate(results):
        for name, gradient in parts_of_rank(plan, whole, rank).items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)


def complain(plan: Plan) -> list[tuple[str, str]]:
    """Each rank in turn has ids out of range; gives every rank's errors, and checks that the job still works."""
    found = []
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        tokens = torch.zeros(1, 4, dtype=torch.int64)
        for bad_rank in range(job.world_size):
            try:
                model(tokens + 99 if job.rank == bad_rank else tokens)
            except moec.DiagnosticError as error:
                said = error.diagnostics[0].message
            else:
                said = "nothing"
            found.append((said, str(tuple(model(tokens).logits.shape))))
    return found


@pytest.mark.parametrize("ranks", some([2, 4], [2]))
def test_a_bad_batch_on_one_rank_is_refused_by_all_in_the_same_words(gloo: GlooPool, ranks: int):
    words = "tokens contain the id 99, and the vocabulary is 0 to 31"
    expected = [(f"rank {bad_rank}: {words}", "(1, 4, 32)") for bad_rank in range(ranks)]
    assert gloo.run(ranks, complain, moe_plan(ranks=ranks, ep=2)) == [expected] * ranks


def test_a_world_of_another_size_is_refused_on_every_rank(gloo: GlooPool):
    with pytest.raises(Exception, match=r"MOE0701.*the plan is for 4 ranks, but this job has 2"):
        gloo.run(2, train_as_rank, moe_plan(ranks=4, ep=2), STEPS)
