"""Saved bytes by the ops' costs (`Op.cost`) against the bytes that autograd saves in a forward pass.

Bytes of unique storages, parameters apart. What the ops leave out is below 0.1 %: 0-d tensors such as a layer's number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch
from support.combinations import some
from support.plans import FOUR, layer_plan, moe_plan, moe_text
from torch import Tensor

from moec.codegen.plan import Plan
from moec.driver import compile as compile_source
from moec.passes.cost.totals import activation_bytes, costs_of
from moec.passes.ir import Program
from moec.passes.ir.work.workload import Workload, busiest
from moec.runtime.host.reference import layer_reference, reference, reference_program
from moec.runtime.verify.cluster.virtual import VirtualCluster

BATCH, SEQUENCE, EXPERTS = 8, 32, 8
SIZES = {"depth": 2, "dim": 32, "batch": BATCH, "sequence": SEQUENCE, "experts": EXPERTS, "expert": "swiglu(48)"}
MLA = "heads = 4, kv_rank = 8, nope_dim = 12, rope_dim = 4"
MODELS = {
    "dropless": {"depth": 3},
    "stays": {"ep": 1},
    "bf16": {"dtype": "bf16"},
    "bf16 layer norm": {"dtype": "bf16", "model": "norm = layer_norm(bias = true)"},
    "factor": {"beside": "capacity = factor(1.25)"},
    "factor of a batch": {"beside": "capacity = factor(1.25); group = batch"},
    "factor, stays": {"ep": 1, "beside": "capacity = factor(0.75)"},
    "biases and a shared expert": {
        "expert": "gelu(48, bias = true)",
        "ffn": "relu2(64)",
        "bias": "qkv",
        "beside": "shared = swiglu(8, gated = true)",
    },
    "places by priority": {"beside": "capacity = factor(1.25, order = priority)"},
    "places by weight": {"beside": "capacity = factor(1.25, order = weight)"},
    "renormalized weights": {"beside": "capacity = factor(0.75, renormalize = true)"},
    "reroutes": {"beside": "capacity = factor(1.25); overflow = reroute"},
    "reroutes by sigmoid": {
        "gate": "topk(2, score = sigmoid)",
        "beside": "capacity = factor(1.25); overflow = reroute",
    },
    "reroutes, before": {"gate": "topk(2)", "beside": "capacity = factor(1.25); overflow = reroute"},
    "all places": {"ep": 1, "beside": "capacity = factor(1.25); overflow = pad"},
    "experts choose": {"gate": "expert_choice(2)", "balance": "[]"},
    "balanced assignment": {"gate": "base", "balance": "[]"},
    "slots": {"gate": "soft(4)", "balance": "[]"},
    "slots, bf16": {"gate": "soft(4)", "balance": "[]", "dtype": "bf16"},
    "merged experts": {"gate": "smear", "balance": "[]"},
    "merged experts, bf16": {"gate": "smear", "balance": "[]", "dtype": "bf16", "expert": "gelu(48, bias = true)"},
    "residual": {"beside": "residual = gelu(8)", "ffn": "relu(64)"},
    "clamp and alpha": {"expert": "swiglu(48, clamp = 7, alpha = 1.7)", "ffn": "swiglu(64, alpha = 1.7)"},
    "linear": {"expert": "linear(bias = true)", "ffn": "linear", "beside": "shared = linear"},
    "linear, places": {"expert": "linear", "beside": "capacity = factor(1.25)"},
    "lora": {"expert": "lora(3, alpha = 8)", "ffn": "lora(4)", "beside": "shared = lora(4, alpha = 1)"},
    "lora beside frozen parts": {
        "expert": "lora(3)",
        "beside": "shared = swiglu(8)",
        "optimizer": "adamw(); frozen = [attention, norms, ffn, shared, head]",
    },
    "frozen parts, bf16": {"dtype": "bf16", "optimizer": "adamw(); frozen = [attention, norms, experts, gate]"},
    "conv": {"expert": "conv(12, kernel = 2)", "ffn": "conv(12)"},
    "near experts": {"gate": "topology(2)", "levels": FOUR, "model": "embedding = tokens(padding = 3)"},
    "near experts, bounded": {"gate": "topology(2, share = 0.2)", "levels": FOUR, "ep": 4},
    "jitter": {"gate": "topk(2, jitter = 0.1)"},
    "jitter, bf16": {"gate": "topk(2, jitter = 0.1)", "dtype": "bf16"},
    "balance over all layers": {"balance": "[switch_loss(0.1, over = model)]", "depth": 4},
    "gshard_loss": {"balance": "[gshard_loss(0.1)]"},
    "noisy_topk": {"gate": "noisy_topk(2)"},
    "balance of sequences": {"gate": "topk(2, groups = 4, keep_groups = 2)", "balance": "[sequence_loss(0.1)]"},
    "balance of devices": {"balance": "[device_loss(0.1)]"},
    "balance of devices, padding": {"balance": "[device_loss(0.1)]", "model": "embedding = tokens(padding = 3)"},
    "all experts": {"gate": "dense"},
    "all experts, best first": {"gate": "dense", "balance": "[gshard_loss(0.1)]"},
    "attention between experts": {"gate": "attention_router(2)"},
    "attention between experts, bf16": {"gate": "attention_router(2)", "dtype": "bf16"},
    "noise": {"gate": "topk(2, noise = 0.5)"},
    "noise and jitter, bf16": {"gate": "topk(2, noise = 0.5, jitter = 0.1)", "dtype": "bf16"},
    "router with biases, bf16": {"gate": "topk(2, scale = 2.5, bias = learned)", "dtype": "bf16"},
    "groups": {"gate": "topk(2, score = sigmoid, normalize = true, scale = 2.5, groups = 4, keep_groups = 2)"},
    "importance_loss": {"balance": "[importance_loss(0.1)]", "model": "embedding = tokens(padding = 3)"},
    "load_loss": {"gate": "noisy_topk(2)", "balance": "[load_loss(0.1)]"},
    "loads above": {
        "gate": "topk(2, noise = 0.5)",
        "balance": "[importance_loss(0.1, of = all), load_loss(0.1, of = probabilities)]",
    },
    "sparsemixer": {"gate": "sparsemixer(3)"},
    "dselect_k": {"gate": "dselect_k(2, entropy = 0.1)", "balance": "[]"},
    "dselect_k of one": {"gate": "dselect_k(1)", "balance": "[]"},
    "packed texts": {"model": "embedding = tokens(separator = 3, positions = learned)"},
    "attention both ways": {
        "attention": "mha(heads = 4, causal = false)",
        "model": "embedding = tokens(separator = 3, padding = 2)",
    },
    "multipliers": {
        "model": "residual_multiplier = 0.2; embedding = tokens(multiplier = 12.0, logits_multiplier = 0.1)"
    },
    "post-norms": {"model": "norm_place = post; norm = layer_norm()"},
    "sandwich": {"model": "norm_place = sandwich", "dtype": "bf16"},
    "clip": {"attention": "mha(heads = 4, clip = 8.0, rope = rope())"},
    "parallel residual": {"model": "parallel_residual = one_norm"},
    "window": {"attention": "mha(heads = 4, window = 5)"},
    "window, packed, bf16": {
        "attention": "mha(heads = 4, window = 5, causal = false)",
        "model": "embedding = tokens(separator = 3)",
        "dtype": "bf16",
    },
    "sinks": {"attention": "gqa(heads = 4, kv_heads = 2, sinks = true)", "dtype": "bf16"},
    "sinks, window": {"attention": "gqa(heads = 4, kv_heads = 2, sinks = true, window = 5)"},
    "packed texts, padding": {"model": "embedding = tokens(separator = 3, padding = 2)"},
    "mla": {"attention": f"mla({MLA}, value_dim = 12, q_rank = 8, rope = rope())"},
    "mla, wide values, bf16": {"attention": f"mla({MLA}, value_dim = 24)", "dtype": "bf16"},
    "mla, sinks": {"attention": f"mla({MLA}, value_dim = 12, sinks = true, window = 5)"},
    "heads by token": {
        "attention": "moa(heads = 4, kv_heads = 2, experts = 5, gate = topk(2), normalize = true, rope = rope())"
    },
    "heads by token, biases, bf16": {
        "attention": "moa(heads = 4, experts = 3, gate = topk(2), bias = all, qk_norm = head, balance = [z_loss(0.1)])",
        "dtype": "bf16",
    },
    "padding and positions": {"model": "embedding = tokens(padding = 3, positions = learned); norm = layer_norm()"},
}
TENSOR_PARALLEL = {
    "tp": {"tp": 2},
    "tp 4": {"tp": 4, "ep": 4, "ranks": 8},
    "mla": {"attention": f"mla({MLA}, value_dim = 12, q_rank = 8, rope = rope())", "tp": 2},
    "heads by token": {"attention": "moa(heads = 4, kv_heads = 2, experts = 5, gate = topk(2))", "tp": 2},
    "tokens whole": {"tp": 2, "sequence_parallel": False},
    "vocabulary whole": {"tp": 4, "ep": 4, "beside": "shared = swiglu(8)"},
}


class SavedStorages:
    """Storages that autograd saves, each once."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._known = {p.untyped_storage().data_ptr() for p in parameters}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def note(self, tensor: Tensor) -> Tensor:
        """A storage that stays alive has a unique address."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._storages[storage.data_ptr()] = storage
        return tensor

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return sum(storage.nbytes() for storage in self._storages.values())


def saved_by_costs(program: Program, workload: Workload) -> float:
    """The saved bytes of one rank by the ops' costs."""
    return activation_bytes(program, costs_of(program, workload))


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and labels, without padding."""
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(4, 32, (2, BATCH, SEQUENCE), generator=generator)
    return tokens, labels


def weights_said(program: Program, workload: Workload) -> float:
    """The saved bytes of parameters of one rank by the ops' costs."""
    layers, total = program.layers_by_block, 0.0
    for name, block_cost in costs_of(program, workload).items():
        saved = (saved for _, cost in block_cost.costs for saved in cost.saved)
        total += max(1, len(layers[name])) * sum({s.name: s.bytes for s in saved if s.is_parameter}.values())
    return total


