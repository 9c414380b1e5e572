"""The gate `hash`: a token's experts are a fixed function of its id, on any ranks and with any capacity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.combinations import diagonals, some
from support.plans import BODY, layer_text, moe_plan, moe_spec, moe_text
from support.verified import require_equal
from support.wrong_plans import bypass, change_op, insert_after
from torch import Tensor

import moec
from moec.codegen.emit import emit_function
from moec.codegen.kernels.plan_kernels import kernels_of
from moec.codegen.plan import Plan
from moec.driver import compile as compile_source
from moec.grammar import load_text
from moec.grammar.diagnostics import DiagnosticError, InternalError
from moec.passes.cost.totals import tally
from moec.passes.ir import Block, Output, Program, Value
from moec.passes.ir.ops import AllReduce
from moec.passes.ir.ops.gating.gate_ops import HashRoute
from moec.passes.ir.verifier import check_program
from moec.passes.lower.lower_losses import token_input
from moec.runtime.host.reference import reference
from moec.runtime.verify.verification import verify

VOCAB, PADDING = 32, 3
HASH = {"gate": "hash(2)", "balance": "[]"}
PADDED = f"embedding = tokens(padding = {PADDING})"
CAPACITIES = ["", "capacity = factor(0.7, eval = 1.2)", "capacity = dynamic()", "capacity = dynamic(max = 0.8)"]
DEGREES = [
    {"ep": 1},
    {"ep": 4},
    {"ep": 2},
    {"ep": 2, "tp": 2},
    {"ep": 4, "tp": 2, "sequence_parallel": False},
    {"ep": 2, "tp": 4},
]


def choose(ids: Tensor, k: int, experts: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The results of the op alone: weights and experts."""
    built = HashRoute(operands=("tokens",), results=(), k=k, num_experts=experts, seed=seed)
    types = built.infer([token_input("tokens")], {})
    results = [Value(name=name, shape=t.shape, dtype=t.dtype) for name, t in zip("we", types, strict=True)]
    block = Block(
        name="choose",
        inputs=(token_input("tokens"),),
        parameters=(),
        ops=(built.with_results(results),),
        outputs=(Output("w", "loss"), Output("e", "counts")),
    )
    weights, chosen = emit_function(Program(name="alone", blocks=(block,)), "choose").module(ids)
    return weights, chosen


