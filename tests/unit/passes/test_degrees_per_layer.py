"""A degree of expert parallelism per range of layers: its layers, its divisibility, its meshes."""

from __future__ import annotations

import pytest
from support.plans import moe_spec
from support.tables import each_row

from moec.grammar import check, load_text, to_text
from moec.grammar.diagnostics import Diagnostic, DiagnosticError
from moec.grammar.source import Span
from moec.grammar.spec import ParallelLayers
from moec.passes.cost.totals import tally
from moec.passes.degrees.degrees import choose_degrees
from moec.passes.ir import Program
from moec.passes.ir.ops import Call
from moec.passes.ir.texts.parse import parse_program
from moec.passes.ir.texts.text import print_program
from moec.passes.layer_names import layer_set_name
from moec.passes.pipeline import compile_program

TEXT = """\
model "m" {{
  vocab = 32; dim = 16; depth = {depth}; context = 8; dtype = fp32
  layers {{ attention = mha(heads = 4); ffn = gelu(8) }}
  {mixtures}
}}
cluster "here" {{ device = cpu; level "node" {{ size = 8 }} }}
parallel {{ {degrees} }}
"""
MOE = "moe { experts = 8 * gelu(8); gate = topk(2) }"


def text(degrees: str, mixtures: str = f"layers 1..5 {{ {MOE} }}", depth: int = 6) -> str:
    return TEXT.format(degrees=degrees, mixtures=mixtures, depth=depth)


def chosen(degrees: str, mixtures: str = f"layers 1..5 {{ {MOE} }}") -> list[tuple[tuple[int, ...], int, bool]]:
    spec = load_text(text(degrees, mixtures)).unwrap()
    return [(e.layers, e.ep, e.stated) for e in choose_degrees(spec).experts]


def problems(degrees: str, mixtures: str = f"layers 1..5 {{ {MOE} }}") -> list[Diagnostic]:
    with pytest.raises(DiagnosticError) as caught:
        choose_degrees(load_text(text(degrees, mixtures)).unwrap())
    return list(caught.value.diagnostics)


@each_row(
    ("degrees", "expected"),
    [
        ("layers 1..2 { ep = 4 }; layers 3..5 { ep = 2 }", [((1, 2), 4, True), ((3, 4, 5), 2, True)]),
        ("ep = 4; layers 3 { ep = 2 }", [((1, 2, 4, 5), 4, True), ((3,), 2, True)]),
        ("layers 3 { ep = 2 }; ep = 4", [((1, 2, 4, 5), 4, True), ((3,), 2, True)]),
        ("layers 0..5 { ep = 2 }; layers [4, 2] { ep = 8 }", [((1, 3, 5), 2, True), ((2, 4), 8, True)]),
        ("ep = 2; layers 2..5 { ep = 4 }; layers 3 { ep = 2 }", [((1, 3), 2, True), ((2, 4, 5), 4, True)]),
        ("layers 0 { ep = 2 }", [((1, 2, 3, 4, 5), 8, False)]),
        ("layers 1..2 { ep = 2 }", [((1, 2), 2, True), ((3, 4, 5), 8, False)]),
        ("layers 1..2 { ep = 8 }", [((1, 2, 3, 4, 5), 8, False)]),
        ("ep = 2; layers { ep = 4 }", [((1, 2, 3, 4, 5), 4, True)]),
        ("ep = 2; layers [] { ep = 4 }", [((1, 2, 3, 4, 5), 2, True)]),
        ("ep = 2; layers 1 { }", [((1, 2, 3, 4, 5), 2, True)]),
    ],
)  # fmt: skip
def test_the_last_block_that_names_a_layer_counts(degrees: str, expected: list[tuple[tuple[int, ...], int, bool]]):
    assert chosen(degrees) == expected


def test_the_default_is_for_the_layers_without_a_range_alone():
    mixtures = f"layers 1..5 {{ {MOE} }} layers 5 {{ moe {{ experts = 3 * gelu(8) }} }}"
    assert chosen("", mixtures) == [((1, 2, 3, 4, 5), 1, False)]
    assert chosen("layers 5 { ep = 1 }", mixtures) == [((1, 2, 3, 4), 8, False), ((5,), 1, True)]


def test_a_range_of_dense_layers_concerns_nothing_but_divides_the_ranks():
    assert chosen("ep = 8; layers 0 { ep = 4 }", "") == []
    (problem,) = problems("layers 0 { ep = 3 }", "")
    assert problem.code == "MOE0312"


def test_a_degree_that_does_not_divide_the_experts_names_its_range_and_the_experts():
    mixtures = f"layers 1..5 {{ {MOE} }} layers 4..5 {{ moe {{ experts = 6 * gelu(8) }} }}"
    (problem,) = problems("ep = 2; layers 3..5 { ep = 4 }", mixtures)
    assert (problem.code, problem.message) == ("MOE0311", "6 / 4 leaves 2 experts over")
    assert pointed_at(problem.span) == "4"
    assert [label.message for label in problem.labels] == ["6 experts declared here (layers 4..5)"]
    assert pointed_at(problem.labels[0].span) == "6 * gelu(8)"


