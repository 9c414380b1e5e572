"""Values: numbers, units, arithmetic, `let` and its overrides, and the diagnostics of wrong ones."""

from __future__ import annotations

from fractions import Fraction

import pytest
from pydantic import ValidationError
from support.tables import each_row

from moec.grammar import load_text
from moec.grammar.load import Loaded
from moec.grammar.schema import ListKind, NumberKind, fields
from moec.grammar.schema_in_words import vocabulary
from moec.grammar.spec import Factor, Model

MODEL = """
model "m" {{
  vocab = {vocab}; dim = {dim}; depth = 2; context = 128
  layers {{ attention = {attention}; {ffn} }}
}}
"""


def load(head: str = "", lets: dict[str, str | int | float] | None = None, tail: str = "", **values: str) -> Loaded:
    given = {"vocab": "256", "dim": "64", "attention": "mha(heads = 4)", "ffn": "ffn = swiglu(128)"} | values
    return load_text(head + MODEL.format(**given) + tail, lets=lets)


def model(head: str = "", lets: dict[str, str | int | float] | None = None, **values: str) -> Model:
    return load(head, lets, **values).unwrap().model


def codes(head: str = "", lets: dict[str, str | int | float] | None = None, tail: str = "", **values: str) -> list[str]:
    return [diagnostic.code for diagnostic in load(head, lets, tail, **values).diagnostics]


@each_row(
    ("text", "number"),
    [
        ("32_000", 32_000),
        ("32k", 32_000),
        ("1.5k", 1500),
        ("2Ki", 2048),
        ("2M", 2_000_000),
        ("1Mi", 1 << 20),
        ("1e3", 1000),
        ("2 * (3 + 5) / 4", 4),
        ("7 - 2 - 1", 4),
        ("-1 + 4", 3),
        ("0.1 * 30", 3),
        ("1 / 3 * 3", 1),
        ("1e16 + 1 - 1e16", 1),
        ("0e999999999 + 1", 1),
    ],
)
def test_whole_numbers(text: str, number: int) -> None:
    vocab = model(vocab=text).vocab
    assert vocab == number
    assert type(vocab) is int


def test_quantities_are_in_base_units_and_exact() -> None:
    device = """
device "d" { kind = cpu; memory = 1.5GiB; bandwidth = 2_039GB/s; peak { bf16 = 989.4TFLOPS } }
cluster "c" { device = d; level "node" { size = 1; bandwidth = 0.3KB/s; latency = 2.7us } }
"""
    cluster = load(tail=device).unwrap().cluster
    assert cluster.device.memory == 1.5 * 2**30
    assert cluster.device.bandwidth == 2.039e12
    assert cluster.device.peak.bf16 == 989.4e12
    assert (cluster.levels[0].bandwidth, cluster.levels[0].latency) == (300.0, 2.7e-6)


def test_quantities_can_be_scaled_and_divided() -> None:
    cluster = (
        'cluster "c" { device = cpu; level "n" { size = all / 2GB; bandwidth = 3 * bw / 2; latency = 1us + 2ms } }'
    )
    level = load("let all = 16GB; let bw = 10GB/s\n", tail=cluster).unwrap().cluster.levels[0]
    assert (level.size, level.bandwidth, level.latency) == (8, 15e9, 2.001e-3)


@each_row(
    ("text", "code"),
    [
        ("1.5", "MOE0206"),
        ("true", "MOE0206"),
        ('"256"', "MOE0206"),
        ("[1]", "MOE0206"),
        ("0", "MOE0207"),
        ("-4", "MOE0207"),
        ("8GB", "MOE0208"),
        ("8Gb", "MOE0209"),
        ("8 / 0", "MOE0215"),
        ("8 + 1us", "MOE0215"),
        ("2GB * 2GB", "MOE0215"),
        ("8 / 2us", "MOE0215"),
        ("1e308 * 1e308", "MOE0215"),
        ("1e-300 * 1e-300", "MOE0215"),
        ("(1 / 3) * 1e999999", "MOE0107"),
        ("0." + "3" * 5000, "MOE0107"),
        ("1e999999999", "MOE0107"),
        ("1e-400", "MOE0107"),
        ("3e-4999999999999999999999999999999", "MOE0107"),
        ("9" * 5000, "MOE0107"),
        ("10_000_000_000_000_000_000", "MOE0107"),
        ("n", "MOE0201"),
        ("1 + n", "MOE0201"),
        ("1 + f(2)", "MOE0206"),
        ("f(2)", "MOE0206"),
        ("1..2", "MOE0206"),
    ],
)
def test_what_is_no_whole_number_above_zero_is_told_so(text: str, code: str) -> None:
    assert codes(vocab=text) == [code]


