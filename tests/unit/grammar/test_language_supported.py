"""Words without a backend parse and validate, and are refused with MOE0202 at their place; other words are not."""

from __future__ import annotations

import pytest
from support.tables import each_row

from moec.driver import compile as compile_source
from moec.grammar import load_text
from moec.grammar.checking.supported import unsupported
from moec.grammar.diagnostics import Diagnostic, DiagnosticError
from moec.grammar.spec import Gqa, Hash, Node, ZLoss
from moec.grammar.spec.experts import Relu2

MODEL = """
model "m" {{
  vocab = 256; dim = 64; depth = 4; context = 128; {model}
  layers {{ attention = {attention}; {ffn} }}
}}
{tail}
"""
MOE = "moe {{ experts = 4 * gelu(8); gate = topk(2); {} }}"
USUAL = {"attention": "mha(heads = 4)", "ffn": "ffn = swiglu(128)", "model": "", "tail": ""}


def refused(**given: str) -> list[Diagnostic]:
    return unsupported(load_text(MODEL.format(**USUAL | given)).unwrap())


@each_row(
    ("given", "what", "today"),
    [
        ({"tail": "parallel { layers 1..2 { recompute = auto } }"}, "`recompute = auto`", "experts, layer, none"),
        ({"tail": "adapt { window = 64 }"}, "`window`", ""),
        ({"tail": 'layer "x" { moe { experts = 2 * gelu(4); gate = topk(1) } }'}, "a `layer` beside a `model`", ""),
    ],
)
def test_a_word_without_a_backend_is_refused_at_its_span(given: dict[str, str], what: str, today: str) -> None:
    (found,) = refused(**given)
    assert found.code == "MOE0202"
    assert found.message.startswith(f"moec cannot compile {what}")
    assert found.help.startswith(f"today: {today}; that changes" if today else "leave it out: that changes")
    unused = "`layer`" in what
    assert found.help.endswith("changes nothing else" if unused else "changes only speed and memory, not the results")
    assert found.span


def test_fp16_is_refused_and_bf16_advised_since_nothing_scales_the_loss() -> None:
    (found,) = refused(model="dtype = fp16")
    assert (found.code, found.message) == ("MOE0202", "moec cannot compile `dtype = fp16` yet")
    assert found.help.startswith("use `bf16`: ")
    assert found.help.endswith("; that changes the numbers that the model computes")
    assert found.span
    assert found.span.source.text[found.span.start : found.span.end] == "fp16"


def test_compiling_a_model_in_fp16_is_refused() -> None:
    text = MODEL.format(attention="mha(heads = 4)", ffn="ffn = swiglu(128)", model="dtype = fp16", tail="")
    with pytest.raises(DiagnosticError, match="MOE0202"):
        compile_source(text)


def test_what_is_written_as_its_default_is_not_refused() -> None:
    assert refused(attention="mha(heads = 4, causal = true)", ffn=MOE.format("overflow = drop; group = sequence")) == []


@pytest.mark.parametrize(
    ("cls", "given"),
    [
        (Relu2, {"ffn": "ffn = relu2(8)"}),
        (Relu2, {"ffn": MOE.format("shared = relu2(8)")}),
        (Gqa, {"attention": "gqa(heads = 4, kv_heads = 2)"}),
        (Hash, {"ffn": "moe { experts = 4 * gelu(8); gate = hash }"}),
        (ZLoss, {"ffn": MOE.format("balance = [z_loss(1)]")}),
    ],
)
def test_a_marked_class_is_refused_once_for_all_layers_and_others_are_listed(
    cls: type[Node], given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused(**given) == []
    monkeypatch.setattr(cls, "implemented", False)
    (found,) = refused(**given)
    assert (found.code, found.message) == ("MOE0202", f"moec cannot compile `{cls.word}` yet")
    listed = found.help.partition("; ")[0].removeprefix("today: ").split(", ")
    assert listed
    assert cls.word not in listed
    with pytest.raises(DiagnosticError, match="MOE0202"):
        compile_source(
            MODEL.format(**{"attention": "mha(heads = 4)", "ffn": "ffn = gelu(8)", "model": "", "tail": ""} | given)
        )


LAYER = 'layer "x" {{ dim = 8; moe {{ experts = {}; gate = topk(1) }} }}\n{}'


@each_row(
    ("experts", "tail", "what"),
    [
        ("2 * gelu(4)", "parallel { tp = 2 }", "`tp = 2` in the file of one `layer`"),
        ("2 * gelu(4)", "parallel { pp = 2 }", "`pp = 2` in the file of one `layer`"),
        ("2 * gelu(4)", "parallel { cp = 2 }", "`cp = 2` in the file of one `layer`"),
        ("2 * gelu(4)", "parallel { etp = 2 }", "`etp = 2` in the file of one `layer`"),
        ("2 * gelu(4)", "parallel { layers 0 { etp = 2 } }", "`etp = 2` in the file of one `layer`"),
    ],
)
def test_a_layer_file_refuses_what_a_layer_cannot_do_yet(experts: str, tail: str, what: str) -> None:
    (found,) = unsupported(load_text(LAYER.format(experts, tail)).unwrap())
    assert (found.code, what in found.message) == ("MOE0202", True), found.message
    assert found.span


def test_a_layer_file_and_its_degrees_of_one_are_supported() -> None:
    assert unsupported(load_text(LAYER.format("2 * gelu(4)", "parallel { tp = 1; ep = 1 }")).unwrap()) == []


def test_the_examples_of_the_language_parse() -> None:
    text = MODEL.format(
        attention="gqa(heads = 4, kv_heads = 2)",
        model="",
        tail="",
        ffn="""moe {
      experts = 256 * swiglu(2048)
      shared  = swiglu(2048)
      gate    = topk(8, score = sigmoid, normalize = true, scale = 2.5,
                     groups = 8, keep_groups = 4, bias = online(rate = 1e-3))
      balance = [sequence_loss(1e-4)]
    }""",
    )
    moe = load_text(text).unwrap().model.layers[0].moe
    assert moe
    assert moe.gate.group_score == "top2_sum"


def test_a_degree_of_one_asks_for_nothing() -> None:
    text = """
    model "m" { vocab = 64; dim = 64; depth = 1; context = 64; layers { attention = mha(heads = 4); ffn = swiglu(64) } }
    parallel { pp = 1; cp = 1; etp = 1 }
    """
    assert not unsupported(load_text(text).unwrap())