def test_an_overridden_degree_need_not_divide_the_experts():
    mixtures = f"layers 1..5 {{ {MOE} }} layers 4..5 {{ moe {{ experts = 6 * gelu(8) }} }}"
    assert chosen("ep = 4; layers 4..5 { ep = 2 }", mixtures) == [((1, 2, 3), 4, True), ((4, 5), 2, True)]


def test_a_degree_that_does_not_divide_the_ranks_names_its_range_and_the_cluster():
    (problem,) = problems("layers 1..2 { ep = 3 }", "layers 1..2 { moe { experts = 6 * gelu(8); gate = topk(2) } }")
    assert (problem.code, pointed_at(problem.span)) == ("MOE0312", "3")
    assert [label.message for label in problem.labels] == ["8 ranks"]


def test_a_range_beyond_the_last_layer_is_refused():
    found = load_text(text("layers 4..6 { ep = 2 }")).diagnostics
    assert [diagnostic.code for diagnostic in found] == ["MOE0306"]
    spec = load_text(text("")).unwrap()
    outside = spec.replace(parallel=spec.parallel.replace(layers=(ParallelLayers(layers=(4, 6), ep=2),)))
    assert [diagnostic.code for diagnostic in check(outside)] == ["MOE0306"]


def pointed_at(span: Span | None) -> str:
    assert span is not None
    return span.source.text[span.start : span.end]


def program(degrees: str, **given: str) -> Program:
    return compile_program(load_text(text(degrees, **given)).unwrap()).program


def test_identical_layers_with_different_degrees_become_blocks_of_their_own():
    placed = program("ep = 8; layers 1..2 { ep = 2 }; layers 4 { ep = 2 }")
    assert [mesh.name for mesh in placed.meshes] == ["dense", "experts[1..2,4]", "experts[3..5 step 2]"]
    assert {block.name: block.experts for block in placed.blocks} == {
        "layers[0]": None,
        "layers[1..2,4]": "experts[1..2,4]",
        "layers[3..5 step 2]": "experts[3..5 step 2]",
        "forward": None,
        "valid_labels": None,
        "loss": None,
    }
    calls = [op.block for op in placed.block("forward").ops if isinstance(op, Call)]
    assert [calls.index(name) for name in ("layers[0]", "layers[1..2,4]", "layers[3..5 step 2]")] == [0, 1, 3]
    assert calls[4] == "layers[1..2,4]"
    assert parse_program(print_program(placed)) == placed


def test_different_layers_with_one_degree_share_a_mesh_and_its_groups():
    placed = program("ep = 4", mixtures=f"layers 1..5 {{ {MOE} }} layers 3 {{ moe {{ experts = 16 * gelu(8) }} }}")
    assert [mesh.name for mesh in placed.meshes] == ["dense", "experts[1..5]"]
    assert placed.block("layers[3]").experts == placed.block("layers[1..2,4..5]").experts == "experts[1..5]"


def test_ten_thousand_layers_make_as_many_blocks_as_there_are_degrees():
    degrees = "ep = 8; layers 1..9999 step 2 { ep = 4 }; layers 5000..9999 { ep = 2 }"
    spec = load_text(text(degrees, f"layers {{ {MOE} }}", 10_000)).unwrap()
    placed = compile_program(spec, stop_after="place").program
    assert [block.name for block in placed.blocks] == [
        "layers[0..4998 step 2]",
        "layers[1..4999 step 2]",
        "layers[5000..9999]",
        "forward",
        "valid_labels",
        "loss",
    ]


@each_row(
    ("layers", "name"),
    [
        ([7], "[7]"),
        ([4, 5, 6], "[4..6]"),
        ([1, 3, 5], "[1..5 step 2]"),
        ([3, 7, 8, 9], "[3,7..9]"),
        ([0, *range(1, 40, 3)], "[0..1,4,7,10,13,16,19,22 and 5 more]"),
    ],
)
def test_a_set_of_layers_has_a_short_name(layers: list[int], name: str):
    assert layer_set_name(layers) == name


def test_the_canonical_text_reads_back():
    spec = load_text(
        text("ep = 8; layers 1..5 step 2 { ep = 2 }; layers { ep = 4 }; layers [1, 4] { ep = 2 }")
    ).unwrap()
    assert load_text(to_text(spec)).unwrap() == spec


def test_traffic_is_counted_over_the_mesh_of_each_layer():
    spec = moe_spec(ranks=8, experts=8, mixtures=((8, 2), (16, 4), (32, None)), ep=8, batch=8, sequence=8)
    flows = {(flow.group, flow.purpose): flow for flow in tally(compile_program(spec).program, spec).traffic}
    rows, dim, width = 8 * 2, 16, 4
    for group, ranks in (("ep[1]", 2), ("ep[2]", 4), ("ep[3]", 8)):
        flow = flows[group, "all_to_all of rows"]
        assert flow.ranks == ranks
        # A row goes to its expert and back, in forward and in backward; its weight goes there, and its gradient back.
        assert flow.bytes == (2 * 2 * rows * dim * width + 2 * rows * 4) * (ranks - 1) / ranks * 1
    assert flows["edp[1]", "all_reduce of gradients"].ranks == 4
    assert flows["edp[2]", "all_reduce of gradients"].ranks == 2
    assert ("edp[3]", "all_reduce of gradients") not in flows