def saved_by_reference(plan: Plan) -> float:
    """With the narrow copies of its fp32 parameters, where layers compute in bf16."""
    model, (tokens, labels) = reference(plan.spec, seed=0), batch()
    saved = SavedStorages(model.parameters())
    with torch.autograd.graph.saved_tensors_hooks(saved.note, lambda tensor: tensor):
        output = model(tokens, labels=labels)
    assert output.loss.requires_grad
    return saved.bytes


def saved_by_ranks(plan: Plan) -> tuple[float, list[Tensor]]:
    """The mean over the ranks of a virtual cluster, and the rows that each of a layer's experts got."""
    model, (tokens, labels) = reference(plan.spec, seed=0), batch()
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    weights = {name: p.detach().to(dtypes[plan.parameters[name].dtype]) for name, p in model.named_parameters()}
    cluster = VirtualCluster(plan, weights)
    saved = SavedStorages(part for name in weights for part in cluster.weights.weight(name))

    def shares(whole: Tensor) -> Sequence[Tensor]:
        parts = whole.chunk(plan.data_size)
        return [parts[plan.data_rank(rank)].clone() for rank in range(plan.world_size)]

    with torch.autograd.graph.saved_tensors_hooks(saved.note, lambda tensor: tensor):
        step = cluster.step(shares(tokens), shares(labels))
        step.run(before="backward")
    assert all(value.requires_grad for value in step.losses[0])
    counts = [torch.cat(of_ranks) for of_ranks in step.stage_values.counts["counts"].values()]
    return saved.bytes / plan.world_size, counts


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_the_reference_keeps_what_its_ops_say(options: dict[str, object]) -> None:
    plan = moe_plan(**SIZES | options)
    program = reference_program(plan.spec)
    workload = Workload.of(plan.spec, program)
    narrow = weights_said(program, workload) if plan.spec.subject.dtype == "bf16" else 0
    assert saved_by_costs(program, workload) + narrow == pytest.approx(saved_by_reference(plan), rel=1e-3)


