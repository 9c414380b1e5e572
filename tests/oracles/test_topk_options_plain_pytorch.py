"""Options of `topk` against a handwritten model: logits, loss and every gradient."""

from __future__ import annotations

import itertools

import pytest
from oracles.optioned_moe import OptionedMoe, pair, require_equal
from oracles.specs import small_spec

from moec.passes.ir.ops import Route
from moec.passes.lower.lower_model import lower

LAYERS = """
    layers {{
      attention = gqa(heads = 4, kv_heads = 2, head_dim = 6, rope = rope())
      moe {{ experts = {experts} * swiglu(20); gate = {gate}; balance = [switch_loss(0.3), z_loss(0.05)] }}
    }}
"""
MODES = list(itertools.product(("softmax", "sigmoid"), ("before", "after"), ("false", "true")))
every_mode = pytest.mark.parametrize(("score", "order", "normalize"), MODES)


@every_mode
def test_scaled_weights_are_those_of_the_handwritten_model(score: str, order: str, normalize: str) -> None:
    gate = f"topk(2, score = {score}, order = {order}, normalize = {normalize}, scale = 2.5)"
    require_equal(*pair(small_spec(LAYERS.format(experts=5, gate=gate)), OptionedMoe))


@every_mode
@pytest.mark.parametrize("group_score", ["top2_sum", "max"])
def test_groups_are_those_of_the_handwritten_model(group_score: str, score: str, order: str, normalize: str) -> None:
    gate = f"""topk(3, score = {score}, order = {order}, normalize = {normalize}, groups = 4, keep_groups = 2,
                    group_score = {group_score})"""
    require_equal(*pair(small_spec(LAYERS.format(experts=12, gate=gate)), OptionedMoe))


@pytest.mark.parametrize("gate", ["topk(3, groups = 4)", "topk(3, groups = 4, keep_groups = 4)"])
def test_all_groups_kept_are_no_groups(gate: str) -> None:
    spec = small_spec(LAYERS.format(experts=12, gate=gate))
    require_equal(*pair(spec, OptionedMoe))
    assert {op.groups for block in lower(spec).blocks for op in block.ops if isinstance(op, Route)} == {1}
