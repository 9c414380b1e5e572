"""Routers of other systems, by formulas from their sources, beside `moec.reference` of the `.moe` lines for them."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from oracles.foreign import deepspeed, megatron, torchtitan, tutel
from oracles.foreign.probe import ModelProbe
from oracles.foreign.routing import Routing
from oracles.foreign.row import Given, Options, Row
from oracles.foreign.table_deepspeed import DEEPSPEED
from oracles.foreign.table_megatron import MEGATRON
from oracles.foreign.table_others import FASTMOE, TORCHTITAN, TUTEL
from oracles.foreign.table_transformers import TRANSFORMERS
from oracles.specs import small_spec
from support.tables import each_row
from torch import Tensor
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from moec.runtime.host.reference import reference

TABLES = (MEGATRON, DEEPSPEED, TUTEL, FASTMOE, TORCHTITAN, TRANSFORMERS)
ROWS = {row.name: row for table in TABLES for row in table}
TIGHT = {"rtol": 1e-5, "atol": 1e-5}
LOOSE = 1e-3


def test_each_row_has_a_name_of_its_own() -> None:
    assert len(ROWS) == sum(map(len, TABLES))


def test_each_option_of_a_formula_has_a_row() -> None:
    used = {name for row in ROWS.values() if isinstance(row.theirs, Options) for name in row.theirs.options}
    formulas = (
        megatron.choose,
        megatron.route,
        deepspeed.top1,
        deepspeed.top2,
        deepspeed.topk,
        tutel.route,
        torchtitan.route,
    )
    for formula in formulas:
        parameters = inspect.signature(formula).parameters.values()
        assert {each.name for each in parameters if each.kind is each.KEYWORD_ONLY} <= used


@each_row("row", [row for row in ROWS.values() if not row.differs])
def test_these_lines_have_the_numbers_of_the_other_system(row: Row) -> None:
    given = dataclasses.replace(row.given, logits=row.given.logits.clone().requires_grad_())
    theirs, ours = row.theirs(given), row.ours(row.moe, given)
    torch.testing.assert_close(real(row, ours), real(row, theirs), **TIGHT)
    number = (real(row, theirs) > 0).sum(-1)
    assert (number.min() < number.max()) == row.drops, "what a capacity drops shows in a token's number of experts"
    if "balance" in row.moe:
        torch.testing.assert_close(ours.loss, theirs.loss, **TIGHT)
    if not row.needs:
        random = torch.randn(theirs.weights.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        found, expected = (gradient(row, given, each, random) for each in (ours, theirs))
        assert expected.any(), "the test sees no gradient"
        torch.testing.assert_close(found, expected, **TIGHT)


@each_row("row", [row for row in ROWS.values() if row.differs])
def test_no_lines_have_these_numbers_and_the_nearest_differ(row: Row) -> None:
    with torch.no_grad():
        theirs, ours = row.theirs(row.given), row.ours(row.moe, row.given)
    assert row.why, "a row says why nothing is equal"
    if row.differs == "loss":
        torch.testing.assert_close(real(row, ours), real(row, theirs), **TIGHT)
        assert theirs.loss is not None
        assert ours.loss is not None
        assert abs(float(ours.loss - theirs.loss)) > LOOSE
    else:
        assert float((real(row, ours) - real(row, theirs)).abs().max()) > LOOSE


def test_biases_follow_loads_as_in_megatron_and_but_for_their_mean_as_in_torchtitan() -> None:
    """`moe_router_bias_update_rate` counts kept choices; `load_balance_coeff` moves biases by steps of mean 0."""
    row, rate = ROWS["torchtitan load_balance_coeff, on by default"], 0.03
    for capacity in ("", "; group = rank; capacity = factor(1)"):
        ours = ModelProbe(f"gate = topk(3, score = sigmoid, bias = online({rate})){capacity}", row.given.logits)
        megatrons, titans = torch.zeros(2, row.experts, dtype=torch.float64)
        for _ in range(4):
            weights = ours.route().weights
            megatrons = megatron.updated_bias((weights > 0).sum(0), megatrons, rate)
            if not capacity:
                expected = torchtitan.route(row.given.flat, 3, expert_bias=titans).weights
                torch.testing.assert_close(weights, expected, **TIGHT)
                titans = torchtitan.updated_bias((expected > 0).sum(0), titans, rate)
            ours.model.update_states()
            torch.testing.assert_close(ours.bias, megatrons, check_dtype=False, **TIGHT)
        assert ours.bias.abs().max() > rate
        if not capacity:
            torch.testing.assert_close(ours.bias - ours.bias.mean(), titans, check_dtype=False, **TIGHT)
            assert abs(float(ours.bias.mean())) > LOOSE, "the test sees no difference"


def test_jitter_of_transformers_changes_what_experts_get_and_ours_what_the_router_gets() -> None:
    """`router_jitter_noise` of Mixtral, with a router of zeros, which jitter cannot change."""
    config = MixtralConfig(hidden_size=8, intermediate_size=8, num_local_experts=4, router_jitter_noise=0.3)
    block: Any = MixtralSparseMoeBlock(config).double()
    moe = "experts = 4 * swiglu(8); gate = topk(2, jitter = 0.3)"
    ours = reference(small_spec(f"layers {{ attention = mha(heads = 4); moe {{ {moe} }} }}"), dtype=torch.float64)
    generator = torch.Generator().manual_seed(6)
    for name, parameter in [*block.named_parameters(), *ours.named_parameters()]:
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * (not name.endswith("gate.weight")))
    x = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        assert (block.train()(x.clone()) - block.eval()(x.clone())).abs().max() > LOOSE
    tokens = torch.arange(12).view(2, 6)
    torch.testing.assert_close(ours.train()(tokens).logits, ours.eval()(tokens).logits, **TIGHT)


def real(row: Row, routing: Routing) -> Tensor:
    """Weights of tokens that are no padding."""
    return routing.weights if row.given.real is None else routing.weights[row.given.padded]


def gradient(row: Row, given: Given, routing: Routing, random: Tensor) -> Tensor:
    """Of the logits: of what random numbers make of the weights, and of the loss where the row has one."""
    total = (routing.weights * random).sum()
    if "balance" in row.moe and routing.loss is not None:
        total = total + routing.loss
    return torch.autograd.grad(total, given.logits)[0]