@pytest.mark.parametrize(("outer", "inner"), [("topk(2)", "topk(2)"), ("topk(3, normalize = true)", "topk(1)")])
def test_a_mixture_of_mixtures_keeps_what_its_ops_say(outer: str, inner: str) -> None:
    text = moe_text(**SIZES | {"gate": outer, "ranks": 1, "ep": 1, "balance": "[switch_loss(0.1)]"})
    text = text.replace(f"{EXPERTS} * swiglu(48)", f'{EXPERTS} * mixture("inner")')
    plan = compile_source(f'{text} layer "inner" {{ moe {{ experts = 5 * gelu(5); gate = {inner} }} }}')
    program = reference_program(plan.spec)
    said = saved_by_costs(program, Workload.of(plan.spec, program))
    assert said == pytest.approx(saved_by_reference(plan), rel=1e-3)


OF_RANKS = (
    *("dropless", "bf16", "factor of a batch", "biases and a shared expert", "reroutes", "experts choose"),
    *("balanced assignment", "slots, bf16", "merged experts", "lora beside frozen parts", "conv"),
    *(
        "near experts, bounded",
        "jitter, bf16",
        "balance of sequences",
        "balance of devices",
        "load_loss",
        "sparsemixer",
    ),
    *("packed texts", "window, packed, bf16", "mla, wide values, bf16", "heads by token", "padding and positions"),
)
"""What a rank keeps is else as what the reference keeps."""


