"""What a refusal or a warning advises leads to a file that compiles without it."""

from __future__ import annotations

from pathlib import Path

from support.tables import each_row

from moec.driver import check
from moec.grammar.diagnostics import Diagnostic

TEXTS = """
model "m" {{
  vocab = 64; dim = 32; depth = 1; dtype = fp32{model}
  layers {{ attention = {attention}; moe {{ experts = 8 * swiglu(16); gate = {gate}{moe} }} }}
}}
cluster "c" {{ device = cpu; level "n" {{ size = 4 }} }}
train {{ batch = 8; sequence = 16{train} }}
parallel {{ {parallel} }}
"""
USUAL = {
    "model": "",
    "attention": "mha(heads = 4, causal = false)",
    "gate": "topk(2)",
    "moe": "",
    "train": "",
    "parallel": "",
}
MLA = "mla(heads = 4, kv_rank = 8, nope_dim = 4, rope_dim = 4, value_dim = 4{})"
PACKED = "; embedding = tokens(segments = true)"


def found(folder: Path, form: str = TEXTS, **given: str) -> tuple[Diagnostic, ...]:
    """What `moec check` says of a file."""
    path = folder / "example.moe"
    path.write_text(form.format(**(USUAL | given)), encoding="utf-8")
    return tuple(check(path))


@each_row(
    ("gate", "moe"),
    [
        ("expert_choice(2)", ""),
        ("base", ""),
        ("batch_priority(2)", "; capacity = factor(1)"),
        ("topk(2)", "; capacity = factor(1); overflow = reroute"),
        ("topk(2)", "; capacity = factor(1); overflow = pad"),
        ("topk(2)", "; capacity = factor(1, order = random)"),
        ("topk(2)", "; capacity = factor(1, order = priority)"),
        ("topk(2)", "; balance = [importance_loss(0.1)]"),
    ],
)
def test_where_packed_texts_are_no_groups_the_batch_is_one(tmp_path: Path, gate: str, moe: str) -> None:
    (refusal,) = found(tmp_path, model=PACKED, gate=gate, moe=moe)
    numbers = "that changes the numbers that the model computes"
    assert (refusal.code, refusal.help) == ("MOE0202", f"use `group = batch`; {numbers}")
    assert found(tmp_path, model=PACKED, gate=gate, moe=f"{moe}; group = batch") == ()


@each_row("gate", ["soft(2)", "smear"])
@each_row("packed", [PACKED, "; embedding = tokens(separator = 3)"])
def test_gates_of_whole_sequences_get_one_text_a_sequence(tmp_path: Path, gate: str, packed: str) -> None:
    (refusal,) = found(tmp_path, model=packed, gate=gate)
    (of_batch,) = found(tmp_path, model=packed, gate=gate, moe="; group = batch")
    assert (refusal.code, of_batch.code) == ("MOE0202", "MOE0354")
    assert "group = batch" not in refusal.help
    assert refusal.help.removesuffix("; that changes the numbers that the model computes") in of_batch.help
    assert found(tmp_path, model="; embedding = tokens(padding = 0)", gate=gate) == ()


def test_causality_is_an_option_of_attention(tmp_path: Path) -> None:
    causal = {"gate": "soft(2)", "attention": "mha(heads = 4)"}
    (warning,) = found(tmp_path, **causal)
    assert (warning.code, "`mha(…, causal = false)`" in warning.help) == ("MOE0352", True)
    misplaced = next(d for d in found(tmp_path, model="; causal = false", **causal) if d.code == "MOE0201")
    assert "`attention = gqa(causal = false)` (or `mha(…)`" in misplaced.help
    assert found(tmp_path, gate="soft(2)") == ()


def test_an_option_of_the_embedding_is_said_to_be_one(tmp_path: Path) -> None:
    (misplaced,) = found(tmp_path, model="; padding = 0")
    assert misplaced.help == "it belongs in `embedding = tokens(padding = 0)`"


@each_row(
    ("code", "given", "way_out"),
    [
        ("MOE0347", {"gate": "topk(2, groups = 4)"}, {"gate": "topk(2, groups = 4, keep_groups = 2)"}),
        ("MOE0347", {"gate": "topk(2, group_score = max)"}, {"gate": "topk(2, groups = 4, keep_groups = 2)"}),
        ("MOE0374", {"attention": MLA.format("")}, {"attention": MLA.format(", rope = rope()")}),
    ],
)
def test_an_option_that_needs_another_is_warned_of(
    tmp_path: Path, code: str, given: dict[str, str], way_out: dict[str, str]
) -> None:
    (warning,) = found(tmp_path, **given)
    assert (warning.code, warning.severity) == (code, "warning")
    assert found(tmp_path, **way_out) == ()


def test_kept_groups_without_groups_say_what_is_missing(tmp_path: Path) -> None:
    (refusal,) = found(tmp_path, gate="topk(2, keep_groups = 2)")
    assert refusal.code == "MOE0317"
    assert "`groups = …`" in refusal.help
    assert [label.message for label in refusal.labels] == ["without `groups` there is one"]


def test_one_id_for_padding_and_separators_is_warned_of(tmp_path: Path) -> None:
    for embedding, codes in (
        ("tokens(padding = 3, separator = 3)", ["MOE0348"]),
        ("tokens(padding = 2, separator = 3)", []),
        ("tokens(padding = given, separator = 3)", []),
        ("tokens(padding = 3, segments = true)", []),
    ):
        assert [d.code for d in found(tmp_path, model=f"; embedding = {embedding}")] == codes


@each_row(
    ("shared", "help"),
    [
        ("2 * swiglu(4)", "the sum of several is one of their total width: `swiglu(2 * 4)`"),
        ("2 * 3 * swiglu(4)", "the sum of several is one of their total width"),
        ("2 * lora(4)", ""),
    ],
)
def test_several_shared_experts_are_one_of_their_total_width(tmp_path: Path, shared: str, help: str) -> None:
    (refusal,) = found(tmp_path, moe=f"; shared = {shared}")
    assert (refusal.code, refusal.help) == ("MOE0206", help)
    assert refusal.message.endswith(f"found `{shared}`")
    assert found(tmp_path, moe="; shared = swiglu(2 * 4)") == ()


def test_tp_divides_slots_and_other_slots_are_said_to_be_another_model(tmp_path: Path) -> None:
    (refusal,) = found(tmp_path, gate="soft(1)", parallel="tp = 2")
    assert (refusal.code, refusal.help) == ("MOE0318", "set `tp = 1` or take `slots = 2`, which is another model")
    assert found(tmp_path, gate="soft(1)") == found(tmp_path, gate="soft(2)", parallel="tp = 2") == ()


def test_batches_of_images_are_counted_in_images(tmp_path: Path) -> None:
    images = """
    model "v" {{
      dim = 16; depth = 1; embedding = patches(image = 8, size = 2); head = classes(3)
      layers {{ attention = {attention}; ffn = gelu(8) }}
    }}
    cluster "c" {{ device = cpu; level "n" {{ size = 4 }} }}
    train {{ batch = 6 }}
    """
    (refusal,) = found(tmp_path, images)
    assert (refusal.code, refusal.message) == ("MOE0313", "6 images over 4 ranks")
