"""Rules between values, also for a Spec made in Python, without spans."""

from __future__ import annotations

from support.tables import each_row

from moec.grammar import Spec, check, load_text
from moec.grammar.spec import Layer, Model
from moec.grammar.spec.base import field_names
from moec.grammar.spec.experts import Gelu

FILE = """
model "m" {{
  vocab = 256; dim = {dim}; depth = 1; {context}; embedding = {embedding}
  layers {{ attention = {attention}; {ffn} }}
}}
{train}
"""


def text(**values: str) -> str:
    base = {
        "dim": "64",
        "context": "context = 128",
        "attention": "mha(heads = 4)",
        "ffn": "ffn = gelu(8)",
        "train": "",
        "embedding": "tokens",
    }
    return FILE.format(**(base | values))


@each_row(
    ("values", "code"),
    [
        ({"attention": "gqa(heads = 4, kv_heads = 3)"}, "MOE0301"),
        ({"attention": "gqa(heads = 4, kv_heads = 8)"}, "MOE0301"),
        ({"attention": "mha(heads = 3)"}, "MOE0302"),
        ({"attention": "mha(heads = 100_000_000_000_000)"}, "MOE0302"),
        ({"attention": "mha(heads = 4, head_dim = 15, rope = rope)"}, "MOE0303"),
        ({"dim": "60", "attention": "mha(heads = 4, rope = rope)"}, "MOE0303"),
        ({"ffn": "moe { experts = 9 * gelu(8); gate = topk(3, groups = 2) }"}, "MOE0317"),
        ({"ffn": "moe { experts = 8 * gelu(8); gate = topk(3, groups = 4, keep_groups = 5) }"}, "MOE0317"),
        ({"ffn": "moe { experts = 8 * gelu(8); gate = topk(3, groups = 4, keep_groups = 1) }"}, "MOE0317"),
        ({"ffn": "moe { experts = 8 * gelu(8); gate = topk(3, keep_groups = 2) }"}, "MOE0317"),
        ({"ffn": "moe { experts = 2 * gelu(8); gate = topk(3) }"}, "MOE0304"),
        ({"train": "train { batch = 1; sequence = 129 }"}, "MOE0307"),
        ({"embedding": "tokens(padding = 256)"}, "MOE0324"),
        ({"context": ""}, "MOE0308"),
        ({"context": "", "train": "parallel { tp = 1 }"}, "MOE0308"),
    ],
)
def test_a_rule_is_broken_in_a_file(values: dict[str, str], code: str) -> None:
    diagnostics = load_text(text(**values)).diagnostics
    assert [diagnostic.code for diagnostic in diagnostics] == [code]
    assert diagnostics[0].labels or code == "MOE0308"


@each_row(
    "values",
    [
        {"attention": "gqa(heads = 3, kv_heads = 1, head_dim = 5)"},
        {"attention": "mha(heads = 4, head_dim = 15)"},
        {"ffn": "moe { experts = 2 * gelu(8); gate = topk(2) }"},
        {"context": "", "train": "train { batch = 1; sequence = 8 }"},
        {"train": "train { batch = 1; sequence = 128 }"},
        {"embedding": "tokens(padding = 255)"},
    ],
)
def test_a_rule_is_kept(values: dict[str, str]) -> None:
    assert load_text(text(**values)).diagnostics == ()


def test_one_broken_rule_hides_no_other() -> None:
    values = {
        "attention": "gqa(heads = 3, kv_heads = 2)",
        "ffn": "moe { experts = 2 * gelu(8); gate = topk(3) }",
        "train": "train { batch = 1; sequence = 200 }",
    }
    codes = {diagnostic.code for diagnostic in load_text(text(**values)).diagnostics}
    assert codes == {"MOE0301", "MOE0302", "MOE0304", "MOE0307"}


def test_a_spec_made_in_python_is_checked_by_the_same_rules() -> None:
    good = load_text(text(ffn="moe { experts = 4 * gelu(8); gate = topk(2) }")).unwrap()
    assert check(good) == []
    layer = good.model.layers[0]
    assert layer.moe
    gate = layer.moe.gate.replace(k=9)
    worse = Layer(attention=layer.attention, moe=layer.moe.replace(gate=gate))
    fields = {name: getattr(good.model, name) for name in field_names(Model)}
    bad = Spec(model=Model(**(fields | {"layers": (worse,), "context": None})), cluster=good.cluster)
    assert [diagnostic.code for diagnostic in check(bad)] == ["MOE0304", "MOE0308"]
    both = worse.replace(ffn=Gelu(hidden=8), moe=layer.moe)
    neither = Layer(attention=layer.attention)
    bad = Spec(model=Model(**(fields | {"layers": (both, neither)})), cluster=good.cluster)
    assert [diagnostic.code for diagnostic in check(bad)] == ["MOE0306", "MOE0309", "MOE0305"]


INNER = 'layer "{}" {{ {} moe {{ experts = 2 * {}; gate = topk(1) }} }}\n'


@each_row(
    ("text", "expected"),
    [
        (INNER.format("a", "dim = 8;", "gelu(4)"), []),
        (INNER.format("a", "", "gelu(4)"), ["MOE0203"]),
        (INNER.format("a", "dim = 8;", 'mixture("b")') + INNER.format("b", "", "gelu(4)"), []),
        (INNER.format("a", "dim = 8;", 'mixture("b")'), ["MOE0201"]),
        (INNER.format("a", "dim = 8;", "gelu(4)") + INNER.format("b", "dim = 8;", "gelu(4)"), ["MOE0205"]),
        (INNER.format("a", "dim = 8;", 'mixture("b")') + INNER.format("b", "", 'mixture("b")'), ["MOE0217"]),
    ],
)
def test_mixtures_by_name(text: str, expected: list[str]) -> None:
    assert [diagnostic.code for diagnostic in load_text(text).diagnostics] == expected