@pytest.mark.parametrize("name", some(list(MODELS), OF_RANKS))
def test_a_rank_keeps_what_its_ops_say(name: str) -> None:
    plan = moe_plan(**SIZES | MODELS[name])
    saved, _ = saved_by_ranks(plan)
    assert saved_by_costs(plan.program, Workload.of(plan.spec, plan.program)) == pytest.approx(saved, rel=1e-3)


def test_a_layer_in_a_model_of_ones_own_keeps_what_its_ops_say() -> None:
    plan = layer_plan(dim=32, tail=f"train {{ batch = {BATCH}; sequence = {SEQUENCE} }}")
    layer, program = layer_reference(plan.spec, seed=0), reference_program(plan.spec)
    saved = SavedStorages(layer.parameters())
    with torch.autograd.graph.saved_tensors_hooks(saved.note, lambda tensor: tensor):
        y = layer(torch.randn(BATCH, SEQUENCE, 32, generator=torch.Generator().manual_seed(0), requires_grad=True))
    assert y.requires_grad
    assert saved_by_costs(program, Workload.of(plan.spec, program)) == pytest.approx(saved.bytes, rel=1e-3)


@pytest.mark.parametrize("options", TENSOR_PARALLEL.values(), ids=TENSOR_PARALLEL)
def test_a_rank_of_tensor_parallelism_keeps_what_its_ops_say(options: dict[str, object]) -> None:
    """The virtual cluster composes the two ops of a sharded vocabulary, and so saves logits and masks: up to 2 %."""
    plan = moe_plan(**SIZES | {"depth": 3} | options)
    saved, _ = saved_by_ranks(plan)
    assert saved_by_costs(plan.program, Workload.of(plan.spec, plan.program)) == pytest.approx(saved, rel=0.02)


def test_places_of_the_busiest_expert_are_those_of_the_skew() -> None:
    """`dynamic` gives every expert the busiest one's places; the workload gets the measured skew."""
    plan = moe_plan(**SIZES, beside="capacity = dynamic")
    saved, layers = saved_by_ranks(plan)
    loads = [float(rows.max() / rows.sum(-1, keepdim=True).float().mean() * EXPERTS) for rows in layers]
    skew = sum(loads) / len(loads)
    low, high = 0.0, 4.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if busiest(EXPERTS, EXPERTS, middle) < skew else (low, middle)
    workload = replace(Workload.of(plan.spec, plan.program), exponent=low)
    assert saved_by_costs(plan.program, workload.even) < 0.85 * saved
    assert saved_by_costs(plan.program, workload) == pytest.approx(saved, rel=0.01)
