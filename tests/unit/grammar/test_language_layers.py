"""`layers` blocks: selectors, overrides by later blocks, and identical layers as one object."""

from __future__ import annotations

from support.tables import each_row

from moec.grammar import load_text
from moec.grammar.spec import Gqa, Layer, Mha
from moec.grammar.spec.experts import Gelu, SwiGLU

BASE = "layers { attention = mha(heads = 4); ffn = gelu(8) }\n"


def text(blocks: str, depth: int = 6) -> str:
    return f'let n = 4\nmodel "m" {{\nvocab = 256; dim = 64; depth = {depth}; context = 128\n{blocks}\n}}'


def layers(blocks: str, depth: int = 6) -> tuple[Layer, ...]:
    return load_text(text(blocks, depth)).unwrap().model.layers


def codes(blocks: str) -> list[str]:
    return [diagnostic.code for diagnostic in load_text(text(blocks)).diagnostics]


@each_row(
    ("selector", "picked"),
    [
        ("", [0, 1, 2, 3, 4, 5]),
        ("5", [5]),
        ("n", [4]),
        ("(n - 2)", [2]),
        ("2..4", [2, 3, 4]),
        ("1..n", [1, 2, 3, 4]),
        ("1..5 step 2", [1, 3, 5]),
        ("0..(n + 1) step (n - 1)", [0, 3]),
        ("[3, 1]", [1, 3]),
        ("[0..1, n, n]", [0, 1, 4]),
    ],
)
def test_a_selector_picks_layers(selector: str, picked: list[int]) -> None:
    found = layers(f"{BASE} layers {selector} {{ ffn = swiglu(8) }}")
    assert [index for index, layer in enumerate(found) if isinstance(layer.ffn, SwiGLU)] == picked


def test_a_let_may_hold_a_selector() -> None:
    loaded = load_text("let some = 1..2\n" + text(f"{BASE} layers some {{ ffn = swiglu(8) }}"))
    kinds = [type(layer.ffn) for layer in loaded.unwrap().model.layers]
    assert kinds == [Gelu, SwiGLU, SwiGLU, Gelu, Gelu, Gelu]


@each_row(
    ("selector", "code"),
    [
        ("6", "MOE0306"),
        ("0..6", "MOE0306"),
        ("[0, 9]", "MOE0306"),
        ("3..1", "MOE0306"),
        ("0..999_999_999_999", "MOE0306"),
        ("0..5 step 0", "MOE0207"),
        ("(0 - 1)", "MOE0207"),
        ("1.5", "MOE0206"),
        ("2us", "MOE0208"),
        ("other", "MOE0201"),
        ('["a"]', "MOE0206"),
    ],
)
def test_a_wrong_selector_is_one_diagnostic(selector: str, code: str) -> None:
    assert codes(f"{BASE} layers {selector} {{ ffn = swiglu(8) }}") == [code]


def test_a_later_block_overrides_what_it_names_and_keeps_the_rest() -> None:
    found = layers(BASE + "layers 2 { attention = gqa(heads = 4, kv_heads = 2) }")
    assert isinstance(found[1].attention, Mha)
    assert isinstance(found[2].attention, Gqa)
    assert found[2].ffn == Gelu(hidden=8)


def test_ffn_and_moe_replace_each_other() -> None:
    moe = "moe { experts = 4 * gelu(8); gate = topk(2) }"
    found = layers(f"{BASE} layers 1..2 {{ {moe} }}\n layers 2 {{ ffn = swiglu(16) }}")
    assert [(layer.ffn is None, layer.moe is None) for layer in found[:3]] == [
        (False, True),
        (True, False),
        (False, True),
    ]
    assert found[2].ffn == SwiGLU(hidden=16)


def test_a_moe_block_over_a_moe_merges_into_it() -> None:
    first = (
        "layers { attention = mha(heads = 4); moe { experts = 4 * gelu(8); gate = topk(2); balance = [z_loss(1)] } }"
    )
    found = layers(f"{first}\nlayers 5 {{ moe {{ experts = 16 * gelu(8) }} }}")
    assert found[0].moe
    assert found[5].moe
    assert found[5].moe.experts.count == 16
    assert (found[5].moe.gate, found[5].moe.balance) == (found[0].moe.gate, found[0].moe.balance)


def test_a_moe_that_replaced_an_ffn_does_not_remember_an_earlier_moe() -> None:
    moe = "layers { moe { experts = 4 * gelu(8); gate = topk(2) } }"
    blocks = f"{BASE} {moe}\n layers {{ ffn = gelu(8) }}\n layers 1 {{ moe {{ experts = 2 * gelu(8) }} }}"
    assert codes(blocks) == ["MOE0203"]


def test_layers_with_the_same_blocks_are_one_object() -> None:
    found = layers(BASE + "layers 1..9999 step 2 { ffn = swiglu(8) }", depth=10_000)
    assert len({id(layer) for layer in found}) == 2
    assert found[1] is found[9999]


def test_spans_of_a_merged_layer_point_at_each_block() -> None:
    found = layers(BASE + "layers 2 {\n ffn = swiglu(8)\n}")[2]
    lines = {name: span.line for name in ("", "attention", "ffn") if (span := found.span(name))}
    assert lines == {"": 5, "attention": 4, "ffn": 6}


def test_an_incomplete_layer_is_reported_once_with_its_numbers() -> None:
    (diagnostic,) = load_text(
        text("layers 1..3 { attention = mha(heads = 4) }\nlayers [0, 4..5] { " + BASE[8:])
    ).diagnostics
    assert diagnostic.code == "MOE0305"
    assert "layers 1..3 have no `ffn` or `moe`" in diagnostic.message


def test_layers_in_no_block_are_named() -> None:
    (diagnostic,) = load_text(text("layers 0..3 { " + BASE[8:])).diagnostics
    assert "layers 4..5 have no `attention`" in diagnostic.message


def test_a_mistake_in_a_shared_block_is_reported_once() -> None:
    blocks = "layers { attention = gqa(heads = 8, kv_heads = 3); ffn = gelu(8) }\n" + "".join(
        f"layers {i} {{ ffn = gelu({i + 1}) }}\n" for i in range(6)
    )
    assert codes(blocks) == ["MOE0301"]


def test_a_mistake_in_a_block_that_is_overridden_everywhere_is_found() -> None:
    assert codes("layers { attention = mha(heds = 4); ffn = gelu(8) }\n" + BASE) == ["MOE0201"]


def test_a_wrong_depth_does_not_hide_mistakes_in_layers() -> None:
    loaded = load_text(text(BASE + "layers { ffn = gelu(0) }").replace("depth = 6", "depth = six"))
    assert [d.code for d in loaded.diagnostics] == ["MOE0201", "MOE0207"]