def mix(x: int) -> int:
    """SplitMix64 from the authors' paper, in Python integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def chosen_by_hand(token: int, k: int, experts: int, seed: int) -> list[int]:
    def number(expert: int) -> int:
        x = mix((mix(seed) + 0x9E3779B97F4A7C15 * (token * 2**31 + expert)) % 2**64)
        return x - 2**64 if x >= 2**63 else x

    return sorted(range(experts), key=number, reverse=True)[:k]


# ---- the function ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "experts", "seed"), [(1, 8, 0), (2, 8, 1), (3, 5, 2**63 - 1), (4, 4, 7), (1, 1, 0)])
def test_the_experts_of_an_id_are_those_that_the_definition_says(k: int, experts: int, seed: int) -> None:
    ids = torch.cat([torch.arange(62), torch.tensor([2**31 - 1, 123_456_789])]).view(4, 16)
    weights, chosen = choose(ids, k, experts, seed)
    assert chosen.flatten(0, 1).tolist() == [chosen_by_hand(i, k, experts, seed) for i in ids.flatten().tolist()]
    assert weights.dtype == torch.float32
    assert torch.equal(weights, torch.full((4, 16, k), 1 / k))


def test_the_function_never_changes() -> None:
    """A model trained with one version of moec must keep its experts in the next."""
    _, chosen = choose(torch.arange(8)[None], 2, 8)
    assert chosen[0].tolist() == PINNED
    _, chosen = choose(torch.arange(8)[None], 2, 8, seed=1)
    assert chosen[0].tolist() != PINNED


PINNED = [[2, 6], [7, 1], [1, 4], [0, 5], [0, 2], [1, 2], [6, 0], [2, 1]]


def test_ids_are_spread_evenly_over_experts_and_pairs_of_experts() -> None:
    experts, ids = 8, torch.arange(64_000)
    _, chosen = choose(ids[None], 2, experts)
    first, second = chosen[0].unbind(-1)
    assert (first != second).all()
    counts = torch.bincount(first * experts + second, minlength=experts**2).view(experts, experts)
    mean = len(ids) / (experts * (experts - 1))
    off = counts[~torch.eye(experts, dtype=torch.bool)] - mean
    assert off.abs().max() < 5 * mean**0.5


def test_half_of_the_ids_change_their_expert_with_the_seed_of_two() -> None:
    ids = torch.arange(10_000)[None]
    (_, one), (_, other) = choose(ids, 1, 2, 1), choose(ids, 1, 2, 2)
    assert 0.48 < (one != other).double().mean() < 0.52


# ---- plans -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "capacity", "degrees"), diagonals(["", PADDED], CAPACITIES, DEGREES))
def test_plans_equal_the_unsharded_model(model: str, capacity: str, degrees: dict[str, int]) -> None:
    require_equal(moe_plan(model=model, beside=capacity, **HASH, **degrees))


BF16: list[tuple[dict[str, Any], str]] = [
    ({"ep": 4}, ""),
    ({"ep": 2, "tp": 2}, "capacity = factor(1.0); group = batch; shared = swiglu(8)"),
    ({"ep": 4, "tp": 2, "sequence_parallel": False}, "capacity = dynamic(max = 1.5); residual = gelu(8)"),
]


@pytest.mark.parametrize("place", some(range(3), [1]))
def test_plans_in_bf16_lose_no_more_than_the_unsharded_model(place: int) -> None:
    degrees, beside = BF16[place]
    require_equal(moe_plan(gate="hash(3, seed = 5)", balance="[]", beside=beside, dtype="bf16", **degrees))


def test_a_layer_with_a_router_and_one_without_stand_in_one_model() -> None:
    hashed = "  layers 2 { moe { gate = hash(1); balance = [] } }"
    text = moe_text(ep=2, tp=2, model=PADDED).replace("\n}\ncluster", f"\n{hashed}\n}}\ncluster", 1)
    plan = compile_source(load_text(text, name="tiny.moe").unwrap())
    taken = {block.name: [value.role for value in block.inputs] for block in plan.program.blocks}
    assert taken["layers[1]"] == ["residual", "real"]
    assert taken["layers[2]"] == ["residual", "tokens", "real"]
    require_equal(plan)


@pytest.mark.parametrize("options", [{}, {"model": "embedding = tokens(padding = 31)", "beside": CAPACITIES[1]}])
def test_a_plan_is_verified_at_toy_widths_too(options: dict[str, str]) -> None:
    require_equal(moe_plan(**HASH, **options), scale=True)


def test_ids_are_cut_with_the_tokens_of_a_rank() -> None:
    block = moe_plan(ep=2, tp=2, **HASH).program.block(BODY)
    (route,) = (op for op in block.ops if isinstance(op, HashRoute))
    assert str(block.scope["tokens"].layout) == "dp:shard(0)"
    assert str(block.scope[route.operands[0]].layout) == "dp:shard(0) tp:shard(1)"


FAULTS: dict[str, Callable[[Plan], Plan]] = {
    "another seed": lambda p: change_op(p, BODY, "e", seed=1),
    "other ids of a sequence": lambda p: bypass(p, BODY, "tokens.1"),
    "ids summed over ranks": lambda p: insert_after(p, BODY, "tokens", AllReduce, axis="tp", reduce="sum"),
    "marks for ids": lambda p: change_op(p, BODY, "tokens.1", operands=("real",)),
    "one more choice": lambda p: change_op(p, BODY, "e", k=3),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_plan_that_chooses_otherwise_is_refused(fault: str) -> None:
    plan = moe_plan(ep=2, tp=2, model=PADDED, **HASH)
    report = verify(FAULTS[fault](plan), float32=False)
    assert not report.ok
    assert report.first_difference is not None
    assert report.first_difference.layer.startswith("layers.1")


def test_a_plan_that_hands_on_marks_for_ids_is_refused_unread() -> None:
    plan = moe_plan(model=PADDED, **HASH)
    wrong = change_op(plan, "forward", "x.2", operands=("x.1", "real", "real"))
    check_program(plan.program)
    with pytest.raises(InternalError, match="hands layer 1 %real as tokens"):
        check_program(wrong.program)


# ---- training ----------------------------------------------------------------------------------------------


def test_there_is_no_router_and_experts_learn() -> None:
    model = reference(moe_spec(ranks=1, ep=1, **HASH), seed=1)
    names = [name for name, _ in model.named_parameters()]
    assert not [name for name in names if "gate" in name]
    generator = torch.Generator().manual_seed(2)
    tokens, labels = (torch.randint(VOCAB, (8, 8), generator=generator) for _ in range(2))
    output = model(tokens, labels)
    assert output.aux_loss is None
    output.loss.backward()
    used = model.get_parameter("layers.1.moe.experts.up.weight").grad
    assert used is not None
    assert used.abs().amax((1, 2, 3)).count_nonzero() > 4


@pytest.mark.parametrize("beside", ["", "capacity = factor(0.5)"])
def test_drop_rates_count_the_choices_of_real_tokens(beside: str) -> None:
    plan = moe_plan(ranks=1, ep=1, model=PADDED, beside=beside, **HASH)
    tokens = torch.arange(64).view(8, 8) % VOCAB
    with moec.launch(plan, device="cpu") as job:
        model = job.build()
        job.step(model, tokens, tokens)
        rates, loads = job.drop_rates(model), job.expert_loads(model)
    real = int((tokens != PADDING).sum())
    for layer, rate in rates.items():
        assert rate == pytest.approx(1 - int(loads[layer].sum()) / (2 * real))
        assert (rate > 0) == bool(beside)


@pytest.mark.slow
def test_a_compiled_graph_chooses_alike() -> None:
    torch._dynamo.reset()
    model = reference(moe_spec(ranks=1, ep=1, **HASH), seed=1)
    tokens = torch.randint(VOCAB, (8, 8), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected, counts = model(tokens).logits, model.expert_counts
        model.compile(fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(model(tokens).logits, expected)
    assert all(torch.equal(model.expert_counts[layer], counts[layer]) for layer in counts)


# ---- what is counted, listed and refused -------------------------------------------------------------------


def test_kernels_and_costs_are_those_of_a_mixture_without_a_router() -> None:
    def compiled(gate: str) -> Plan:
        text = moe_text(gate=gate, balance="[]", dim=64, expert="swiglu(64)")
        return compile_source(load_text(text.replace("device = cpu", "device = h100")).unwrap())

    routed, hashed = compiled("topk(2)"), compiled("hash(2)")
    asked = [{kernel.shape for kernel in kernels_of(plan)} for plan in (routed, hashed)]
    assert {shape.template for shape in asked[0] - asked[1]} == {"route"}
    assert asked[1] < asked[0]
    counts = [tally(plan.program, plan.spec) for plan in (routed, hashed)]
    routers = 2 * 8 * 64
    assert counts[0].parameters - counts[1].parameters == routers
    assert counts[0].active_parameters - counts[1].active_parameters == routers


def test_a_layer_by_itself_has_no_ids() -> None:
    text = layer_text(gate="hash(2)", balance="[]")
    with pytest.raises(DiagnosticError) as refused:
        compile_source(load_text(text).unwrap())
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.code == "MOE0202"
    assert diagnostic.message.startswith("moec cannot compile `hash` in the file of one `layer`")
    assert "`model`" in diagnostic.help


@pytest.mark.parametrize("term", ["switch_loss", "z_loss"])
def test_a_balance_term_over_scores_is_refused(term: str) -> None:
    loaded = load_text(moe_text(gate="hash(2)", balance=f"[{term}(0.1)]"))
    assert [d.code for d in loaded.diagnostics] == ["MOE0325"]


@pytest.mark.parametrize(("gate", "code"), [("hash(9)", "MOE0304"), ("hash(seed = 9_223_372_036_854_775_808)", None)])
def test_more_choices_than_experts_and_a_seed_of_65_bits_are_refused(gate: str, code: str | None) -> None:
    codes = [d.code for d in load_text(moe_text(gate=gate, balance="[]")).diagnostics]
    assert codes
    assert code in (None, *codes)
