"""Kinds of attention together, in every mode and dtype of plans; a wrong plan of each is refused with the op named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from support.combinations import some
from support.plans import BODY, moe_plan, moe_spec
from support.verified import require_equal
from support.wrong_plans import bypass, change_op, change_sums

from moec.codegen.plan import Plan
from moec.driver import compile as compile_source
from moec.grammar.diagnostics import DiagnosticError
from moec.runtime.verify.verification import verify

TP = {"ranks": 8, "tp": 2, "ep": 4}
YARN = "scaling = yarn(4, original = 4, mscale = 0.7, mscale_all = 1)"
ROPE = f"rope = rope(fraction = 0.5, interleaved = true, {YARN})"
MLA = f"mla(heads = 4, q_rank = 6, kv_rank = 6, nope_dim = 4, rope_dim = 2, value_dim = 4, rope = rope({YARN})"
EVERYTHING = (
    "gqa(heads = 4, kv_heads = 2, head_dim = 8, bias = all, window = 3, sinks = true, clip = 0.03, multiplier = 0.3"
)
PACKED = {"model": "embedding = tokens(separator = 2, padding = 3, positions = learned)"}
REPEATED = {"ranks": 4, "tp": 4, "ep": 2}
"""Two kv heads on four ranks: each is there twice."""
PLANS: dict[str, dict[str, Any]] = {
    "packed": {
        **TP, **PACKED, "layers": [
            f"attention = {EVERYTHING}, {ROPE}, qk_norm = head)",
            f"attention = {EVERYTHING}, {ROPE}, qk_norm = projection, causal = false)",
            f"attention = {MLA}, bias = all)",
            f"attention = {MLA}, bias = qkv, window = 3, sinks = true)",
        ]
    },
    "bf16, tokens whole": {
        **REPEATED, "dtype": "bf16", "sequence_parallel": False, "layers": [
            f"attention = {EVERYTHING}, {ROPE}, qk_norm = projection)",
            f"attention = {EVERYTHING}, qk_norm = head)",
            f"attention = {MLA}, causal = false, multiplier = 0.3)",
        ]
    },
    "recomputed, zero 3": {
        **REPEATED, "zero": 3, "recompute": "layer", "microbatches": 2, "layers": [
            f"attention = {EVERYTHING}, {ROPE}, qk_norm = projection)",
            f"attention = {MLA}, sinks = true)",
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_equals_the_unsharded_model(name: str) -> None:
    require_equal(moe_plan(**PLANS[name]))


class Fault(NamedTuple):
    """The attention, how its plan is made wrong, and the op and value that `moec verify` names."""

    attention: str
    plant: Callable[[Plan], Plan]
    op: str
    value: str


MHA = "mha(heads = 4, rope = rope(theta = 100), {})"
FAULTS = {
    "later tokens are seen": Fault(
        MHA.format(""), lambda p: change_op(p, BODY, "attended", causal=False), "attention", "attended"
    ),
    "a window is too short by one": Fault(
        MHA.format("window = 4"), lambda p: change_op(p, BODY, "attended", window=3), "attention", "attended"
    ),
    "scores have the usual factor": Fault(
        MHA.format("multiplier = 0.3"), lambda p: change_op(p, BODY, "attended", scale=0.0), "attention", "attended"
    ),
    "halves turn instead of neighbours": Fault(
        "mha(heads = 4, rope = rope(theta = 100, interleaved = true))",
        lambda p: change_op(p, BODY, "q.1", interleaved=False),
        "rope",
        "q.1",
    ),
    "frequencies are not scaled": Fault(
        "mha(heads = 4, rope = rope(theta = 100, scaling = linear(4)))",
        lambda p: change_op(p, BODY, "k.1", frequencies=()),
        "rope",
        "k.1",
    ),
    "queries are not clamped": Fault(
        MHA.format("clip = 0.01"), lambda p: bypass(p, BODY, "q.1"), "rope", "q.2"
    ),
    "gradients of sinks are not summed over dp": Fault(
        MHA.format("sinks = true"),
        lambda p: change_sums(p, "attention.sinks", ()),
        "attention",
        "@attention.sinks",
    ),
    "gradients of the shared key are not summed over tp": Fault(
        f"{MLA})", lambda p: bypass(p, BODY, "k_rope.3"), "join_shared", "k_rope.1"
    ),
    "gradients of the norm of latent vectors are not summed over tp": Fault(
        f"{MLA})",
        lambda p: change_sums(p, "attention.kv_down_norm.weight", ("dp",)),
        "rms_norm",
        "@attention.kv_down_norm.weight",
    ),
}  # fmt: skip


OF_ONE_KIND = {
    *("a window is too short by one", "halves turn instead of neighbours"),
    "gradients of the norm of latent vectors are not summed over tp",
}
"""Faults that are found as others of their kind are."""


@pytest.mark.parametrize("fault", some(list(FAULTS), [fault for fault in FAULTS if fault not in OF_ONE_KIND]))
def test_a_planted_fault_is_refused_with_its_op(fault: str) -> None:
    planted = FAULTS[fault]
    right = moe_plan(tp=2, attention=planted.attention)
    report = verify(planted.plant(right), float32=False)
    assert not report.ok
    found = report.first_difference
    assert found is not None
    assert (found.op, found.value) == (planted.op, planted.value)


def test_tensor_parallelism_divides_the_heads_of_latent_attention() -> None:
    with pytest.raises(DiagnosticError, match="MOE0318"):
        compile_source(moe_spec(ranks=8, tp=8, ep=1, attention=f"{MLA})", ffn="gelu(8)", expert="gelu(8)"))