@each_row("written", ["1e39", "3.4e38", "1e300 / 2", "1e-46", "2 / 1e300"])
@each_row(
    "ffn",
    [
        "ffn = swiglu(8, clamp = NUMBER)",
        "moe { experts = 4 * gelu(4); gate = dselect_k(2, gamma = NUMBER) }",
        "moe { experts = 4 * gelu(4); gate = topk(2, bias = online(NUMBER)) }",
        "moe { experts = 4 * gelu(4); gate = topk(2); balance = [switch_loss(NUMBER)] }",
    ],
)
def test_a_number_that_no_layer_computes_with_is_refused(ffn: str, written: str) -> None:
    assert codes(ffn=ffn.replace("NUMBER", written)) == ["MOE0107"]
    assert codes(ffn=ffn.replace("NUMBER", "3.38e38")) == []
    assert codes(ffn=ffn.replace("NUMBER", "1e38 * 3.38e200 / 1e200")) == []


FLOATS = {
    (cls, known.name): any(isinstance(kind, ListKind) for kind in known.kinds)
    for classes in vocabulary().values()
    for cls in classes
    for known in fields(cls).values()
    for kind in (item for kind in known.kinds for item in getattr(kind, "items", (kind,)))
    if isinstance(kind, NumberKind) and not kind.whole and not kind.exact
}
"""Every field that takes a float, and whether it takes a list of them."""


@each_row("value", [1e39, 3.4e38, 1e-46])
def test_no_field_takes_a_float_that_no_layer_computes_with(value: float) -> None:
    assert len(FLOATS) > 50
    for (cls, name), listed in FLOATS.items():
        with pytest.raises(ValidationError) as caught:
            cls(**{name: (1.0, value) if listed else value})
        assert name in {error["loc"][0] for error in caught.value.errors()}, (cls, name)


def test_every_mistake_of_a_sum_is_found() -> None:
    assert codes(vocab="a + 2Q + b") == ["MOE0201", "MOE0209", "MOE0201"]


def test_a_let_can_be_any_value_and_use_those_above_it() -> None:
    head = "let w = 32; let d = 2 * w; let act = swiglu(d); let att = mha(heads = 4, rope = rope); let e = 8 * act\n"
    found = model(head, dim="d", attention="att", ffn="moe { experts = e; gate = topk(2) }")
    assert found.dim == 64
    assert found.layers[0].attention.heads == 4
    assert found.layers[0].moe
    assert (found.layers[0].moe.experts.count, found.layers[0].moe.experts.body.hidden) == (8, 64)


def test_the_name_of_a_field_may_be_a_let_too() -> None:
    found = model("let experts = 8\n", ffn="moe { experts = experts * gelu(4); gate = topk(2) }")
    assert found.layers[0].moe
    assert found.layers[0].moe.experts.count == 8


def test_a_value_that_came_through_a_let_points_at_its_use() -> None:
    found = model("let w = 64\n", dim="w")
    span = found.span("dim")
    assert span
    assert span.source.text[span.start : span.end] == "w"
    assert span.line == 4


def test_an_error_in_a_value_shows_the_let_it_came_through() -> None:
    (diagnostic,) = load("let w = 64.5\n", dim="w").diagnostics
    assert diagnostic.span
    assert diagnostic.span.line == 4
    assert [(label.span.line, label.message) for label in diagnostic.labels] == [(1, "`w` is declared here")]


@each_row("value", ["128", 128, 128.0, "2 * 64", "w"])
def test_a_let_is_overridden(value: str | int | float) -> None:
    found = model("let w = 128; let d = 64\n", {"d": value}, dim="d")
    assert found.dim == 128


def test_an_override_may_be_a_word_or_a_call() -> None:
    found = model(
        "let t = bf16; let a = gelu(8)\n", {"t": "fp32", "a": "swiglu(4)"}, ffn="ffn = a", vocab="256; dtype = t"
    )
    assert found.dtype == "fp32"
    assert found.layers[0].ffn
    assert found.layers[0].ffn.hidden == 4


