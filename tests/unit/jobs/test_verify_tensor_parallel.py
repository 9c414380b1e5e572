"""moec verify of plans with tensor parallelism: right ones pass, and in a wrong one the op and the line are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
from faults import bypass, change_groups, change_node, change_sums, insert_after
from models import moe_plan

from moec.codegen.graph import Ref
from moec.codegen.plan import Plan
from moec.runtime.verify import BOUND, verify

BODY = "layers[1..2]"
TP = {"ranks": 8, "tp": 2, "ep": 4, "beside": "shared = swiglu(8)"}
COPIED = {**TP, "sequence_parallel": False}
REPEATED = {"ranks": 8, "tp": 4, "ep": 4}
"""Two kv heads on four ranks: each is there twice."""


def ref(name: str) -> Ref:
    return Ref(node=name)


class Fault(NamedTuple):
    """How a plan is made wrong, and what `moec verify` names."""

    options: dict[str, object]
    plant: Callable[[Plan], Plan]
    layer: str
    op: str
    value: str
    line: int | None
    gradient: bool


FAULTS: dict[str, Fault] = {
    "the attention's output is not reduced": Fault(
        COPIED, lambda p: bypass(p, BODY, "o_1"), "layers.1", "aten.add.Tensor", "x.1", 7, gradient=False
    ),
    "copy_to is missing before attention": Fault(
        COPIED, lambda p: bypass(p, BODY, "h_2"), "layers.2", "aten.linear.default", "h", 8, gradient=True
    ),
    "a sum of what is whole already": Fault(
        COPIED,
        lambda p: insert_after(p, BODY, "x_1", "moec.all_reduce.default", "tp"),
        "layers.1",
        "moec.all_reduce.default",
        "planted",
        7,
        gradient=False,
    ),
    "a slice without its gather": Fault(
        TP,
        lambda p: insert_after(p, BODY, "x_1", "moec.slice.default", 1, "tp"),
        "layers.1",
        "moec.slice.default",
        "planted",
        7,
        gradient=False,
    ),
    "gathered alike for ops that are sharded": Fault(
        TP,
        lambda p: change_node(p, BODY, "h_2", target="moec.all_gather_alike.default"),
        "layers.2",
        "aten.linear.default",
        "h.2",
        8,
        gradient=True,
    ),
    "gathered along the batch": Fault(
        TP,
        lambda p: change_node(p, BODY, "h_2", args=(ref("h"), 0, "tp")),
        "layers.1",
        "moec.all_gather.default",
        "h.2",
        8,
        gradient=False,
    ),
    "gathered over dp": Fault(
        TP,
        lambda p: change_node(p, BODY, "h_2", args=(ref("h"), 1, "dp")),
        "layers.1",
        "moec.all_gather.default",
        "h.2",
        8,
        gradient=False,
    ),
    "a reduction by mean": Fault(
        TP,
        lambda p: insert_after(p, BODY, "o_1", "aten.mul.Scalar", 0.5),
        "layers.1",
        "aten.add.Tensor",
        "x.1",
        7,
        gradient=False,
    ),
    "scattered along the batch": Fault(
        TP,
        lambda p: change_node(p, BODY, "o_1", args=(ref("o"), 0, "tp")),
        "layers.1",
        "moec.reduce_scatter.default",
        "o.1",
        7,
        gradient=False,
    ),
    "choices are those of a part of the sequence": Fault(
        TP,
        lambda p: bypass(p, BODY, "choices_1"),
        "layers.1",
        "moec.switch_loss.default",
        "switch_loss",
        12,
        gradient=False,
    ),
    "the shared expert is not gathered": Fault(
        TP, lambda p: bypass(p, BODY, "h_3"), "layers.1", "aten.unflatten.int", "hidden", 12, gradient=False
    ),
    "norm gradients are not summed over tp": Fault(
        TP,
        lambda p: change_sums(p, "attention_norm.weight", ("dp",)),
        "layers.0",
        "aten.rms_norm.default",
        "@attention_norm.weight",
        6,
        gradient=True,
    ),
    "router gradients are not summed over tp": Fault(
        TP,
        lambda p: change_sums(p, "moe.gate.weight", ("dp",)),
        "layers.1",
        "aten.linear.default",
        "@moe.gate.weight",
        11,
        gradient=True,
    ),
    "sharded gradients are summed over tp": Fault(
        TP,
        lambda p: change_sums(p, "attention.q.weight", ("dp", "tp")),
        "layers.0",
        "aten.flatten.using_ints",
        "@attention.q.weight",
        6,
        gradient=True,
    ),
    "tp ranks are neighbours of another group": Fault(
        TP,
        lambda p: change_groups(p, "tp", ((0, 2), (1, 3), (4, 6), (5, 7))),
        "forward",
        "moec.embed_part.default",
        "x",
        1,
        gradient=False,
    ),
    "the ranks of a tp group are swapped": Fault(
        TP,
        lambda p: change_groups(p, "tp", ((1, 0), (3, 2), (5, 4), (7, 6))),
        "forward",
        "moec.embed_part.default",
        "x",
        1,
        gradient=False,
    ),
    "the embedding of another's ids": Fault(
        TP,
        lambda p: change_node(p, "forward", "x", args=(ref("tokens"), ref("embedding_weight"), "dp")),
        "forward",
        "moec.embed_part.default",
        "x",
        1,
        gradient=False,
    ),
    "the embedding's parts are not summed": Fault(
        COPIED, lambda p: bypass(p, "forward", "x_4"), "layers.0", "x", "x", 6, gradient=False
    ),
    "the largest logit is a rank's own": Fault(
        TP, lambda p: bypass(p, "loss", "largest_1"), "loss", "aten.sum.default", "nll", 1, gradient=False
    ),
    "sums of exponentials are a rank's own": Fault(
        TP, lambda p: bypass(p, "loss", "sums_1"), "loss", "aten.sum.default", "nll", 1, gradient=False
    ),
    "label logits are a rank's own": Fault(
        TP, lambda p: bypass(p, "loss", "label_logit_1"), "loss", "aten.sum.default", "nll", 1, gradient=False
    ),
    "the balance is a rank's own": Fault(
        TP,
        lambda p: bypass(p, "aux_loss", "aux_loss_1"),
        "aux_loss",
        "moec.all_reduce.default",
        "aux_loss.2",
        1,
        gradient=False,
    ),
    "labels are counted over tp too": Fault(
        TP,
        lambda p: insert_after(p, "valid_labels", "count", "moec.all_reduce.default", "tp"),
        "loss",
        "aten.div.Tensor",
        "loss",
        1,
        gradient=False,
    ),
    "an offset by one": Fault(
        TP,
        lambda p: insert_after(p, BODY, "w", "aten.narrow.default", 1, 1, 1),
        "layers.1",
        "moec.permute_weights.default",
        "row_weights",
        9,
        gradient=False,
    ),
    "a kv head of the neighbour": Fault(
        REPEATED,
        lambda p: change_groups(p, "tp", ((0, 2, 1, 3), (4, 6, 5, 7))),
        "forward",
        "moec.embed_part.default",
        "x",
        1,
        gradient=False,
    ),
    "kv heads are copied along another dim": Fault(
        REPEATED,
        lambda p: change_node(p, BODY, "k_weight_copy", args=(ref("k_weight_copies"), 1, "tp")),
        "layers.1",
        "aten.transpose.int",
        "attended",
        8,
        gradient=False,
    ),
    "repeated kv gradients are not summed": Fault(
        REPEATED,
        lambda p: change_sums(p, "attention.k.weight", ("dp",)),
        "layers.1",
        "aten.repeat_interleave.self_int",
        "@attention.k.weight",
        8,
        gradient=True,
    ),
}


@pytest.mark.parametrize("options", [TP, COPIED, REPEATED], ids=["sequence parallel", "copied", "repeated kv heads"])
@pytest.mark.parametrize("scale", [False, True])
def test_a_plan_equals_the_unsharded_model(options: dict[str, object], scale: bool):
    report = verify(moe_plan(**options, **({"dim": 64, "expert": "gelu(96)"} if scale else {})), scale=scale)
    assert report.ok, report
    assert report.scaled == scale


@pytest.mark.parametrize("fault", FAULTS)
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
