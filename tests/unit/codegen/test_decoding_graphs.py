"""The graphs of generation: what they name and write, and that they hold what logits follow from and nothing else."""

from __future__ import annotations

import operator
from functools import cache

import pytest
import torch
from support.plans import moe_plan
from test_operators import FORMS
from torch import fx

from moec.codegen.emit.decodable import OF_ONE_TOKEN, refusal
from moec.codegen.emit.decoding import Decoding
from moec.codegen.emit.emit_decoding import emit_decoding
from moec.passes.fuse import Fuse
from moec.passes.ir import Program
from moec.passes.ir import ops as o
from moec.passes.lower.lower_model import lower
from moec.runtime import ops  # noqa: F401  (registers torch.ops.moec.*)

WRITES = {torch.ops.moec.cached_attention.default}
NOT_IN_GENERATION = ("count_choices", "_loss", "group_totals", "sum_groups", "cross_entropy")


@cache
def programs() -> dict[str, tuple[Program, Program]]:
    """The Programs of all forms of models: sharded, and as the reference runs them."""
    plans = {name: moe_plan(**options) for name, options in FORMS.items()}
    return {name: (plan.program, Fuse().apply(lower(plan.spec))) for name, plan in plans.items()}


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
        assert (one and one.what) == (other and other.what), name


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


def test_an_op_whose_tokens_meet_is_not_said_to_compute_one_token() -> None:
    meeting = {o.Attention, o.ChooseTokens, o.Windows, o.MergeShares, o.SlotWeights, o.KeepInSegments, o.GridWindows}
    assert not OF_ONE_TOKEN & meeting
    assert not {kind for kind in OF_ONE_TOKEN if issubclass(kind, o.Capacity)}