def test_a_wrong_override_points_at_the_command_line() -> None:
    (diagnostic,) = load("let d = 64\n", {"d": "sixty"}, dim="d").diagnostics
    assert diagnostic.code == "MOE0201"
    assert diagnostic.labels[0].span.source.text == "d=sixty"
    assert codes("let d = 64\n", {"d": "1 +"}, dim="d") == ["MOE0101"]
    assert codes("let d = 64\n", {"d": "1; x = 2"}, dim="d") == ["MOE0101"]
    assert codes("let d = 64\n", {"d": ""}, dim="d") == ["MOE0101"]


def test_an_override_of_an_unknown_let_suggests_one() -> None:
    (diagnostic,) = load("let experts = 8\n", {"expert": 4}).diagnostics
    assert diagnostic.code == "MOE0213"
    assert "did you mean `experts`?" in diagnostic.help
    assert codes(lets={"x": 1}) == ["MOE0213"]


@each_row("head", ["let a = a", "let a = b; let b = a", "let a = [f(b)]; let b = 1", "let a = -b; let b = 1"])
def test_a_let_cannot_use_itself_or_what_comes_later(head: str) -> None:
    assert codes(head + "\n") == ["MOE0214"]


def test_a_let_is_declared_once() -> None:
    (diagnostic,) = load("let a = 1\nlet a = 2\n").diagnostics
    assert (diagnostic.code, diagnostic.labels[0].span.line) == ("MOE0204", 1)


def test_lets_that_double_each_other_do_not_grow_without_bound() -> None:
    head = "let a0 = [1]\n" + "".join(f"let a{i} = [a{i - 1}, a{i - 1}]\n" for i in range(1, 60))
    assert "MOE0403" in codes(head)


def test_a_chain_of_ten_thousand_lets_is_followed() -> None:
    head = "let a0 = 1\n" + "".join(f"let a{i} = a{i - 1} + 1\n" for i in range(1, 10_000))
    assert model(head, vocab="a9999").vocab == 10_000


@each_row(
    ("values", "code", "suggestion"),
    [
        ({"attention": "gqaa(heads = 4, kv_heads = 2)"}, "MOE0201", "`gqa`"),
        ({"attention": "mha(head = 4)"}, "MOE0201", "`heads`"),
        ({"ffn": "fnn = swiglu(4)"}, "MOE0201", "`ffn`"),
        ({"ffn": "moe { experts = 4 * gelu(8); gate = topk(2, score = softmx) }"}, "MOE0201", "`softmax`"),
        ({"ffn": "moe { experts = 4; gate = topk(2) }"}, "MOE0206", ""),
        ({"ffn": "moe { experts = gelu(8) * 4; gate = topk(2) }"}, "MOE0206", ""),
        ({"ffn": "moe { experts = 4 / gelu(8); gate = topk(2) }"}, "MOE0206", ""),
        ({"ffn": "moe { experts = 4 * gelu(8); gate = topk(2); balance = switch_loss(1) }"}, "MOE0206", "brackets"),
        ({"vocab": '256; dtype = "bf16"'}, "MOE0206", "without quotes"),
        ({"vocab": "256; dtype = bf16(1)"}, "MOE0206", "write `bf16`"),
        ({"attention": "mha(4)"}, "MOE0210", "heads = …"),
        ({"ffn": "ffn = swiglu(4, 5)"}, "MOE0210", "hidden = …"),
        ({"ffn": "ffn = swiglu(hidden = 4, 5)"}, "MOE0210", ""),
        ({"ffn": "ffn = swiglu(4, hidden = 5)"}, "MOE0204", ""),
        ({"ffn": "ffn = swiglu"}, "MOE0203", "hidden width"),
        ({"ffn": "moe = 4"}, "MOE0211", "`moe { … }`"),
        ({"ffn": "ffn { }"}, "MOE0211", "`ffn = swiglu(…)`"),
        ({"ffn": 'moe "x" { }'}, "MOE0212", ""),
        ({"ffn": "let x = 1; ffn = gelu(4)"}, "MOE0211", ""),
    ],
)
def test_one_mistake_gives_one_diagnostic(values: dict[str, str], code: str, suggestion: str) -> None:
    diagnostics = [d for d in load(**values).diagnostics if d.code not in ("MOE0203", "MOE0305")]
    diagnostics = diagnostics or list(load(**values).diagnostics)
    assert [d.code for d in diagnostics] == [code]
    assert suggestion in diagnostics[0].help


