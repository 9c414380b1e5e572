"""Options of gates, capacities, attention and packed texts that do not fit: each mistake has a place and a way out."""

from __future__ import annotations

from typing import Any

import pytest
from support.plans import moe_text
from support.tables import each_row

from moec.driver import compile as compile_source
from moec.grammar import load_text
from moec.grammar.diagnostics import DiagnosticError, Severity

MLA = "mla(heads = {}, kv_rank = 8, nope_dim = 4, rope_dim = {}, value_dim = 4, rope = rope())"
ROPE = "mha(heads = 4, rope = rope({}))"
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("MOE0304", {"gate": "topk(9)"}, "set `k = 8` or less"),
    ("MOE0304", {"gate": "dselect_k(9)", "balance": "[]"}, "set `k = 8` or less"),
    ("MOE0304", {"gate": "gshard", "experts": 1, "ep": 1}, "give 2 experts or more"),
    ("MOE0317", {"gate": "topk(2, groups = 3)"}, "set `groups = 4`"),
    ("MOE0317", {"gate": "topk(3, groups = 4, keep_groups = 1)"}, "set `keep_groups = 2`"),
    ("MOE0317", {"gate": "topk(2, groups = 4, keep_groups = 5)"}, "set `keep_groups = 4` or less"),
    ("MOE0341", {"balance": "[device_loss(0.1, groups = 3)]"}, "set `groups = 4`"),
    ("MOE0346", {"gate": "dselect_k(2)", "experts": 6, "balance": "[]"}, "use 8 experts"),
    ("MOE0325", {"balance": "[load_loss(0.1)]"}, "use a gate with noise"),
    ("MOE0325", {"balance": "[load_loss(0.1, of = probabilities)]"}, "noise = 0.1"),
    ("MOE0325", {"gate": "noisy_topk(2)", "balance": "[load_loss(0.1, of = probabilities)]"}, "leave `of` out"),
    ("MOE0350", {"beside": "overflow = pad"}, "capacity = factor"),
    ("MOE0350", {"beside": "capacity = dynamic(max = 1); overflow = pad"}, "capacity = factor"),
    ("MOE0354", {"gate": "noisy_topk(2)", "beside": "capacity = factor(1); overflow = reroute"}, "topk, switch"),
    ("MOE0354", {"gate": "base", "beside": "capacity = factor(1)"}, "leave `capacity` out"),
    ("MOE0354", {"gate": "soft", "balance": "[]", "beside": "overflow = pad"}, "leave it out"),
    ("MOE0354", {"gate": "smear", "balance": "[]", "beside": "group = batch"}, "leave `group` out"),
    ("MOE0314", {"expert": "swiglu(16, gated = true)"}, "shared"),
    ("MOE0318", {"tp": 4, "attention": MLA.format(6, 2)}, "set `tp = 2`"),
    ("MOE0318", {"tp": 4, "attention": "gqa(heads = 6, kv_heads = 2, head_dim = 4, sinks = true)"}, "set `tp = 2`"),
    ("MOE0318", {"tp": 4, "gate": "soft(3)", "balance": "[]", "experts": 3, "ep": 1}, "slots"),
    ("MOE0318", {"tp": 4, "ep": 1, "ffn": "swiglu(6)"}, "set `tp = 2`"),
    ("MOE0318", {"tp": 4, "ep": 1, "beside": "shared = swiglu(6, clamp = 7)"}, "set `tp = 2`"),
    ("MOE0319", {"tp": 4, "sequence": 6}, "set `sequence = 8`"),
    ("MOE0303", {"attention": "mha(heads = 4, head_dim = 3, rope = rope())"}, "set `head_dim = 4`"),
    ("MOE0303", {"attention": MLA.format(4, 3)}, "set `rope_dim = 4`"),
    ("MOE0361", {"attention": ROPE.format("scaling = longrope(short = [1], long = [1, 1], original = 4)")}, "give 2"),
    ("MOE0362", {"attention": "mha(heads = 4, window = 9)"}, "leave `window` out"),
    ("MOE0364", {"attention": ROPE.format("scaling = llama3(8, low = 4, high = 4, original = 4)")}, "below `high`"),
    ("MOE0364", {"attention": ROPE.format("scaling = yarn(8, original = 4, beta_slow = 40)")}, "at most to"),
    ("MOE0324", {"model": "embedding = tokens(separator = 32)"}, "larger `vocab`"),
    ("MOE0371", {"model": "embedding = tokens(segments = true, separator = 3)"}, "keep one"),
    ("MOE0370", {"gate": "expert_choice(2)", "optimizer": "adamw(); replay = true"}, "leave `replay` out"),
    ("MOE0365", {"model": "parallel_residual = one_norm; norm_place = post"}, "norm_place = pre"),
]  # fmt: skip


@each_row(("code", "options", "help"), WRONG)
def test_a_mistake_has_a_place_and_a_way_out(code: str, options: dict[str, Any], help: str) -> None:
    with pytest.raises(DiagnosticError) as error:
        compile_source(load_text(moe_text(**options), name="a.moe").unwrap())
    errors = [one for one in error.value.diagnostics if one.severity is Severity.ERROR]
    assert {one.code for one in errors} == {code}
    for one in errors:
        assert one.span is not None
        assert help in one.help


@each_row(
    ("code", "options"),
    [
        ("MOE0347", {"gate": "topk(2, groups = 4)"}),
        ("MOE0347", {"gate": "topk(2, groups = 4, keep_groups = 4)"}),
        ("MOE0347", {"gate": "topk(2, group_score = max)"}),
        ("MOE0348", {"model": "embedding = tokens(padding = 0, separator = 0)"}),
        ("MOE0351", {"beside": "capacity = dynamic(order = random)"}),
        ("MOE0321", {"gate": "topk(1)", "beside": "capacity = factor(8, renormalize = true)"}),
    ],
)
def test_what_has_no_effect_or_an_odd_one_is_warned_of(code: str, options: dict[str, Any]) -> None:
    loaded = load_text(moe_text(**options), name="a.moe")
    (found,) = [one for one in loaded.diagnostics if one.code == code]
    assert found.severity is Severity.WARNING
    assert found.span is not None
    assert found.help
    loaded.unwrap()


@each_row(
    "options",
    [
        {"gate": "topk(2, groups = 4, keep_groups = 2, group_score = max)"},
        {"model": "embedding = tokens(padding = 0, separator = 1)"},
        {"model": "embedding = tokens(padding = given, separator = 0)"},
    ],
)
def test_what_has_an_effect_is_not_warned_of(options: dict[str, Any]) -> None:
    assert load_text(moe_text(**options), name="a.moe").diagnostics == ()
