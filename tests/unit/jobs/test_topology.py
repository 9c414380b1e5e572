"""The gate `topology`: what depends on ranks, what no rank and no text holds, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.plans import BODY, FOUR, moe_plan, moe_spec, moe_text
from support.verified import require_equal
from support.wrong_plans import bypass, change_op
from torch import Tensor

from moec.codegen.plan import Plan
from moec.driver import DEPENDS_ON_RANKS, load_for
from moec.driver import compile as compile_source
from moec.grammar import load_text
from moec.grammar.diagnostics import DiagnosticError, InternalError
from moec.passes.ir.ops import BoundFar, DataRanks, TopologyLoss
from moec.passes.ir.texts.text import print_program
from moec.passes.ir.verifier import check_program
from moec.passes.place.ranks import for_ranks
from moec.runtime.host.reference import reference
from moec.runtime.verify.verification import verify

VOCAB = 32
GATE = {"gate": "topology(2, weight = 0.5, share = 0.2)", "balance": "[]", "levels": FOUR}
FLAT = 'level "node" { size = 4; bandwidth = 4GB/s }'


def tokens_and_labels(sequences: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens, labels = (torch.randint(VOCAB, (sequences, 8), generator=generator) for _ in range(2))
    return tokens, labels


# ---- what depends on ranks ---------------------------------------------------------------------------------


def aux_loss(training: bool = True, **options: Any) -> Tensor:
    model = reference(moe_spec(**GATE | options), seed=1, dtype=torch.float64).train(training)
    found = model(*tokens_and_labels()).aux_loss
    assert found is not None
    return found.detach()


def test_the_loss_depends_on_ep_on_tp_and_on_the_levels() -> None:
    found = [aux_loss(**options) for options in ({"ep": 4}, {"ep": 2}, {"ep": 4, "tp": 2}, {"ep": 4, "levels": FLAT})]
    apart = [abs(float(a - b)) for i, a in enumerate(found) for b in found[:i]]
    assert min(apart) > 1e-4


def test_only_training_has_a_bound() -> None:
    """`share` changes choices, and so the logits, where the gate alone does not."""
    tokens, _ = tokens_and_labels()
    logits = {
        (share, training): reference(moe_spec(ep=4, **GATE | {"gate": f"topology(2{share})"}), seed=1)
        .train(training)(tokens)
        .logits.detach()
        for share in ("", ", share = 0.1")
        for training in (True, False)
    }
    free, bounded = logits["", True], logits[", share = 0.1", True]
    assert (free - bounded).abs().max() > 1e-4
    assert torch.equal(logits["", False], free)
    assert torch.equal(logits[", share = 0.1", False], free)


def test_no_text_has_a_table_of_ranks_and_experts() -> None:
    def text(nodes: int) -> str:
        levels = f'level "node" {{ size = 8; bandwidth = 4GB/s }}; level "rail" {{ size = {nodes}; bandwidth = 1GB/s }}'
        options = {"gate": "topology(2, share = 0.3)", "levels": levels, "experts": 256, "expert": "swiglu(2)"}
        return print_program(moe_plan(ranks=8 * nodes, ep=8, batch=8 * nodes, depth=2, **options).program)

    assert len(text(128)) - len(text(2)) < 20


def test_a_rank_computes_its_own_row_and_sends_choices_with_their_weights_only() -> None:
    block = moe_plan(ep=4, tp=2, **GATE).program.block(BODY)
    (bound,) = (op for op in block.ops if isinstance(op, BoundFar))
    (loss,) = (op for op in block.ops if isinstance(op, TopologyLoss))
    (ranks,) = (op for op in block.ops if isinstance(op, DataRanks))
    assert str(block.scope[ranks.results[0].name].layout) == "replicate"
    assert {str(block.scope[name].layout) for name in bound.operands[:3]} == {"dp:shard(0)"}
    assert str(block.scope[loss.operands[0]].layout) == "dp:shard(0) tp:shard(1)"


def test_a_batch_of_no_sequences_runs_forward_and_backward() -> None:
    model = reference(moe_spec(ep=4, **GATE))
    tokens = torch.zeros(0, 8, dtype=torch.int64)
    output = model(tokens, tokens)
    assert output.loss is not None
    output.loss.backward()
    assert output.loss.item() == 0


@pytest.mark.slow
def test_a_compiled_graph_chooses_alike() -> None:
    torch._dynamo.reset()
    model, (tokens, labels) = reference(moe_spec(ep=4, **GATE), seed=1), tokens_and_labels()
    with torch.no_grad():
        expected, counts = model(tokens, labels).loss, model.expert_counts
        assert expected is not None
        model.compile(fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(model(tokens, labels).loss, expected)
    assert all(torch.equal(model.expert_counts[layer], counts[layer]) for layer in counts)


def test_given_choices_are_replayed_and_counted() -> None:
    text = moe_text(ep=4, tp=2, gate="topology(2, weight = 0.5)", levels=FOUR, balance="[]")
    require_equal(compile_source(text.replace("train {", "train { replay = true;")))


# ---- plans that are wrong ----------------------------------------------------------------------------------

FAULTS: dict[str, Callable[[Plan], Plan]] = {
    "another ep": lambda p: change_op(p, BODY, "topology", ep=2),
    "other levels": lambda p: change_op(p, BODY, "topology", levels=(1, 4)),
    "choices of one tp rank": lambda p: bypass(p, BODY, "choices.1"),
    "another share": lambda p: change_op(p, BODY, "bounded", share=2),
    "other nodes": lambda p: change_op(p, BODY, "e.1", levels=(1, 4)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_plan_of_other_distances_is_refused(fault: str) -> None:
    plan = moe_plan(ep=4, tp=2, **GATE)
    report = verify(FAULTS[fault](plan), float32=False)
    assert not report.ok
    assert report.first_difference is not None
    assert report.first_difference.layer.startswith("layers.1")


@pytest.mark.parametrize("attributes", [{"ep": 2}, {"sharers": 1}, {"levels": (2, 4)}])
def test_a_program_of_other_ranks_is_refused_unread(attributes: dict[str, Any]) -> None:
    plan = moe_plan(ep=4, tp=2, **GATE)
    check_program(plan.program)
    with pytest.raises(InternalError, match="topology_loss is of other ranks than its meshes"):
        check_program(change_op(plan, BODY, "topology", **attributes).program)


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"ep": 3, "sharers": 1}, "3 ranks do not divide the experts"),
        ({"sharers": 3}, "wants whole groups of ranks"),
        ({"parts": (4,)}, "wants parts of 8 experts"),
        ({"bandwidths": (1e9,)}, "wants a bandwidth for each level"),
        ({"levels": (2**20, 2**20)}, "wants at most"),
    ],
)
def test_attributes_that_do_not_fit_are_refused(attributes: dict[str, Any], reason: str) -> None:
    plan = moe_plan(ep=4, tp=2, **GATE)
    with pytest.raises(InternalError, match=reason):
        check_program(change_op(plan, BODY, "topology", **attributes).program)


# ---- what is warned of and refused -------------------------------------------------------------------------


def codes(**options: Any) -> set[str]:
    """The codes of loading a file, and of compiling it where it loads."""
    loaded = load_text(moe_text(**{"ep": 4} | GATE | options))
    found = {one.code for one in loaded.diagnostics}
    try:
        compile_source(loaded.unwrap())
    except DiagnosticError as error:
        found |= {one.code for one in error.diagnostics}
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"MOE0315", "MOE0352"}),
        ({"gate": "topology(2)"}, {"MOE0315"}),
        ({"gate": "topology(2)", "beside": "group = rank"}, {"MOE0315"}),
        ({"gate": "topology(2)", "ep": 1}, {"MOE0315", "MOE0328"}),
        ({"gate": "topology(2)", "ep": 2, "tp": 2}, {"MOE0315", "MOE0328"}),
        ({"gate": "topology(2)", "ep": 2, "tp": 4}, set()),
        ({"gate": "topology(2)", "levels": 'level "node" { size = 4 }'}, {"MOE0315", "MOE0327"}),
        ({"gate": "topology(2)", "levels": 'level "node" { size = 1 }', "ranks": 1, "ep": 1}, {"MOE0328"}),
        ({"levels": f'{FLAT}; level "rail" {{ size = 1 }}'}, {"MOE0315", "MOE0328", "MOE0352"}),
        ({"gate": "topology(5, share = 0.5)"}, {"MOE0315", "MOE0329", "MOE0352"}),
        ({"gate": "topology(4, share = 0.5)"}, {"MOE0315", "MOE0352"}),
        ({"levels": FLAT, "gate": "topology(3, share = 0.5)"}, {"MOE0315", "MOE0329", "MOE0352"}),
        ({"gate": "topology(9)"}, {"MOE0315", "MOE0304"}),
        ({"gate": "topology(2, share = 1.5)"}, {"MOE0207"}),
        ({"gate": "topology(2, share = -0.5)"}, {"MOE0207"}),
        ({"gate": "topology(2, weight = -0.5)"}, {"MOE0207"}),
        ({"gate": "topology(2, share = 1 / 5_000_000_000)"}, {"MOE0315", "MOE0202", "MOE0352"}),
        ({"gate": "topology(1)", "beside": "capacity = factor(1.0); overflow = reroute"}, {"MOE0315", "MOE0354"}),
        ({"gate": "topology(2)", "balance": "[load_loss(0.1)]"}, {"MOE0315", "MOE0325"}),
    ],
)
def test_options_give_exactly_these_diagnostics(options: dict[str, Any], expected: set[str]) -> None:
    assert codes(**options) - {"MOE0322"} == expected


def test_a_warning_of_equal_distances_points_at_every_degree_that_makes_them_equal() -> None:
    def pointed(**options: Any) -> list[str]:
        loaded = load_text(moe_text(**GATE | {"gate": "topology(2)"} | options))
        (warning,) = (one for one in loaded.diagnostics if one.code == "MOE0328")
        return [label.message for label in warning.labels]

    assert pointed(ep=2, tp=2) == ["`ep = 2`", "`tp = 2`"]
    assert pointed(ep=2, cp=2, tp=2, levels=FLAT) == ["`ep = 2`", "`cp = 2`", "`tp = 2`"]
    assert pointed(ep=1, tp=2) == ["`ep = 1`"]


def test_a_bound_beside_replay_is_refused() -> None:
    found = load_text(moe_text(ep=4, **GATE).replace("train {", "train { replay = true;")).diagnostics
    assert {one.code for one in found} == {"MOE0315", "MOE0352", "MOE0370"}


@pytest.mark.parametrize(
    ("ranks", "sizes", "bandwidths"),
    [
        (8, [2, 4], [4e9, 1e9]),
        (2, [2, 1], [4e9, 1e9]),
        (1, [1, 1], [4e9, 1e9]),
        (6, [2, 3], [4e9, 1e9]),
        (3, [3], [1e9]),
    ],
)
def test_on_other_ranks_nodes_stay_where_they_can(ranks: int, sizes: list[int], bandwidths: list[float]) -> None:
    spec = for_ranks(moe_spec(ep=None, **GATE | {"gate": "topology(2)", "batch": 24, "experts": 24}), ranks)
    levels = spec.cluster.levels
    assert ([level.size for level in levels], [level.bandwidth for level in levels]) == (sizes, bandwidths)
    assert compile_source(spec).world_size == ranks


def test_a_plan_for_other_ranks_is_taken_where_nodes_hold_too_few_experts() -> None:
    spec = moe_spec(ep=4, **GATE | {"gate": "topology(4, share = 0.5)"})
    eight = spec.replace(parallel=spec.parallel.replace(ep=8))
    assert "MOE0329" in DEPENDS_ON_RANKS
    with pytest.raises(DiagnosticError, match="MOE0329"):
        load_for(8, eight)
    assert load_for(8, eight, spec).world_size == 8