def test_a_misspelt_name_is_not_reported_as_missing_too() -> None:
    assert codes(vocab="256", dim="64", ffn="ffn = swiglu(hiden = 4)") == ["MOE0201"]
    (missing, misspelt) = load_text('model "m" { vocb = 3; context = 8 }').diagnostics
    assert (missing.code, misspelt.code) == ("MOE0203", "MOE0201")
    assert "`vocab`" not in missing.message
    assert "`depth`" in missing.message


def test_a_file_with_an_open_brace_is_not_told_that_blocks_are_missing() -> None:
    text = 'model "m" {\n vocab = 4; dim = 4; depth = 1\n layers { attention = mha(heads = 1); ffn = gelu(4)\n }\n'
    assert [d.code for d in load_text(text).diagnostics] == ["MOE0104"]


def test_nothing_is_reported_as_missing_where_something_did_not_parse() -> None:
    assert [d.code for d in load_text('model "m" { vocab = = 3 }').diagnostics] == ["MOE0101"]


FACTOR = "moe {{ experts = 8 * gelu(4); gate = topk(1); capacity = {} }}"


def capacity(text: str, head: str = "", lets: dict[str, str | int | float] | None = None) -> Factor:
    moe = model(head, lets, ffn=FACTOR.format(text)).layers[0].moe
    assert moe
    assert isinstance(moe.capacity, Factor)
    return moe.capacity


@each_row(
    ("head", "text"),
    [
        ("let f = 0.1 * 3\n", "factor(f)"),
        ("let f = 0.1\nlet g = f * 3\n", "factor(g)"),
        ("let f = 0.1 + 0.2\n", "factor(f)"),
        ("let f = 3 / 10\n", "factor(f)"),
        ("", "factor(0.1 * 3)"),
        ("", "factor(0.3)"),
    ],
)
def test_arithmetic_is_decimal_and_exactly_what_is_written(head: str, text: str) -> None:
    assert capacity(text, head).factor == Fraction(3, 10)


def test_an_override_takes_part_in_exact_arithmetic() -> None:
    assert capacity("factor(f * 3)", "let f = 1\n", {"f": 0.1}).factor == Fraction(3, 10)
    assert capacity("factor(f * 3)", "let f = 1\n", {"f": "0.1"}).factor == Fraction(3, 10)


def test_a_capacity_is_the_fraction_and_no_float_beside_it() -> None:
    found = capacity("factor(5 / 3, eval = 2 / 3)")
    assert (found.factor, found.eval) == (Fraction(5, 3), Fraction(2, 3))


def test_a_float_made_in_python_is_the_decimal_that_it_shows() -> None:
    assert Factor(factor=0.3) == Factor(factor=Fraction(3, 10))
    assert Factor(factor=0.3) == capacity("factor(0.3)")


@each_row("factor", [float("inf"), float("nan"), 0.0, -1.0, True, "1", 1e-300])
def test_what_is_no_capacity_is_refused_in_python(factor: object) -> None:
    with pytest.raises(ValidationError):
        Factor(factor=factor)


@each_row(("text", "code"), [("0", "MOE0207"), ("-0.5", "MOE0207"), ("1e-300", "MOE0107")])
def test_what_is_no_capacity_is_refused_in_a_file(text: str, code: str) -> None:
    assert codes(ffn=FACTOR.format(f"factor({text})")) == [code]


def test_other_numbers_are_the_nearest_float() -> None:
    train = "train { batch = 1; sequence = 8; optimizer = adamw(lr = 0.1 * 3, eps = 1e-324 * 10, beta2 = 1 / 3) }"
    optimizer = load(tail=train).diagnostics
    assert [found.code for found in optimizer] == ["MOE0107"]  # no float is as small as 1e-324
    optimizer = load(tail=train.replace("1e-324", "1e-40")).unwrap().train.optimizer
    assert (optimizer.lr, optimizer.eps, optimizer.beta2) == (0.3, 1e-39, 1 / 3)
    assert type(optimizer.lr) is float


def test_a_number_that_rounds_onto_its_bound_breaks_it() -> None:
    tail = f"train {{ batch = 1; sequence = 8; optimizer = adamw(beta2 = 0.{'9' * 30}) }}"
    assert codes(tail=tail) == ["MOE0207"]


def test_squares_of_squares_end_in_a_diagnostic() -> None:
    """A hundred of them have 10^30 digits."""
    lets = "let a0 = 1.0000001\n" + "".join(f"let a{i + 1} = a{i} * a{i}\n" for i in range(100))
    (found,) = load(lets).diagnostics
    assert (found.code, found.message) == ("MOE0215", "the exact result has more than 400 digits")
