"""The graphs of generation: what they name and write, and that they hold what logits follow from and nothing else."""

from __future__ import annotations

import operator
from functools import cache
from typing import get_args

import pytest
import torch
from support.plans import moe_plan
from test_operators import FORMS
from torch import fx

from moec.codegen.emit.decodable import refusal
from moec.codegen.emit.decoding import Decoding
from moec.codegen.emit.emit_decoding import emit_decoding
from moec.codegen.plan import Plan
from moec.grammar.spec import Gate
from moec.passes.fuse import Fuse
from moec.passes.ir import Op, Program
from moec.passes.ir import ops as o
from moec.passes.ir.op import TokenOp
from moec.passes.lower.lower_model import lower
from moec.runtime import ops  # noqa: F401  (registers torch.ops.moec.*)

WRITES = {torch.ops.moec.cached_attention.default}
NOT_IN_GENERATION = ("count_choices", "_loss", "group_totals", "sum_groups", "cross_entropy")


@cache
def plans() -> dict[str, Plan]:
    """A plan of each form of models."""
    return {name: moe_plan(**options) for name, options in FORMS.items()}


@cache
def programs() -> dict[str, tuple[Program, Program]]:
    """The Programs of all forms of models: sharded, and as the reference runs them."""
    return {name: (plan.program, Fuse().apply(lower(plan.spec))) for name, plan in plans().items()}


@pytest.fixture(scope="module")
def decodings() -> dict[str, Decoding]:
    """The graphs of those that can generate."""
    return {
        f"{name}, {kind}": emit_decoding(program)
        for name, both in programs().items()
        for kind, program in zip(("plan", "reference"), both, strict=True)
        if refusal(program) is None
    }


def graphs(decoding: Decoding) -> list[fx.Graph]:
    return [decoding.forward.module.graph, *(layer.module.graph for layer in decoding.layers.values())]


def test_plan_and_reference_agree_on_which_models_generate() -> None:
    for name, both in programs().items():
        one, other = map(refusal, both)
        assert (one and one.reason) == (other and other.reason), name


def test_graphs_name_operators_of_torch_and_moec_only_and_write_to_caches_alone(
    decodings: dict[str, Decoding],
) -> None:
    assert len(decodings) > 40
    for name, decoding in decodings.items():
        for node in (node for graph in graphs(decoding) for node in graph.nodes):
            assert node.op in ("placeholder", "call_function", "output"), (name, node)
            if node.op != "call_function" or node.target in (operator.getitem, operator.call):
                continue
            assert node.target.namespace in ("aten", "moec"), (name, node)
            assert not node.target._schema.is_mutable or node.target in WRITES, (name, node)


def test_graphs_compute_no_counts_and_no_balance_terms(decodings: dict[str, Decoding]) -> None:
    for name, decoding in decodings.items():
        for node in (node for graph in graphs(decoding) for node in graph.nodes):
            assert not any(word in str(node.target) for word in NOT_IN_GENERATION), (name, node)


def test_every_layer_has_a_cache_for_each_attention_on_this_ranks_heads(decodings: dict[str, Decoding]) -> None:
    for name, decoding in decodings.items():
        for layer in decoding.layers.values():
            written = [node for node in layer.module.graph.nodes if node.target in WRITES]
            assert len(written) == len(layer.cached) == 1, name
    (cached,) = decodings["tp, plan"].layers[decodings["tp, plan"].calls[1]].cached
    assert (cached.heads, cached.width) == (1, 4)
    (cached,) = decodings["one rank, fp32, plan"].layers[decodings["one rank, fp32, plan"].calls[1]].cached
    assert (cached.heads, cached.width) == (2, 4)


def test_a_gate_generates_unless_its_word_says_that_it_leaks_in_evaluation() -> None:
    seen = set()
    for name, plan in plans().items():
        gates = [moe.gate for moe in plan.spec.subject.mixtures if moe is not None]
        refused = refusal(plan.program)
        leaking = {gate.word for gate in gates if "evaluation" in gate.leaks}
        assert leaking == {gate.word for gate in gates if refused and refused.reason.startswith(f"`{gate.word}`")}, name
        seen |= {type(gate) for gate in gates}
    assert seen >= {gate for gate in get_args(Gate) if "evaluation" in gate.leaks}


def test_a_new_op_is_refused_until_it_says_that_tokens_do_not_meet_in_it() -> None:
    assert o.GridWindows.other_tokens is Op.other_tokens
    assert not issubclass(o.Capacity, TokenOp)
