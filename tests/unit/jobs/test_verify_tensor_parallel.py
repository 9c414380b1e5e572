"""moec verify of plans with tensor parallelism: right ones pass, and in a wrong one the op and the line are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
from support.combinations import diagonals, some
from support.plans import BODY, moe_plan
from support.verified import require_equal
from support.wrong_plans import (
    Planted,
    bypass,
    change_groups,
    change_kind,
    change_op,
    change_ops,
    change_sums,
    insert_after,
    op_giving,
)

from moec.codegen.plan import Plan
from moec.passes.ir.ops import AllGatherAlike, AllReduce, Slice
from moec.runtime.verify.verification import verify
from moec.runtime.verify.verify_report import BOUND

TP = {"ranks": 8, "tp": 2, "ep": 4, "beside": "shared = swiglu(8)"}
COPIED = {**TP, "sequence_parallel": False}
REPEATED = {"ranks": 8, "tp": 4, "ep": 4}
"""Two kv heads on four ranks: each is there twice."""
NORMED = {**TP, "qk_norm": "head"}
NORMED_TOGETHER = {**TP, "qk_norm": "projection"}
NORMED_REPEATED = {**REPEATED, "qk_norm": "projection"}


class Fault(NamedTuple):
    """How a plan is made wrong, and what `moec verify` names."""

    options: dict[str, object]
    plant: Callable[[Plan], Plan]
    layer: str
    op: str
    value: str
    line: int | None
    gradient: bool


def norm_k_after_rope(plan: Plan) -> Plan:
    """k is rotated first and then normed, by the same two ops."""
    norm, rope = (op_giving(plan, BODY, name) for name in ("k.1", "k.2"))
    first = replace(rope, operands=norm.operands[:1], results=norm.results)
    then = replace(norm, operands=("k.1", norm.operands[1]), results=rope.results)
    return change_ops(plan, BODY, lambda ops: [{norm: first, rope: then}.get(op, op) for op in ops])


FAULTS: dict[str, Fault] = {
    "the attention's output is not reduced": Fault(
        COPIED, lambda p: bypass(p, BODY, "o.1"), "layers.1", "add", "x.1", 7, gradient=False
    ),
    "copy_to is missing before attention": Fault(
        COPIED, lambda p: bypass(p, BODY, "h.2"), "layers.2", "linear", "h", 8, gradient=True
    ),
    "a sum of what is whole already": Fault(
        COPIED,
        lambda p: insert_after(p, BODY, "x.1", AllReduce, axis="tp"),
        "layers.1",
        "all_reduce",
        "planted",
        7,
        gradient=False,
    ),
    "a slice without its gather": Fault(
        TP,
        lambda p: insert_after(p, BODY, "x.1", Slice, axis="tp", dim=1),
        "layers.1",
        "slice",
        "planted",
        7,
        gradient=False,
    ),
    "gathered alike for ops that are sharded": Fault(
        TP,
        lambda p: change_kind(p, BODY, "h.2", AllGatherAlike, axis="tp", dim=1),
        "layers.2",
        "linear",
        "h.2",
        8,
        gradient=True,
    ),
    "gathered along the batch": Fault(
        TP,
        lambda p: change_op(p, BODY, "h.2", dim=0),
        "layers.1",
        "all_gather",
        "h.2",
        8,
        gradient=False,
    ),
    "gathered over dp": Fault(
        TP,
        lambda p: change_op(p, BODY, "h.2", axis="dp"),
        "layers.1",
        "all_gather",
        "h.2",
        8,
        gradient=False,
    ),
    "a reduction by mean": Fault(
        TP,
        lambda p: insert_after(p, BODY, "o.1", Planted, emitted="halved"),
        "layers.1",
        "add",
        "x.1",
        7,
        gradient=False,
    ),
    "scattered along the batch": Fault(
        TP,
        lambda p: change_op(p, BODY, "o.1", dim=0),
        "layers.1",
        "reduce_scatter",
        "o.1",
        7,
        gradient=False,
    ),
    "choices are those of a part of the sequence": Fault(
        TP,
        lambda p: bypass(p, BODY, "choices.1"),
        "layers.1",
        "switch_loss",
        "switch_loss",
        12,
        gradient=False,
    ),
    "the shared expert is not gathered": Fault(
        TP, lambda p: bypass(p, BODY, "h.3"), "layers.1", "linear", "hidden", 12, gradient=False
    ),
    "norm gradients are not summed over tp": Fault(
        TP,
        lambda p: change_sums(p, "attention_norm.weight", ("dp",)),
        "layers.0",
        "rms_norm",
        "@attention_norm.weight",
        6,
        gradient=True,
    ),
    "router gradients are not summed over tp": Fault(
        TP,
        lambda p: change_sums(p, "moe.gate.weight", ("dp",)),
        "layers.1",
        "router",
        "@moe.gate.weight",
        11,
        gradient=True,
    ),
    "sharded gradients are summed over tp": Fault(
        TP,
        lambda p: change_sums(p, "attention.q.weight", ("dp", "tp")),
        "layers.0",
        "linear",
        "@attention.q.weight",
        6,
        gradient=True,
    ),
    "tp ranks are neighbours of another group": Fault(
        TP,
        lambda p: change_groups(p, "tp", ((0, 2), (1, 3), (4, 6), (5, 7))),
        "forward",
        "embed",
        "x",
        1,
        gradient=False,
    ),
    "the ranks of a tp group are swapped": Fault(
        TP,
        lambda p: change_groups(p, "tp", ((1, 0), (3, 2), (5, 4), (7, 6))),
        "forward",
        "embed",
        "x",
        1,
        gradient=False,
    ),
    "the embedding of another's ids": Fault(
        TP,
        lambda p: change_kind(p, "forward", "x", Planted, emitted="embedded over dp"),
        "forward",
        "planted",
        "x",
        1,
        gradient=False,
    ),
    "the embedding's parts are not summed": Fault(
        COPIED, lambda p: bypass(p, "forward", "x.4"), "layers.0", "placeholder", "x", 6, gradient=False
    ),
    "the largest logit is a rank's own": Fault(
        TP, lambda p: bypass(p, "loss", "largest.1"), "loss", "sum_exp", "sums", 1, gradient=False
    ),
    "sums of exponentials are a rank's own": Fault(
        TP, lambda p: bypass(p, "loss", "sums.1"), "loss", "cross_entropy_of_sums", "nll", 1, gradient=False
    ),
    "label logits are a rank's own": Fault(
        TP, lambda p: bypass(p, "loss", "label_logit.1"), "loss", "cross_entropy_of_sums", "nll", 1, gradient=False
    ),
    "the balance is a rank's own": Fault(
        TP,
        lambda p: bypass(p, "aux_loss", "aux_loss.1"),
        "aux_loss",
        "all_reduce",
        "aux_loss.2",
        1,
        gradient=False,
    ),
    "labels are counted over tp too": Fault(
        TP,
        lambda p: insert_after(p, "valid_labels", "count", AllReduce, axis="tp"),
        "loss",
        "mean",
        "loss",
        1,
        gradient=False,
    ),
    "an offset by one": Fault(
        TP,
        lambda p: insert_after(p, BODY, "w", Planted, emitted="second token"),
        "layers.1",
        "permute_weights",
        "row_weights",
        9,
        gradient=False,
    ),
    "a kv head of the neighbour": Fault(
        REPEATED,
        lambda p: change_groups(p, "tp", ((0, 2, 1, 3), (4, 6, 5, 7))),
        "forward",
        "embed",
        "x",
        1,
        gradient=False,
    ),
    "kv heads are copied along another dim": Fault(
        REPEATED,
        lambda p: change_op(p, BODY, "k_weight_copy", dim=1),
        "layers.1",
        "attention",
        "attended",
        8,
        gradient=False,
    ),
    "repeated kv gradients are not summed": Fault(
        REPEATED,
        lambda p: change_sums(p, "attention.k.weight", ("dp",)),
        "layers.1",
        "repeat_heads",
        "@attention.k.weight",
        8,
        gradient=True,
    ),
    "the norm of k is forgotten": Fault(
        NORMED, lambda p: bypass(p, BODY, "k.1"), "layers.1", "rope", "k.2", 8, gradient=False
    ),
    "the norm of k is forgotten, over all heads": Fault(
        NORMED_TOGETHER, lambda p: bypass(p, BODY, "k.1"), "layers.1", "rope", "k.2", 8, gradient=False
    ),
    "k has the norm of q": Fault(
        NORMED,
        lambda p: change_op(p, BODY, "k.1", operands=("k", "@attention.q_norm.weight")),
        "layers.1",
        "rms_norm",
        "k.1",
        8,
        gradient=False,
    ),
    "k is normed after its rotation": Fault(NORMED, norm_k_after_rope, "layers.1", "rope", "k.1", 8, gradient=False),
    "gradients of a norm of heads are not summed over tp": Fault(
        NORMED,
        lambda p: change_sums(p, "attention.q_norm.weight", ("dp",)),
        "layers.1",
        "rms_norm",
        "@attention.q_norm.weight",
        8,
        gradient=True,
    ),
    "gradients of a norm over all heads are not summed over tp": Fault(
        NORMED_TOGETHER,
        lambda p: change_sums(p, "attention.k_norm.weight", ("dp",)),
        "layers.1",
        "rms_norm",
        "@attention.k_norm.weight",
        8,
        gradient=True,
    ),
}


PLANS = {
    "sequence parallel": TP,
    "copied": COPIED,
    "repeated kv heads": REPEATED,
    "q and k normed by head": NORMED,
    "q and k normed by head, copied, bf16": {**NORMED, "sequence_parallel": False, "dtype": "bf16", "bias": "all"},
    "q and k normed by head, repeated": {**REPEATED, "qk_norm": "head"},
    "q and k normed over all heads": NORMED_TOGETHER,
    "q and k normed over all heads, bf16": {**NORMED_TOGETHER, "dtype": "bf16"},
    "q and k normed over all heads, repeated": NORMED_REPEATED,
    "q and k normed over all heads, repeated, copied": {**NORMED_REPEATED, "sequence_parallel": False},
}


@pytest.mark.parametrize(("name", "scale"), diagonals(list(PLANS), [False, True]))
def test_a_plan_equals_the_unsharded_model(name: str, scale: bool):
    options = PLANS[name]
    report = require_equal(moe_plan(**options, **({"dim": 64, "expert": "gelu(96)"} if scale else {})), scale=scale)
    assert report.scaled == scale


OF_ONE_KIND = {
    *("gathered alike for ops that are sharded", "gathered over dp", "scattered along the batch"),
    *("a slice without its gather", "the shared expert is not gathered", "sharded gradients are summed over tp"),
    *("the ranks of a tp group are swapped", "a kv head of the neighbour", "label logits are a rank's own"),
    *("sums of exponentials are a rank's own", "the norm of k is forgotten, over all heads"),
    *("k has the norm of q", "gradients of a norm of heads are not summed over tp"),
    *("kv heads are copied along another dim", "the embedding of another's ids"),
}
"""Faults that are found as others of their kind are."""


@pytest.mark.parametrize("fault", some(list(FAULTS), [fault for fault in FAULTS if fault not in OF_ONE_KIND]))
def test_a_planted_fault_is_refused_with_its_op_and_line(fault: str):
    planted = FAULTS[fault]
    report = verify(planted.plant(moe_plan(**planted.options)))
    assert not report.ok
    assert max(report.max_output_error, report.max_gradient_error) > 1e5 * BOUND
    found = report.first_difference
    assert found is not None
    assert (found.layer, found.op, found.value, found.gradient) == planted[2:5] + planted[6:]
    assert found.span == (f"tiny.moe:{planted.line}" if planted.line else None)


@pytest.mark.parametrize("fault", ["a reduction by mean", "norm gradients are not summed over tp"])
def test_a_planted_fault_is_refused_at_toy_widths(fault: str):
    planted = FAULTS[fault]
    report = verify(planted.plant(moe_plan(**planted.options)), scale=True)
    assert not report.ok
    assert max(report.max_output_error, report.max_gradient_error) > 1e5 * BOUND
    assert report.first_difference.unlike
