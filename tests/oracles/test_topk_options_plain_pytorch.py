"""Options of `topk` against a handwritten model: logits, loss and every gradient."""

from __future__ import annotations

import itertools

import pytest
import torch
from oracles.optioned_moe import OptionedMoe, pair, require_equal
from oracles.specs import small_spec

from moec.passes.ir.ops import Route
from moec.passes.lower.lower_model import lower
from moec.runtime import ops

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


@every_mode
def test_a_learned_bias_is_part_of_the_logits(score: str, order: str, normalize: str) -> None:
    gate = f"topk(2, score = {score}, order = {order}, normalize = {normalize}, bias = learned)"
    ours, plain = pair(small_spec(LAYERS.format(experts=5, gate=gate)), OptionedMoe)
    require_equal(ours, plain)
    gradients = [parameter.grad for name, parameter in ours.named_parameters() if name.endswith("moe.gate.bias")]
    assert len(gradients) == 2
    assert all(gradient is not None and gradient.abs().max() > 1e-3 for gradient in gradients)


def test_the_router_of_gpt_oss_has_a_bias_and_its_weights_are_normalised_once() -> None:
    """tt#2319: the bias was left out, and a softmax of the chosen was divided by its sum again."""
    ours, plain = pair(small_spec(LAYERS.format(experts=5, gate="topk(2, order = after, bias = learned)")), OptionedMoe)
    require_equal(ours, plain)
    logits = torch.tensor([[[0.0, 3.0, 1.0, 2.0]]])
    weights = ops.route(logits, None, 2, "softmax", "after", False)[1]
    torch.testing.assert_close(weights, torch.tensor([[[3.0, 2.0]]]).softmax(-1))
