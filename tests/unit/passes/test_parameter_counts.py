"""Counts of parameters: arithmetic by hand, agreement with `tally`, and the notation."""

from support.plans import moe_spec
from support.tables import each_row

from moec.driver import to_spec
from moec.grammar.resolve.library import library_names
from moec.passes.cost.parameter_counts import Elements, count_parameters, shape_of, short
from moec.passes.cost.totals import tally
from moec.passes.pipeline import compile_program

MOE = """\
model "m" {{ vocab = 32; dim = 16; depth = 4; context = 8; dtype = fp32
  layers {{ attention = mha(heads = 2); ffn = gelu(8) }}
  layers 1..3 step 2 {{ moe {{ {} }} }}
  {}
}}
"""


def counts(text: str):
    spec = to_spec(text)
    return count_parameters(compile_program(spec).program, spec)


def test_parts_agree_with_arithmetic_by_hand():
    spec = moe_spec(ranks=4, ep=2, experts=8, dim=16, depth=3, batch=8, sequence=8)
    found = count_parameters(compile_program(spec).program, spec)
    vocab, dim, hidden, experts = 32, 16, 16, 8
    expert = 3 * dim * hidden
    assert found.outside == {
        "embedding": Elements(vocab * dim, vocab * dim, vocab * dim),
        "norm": Elements(dim, dim, dim),
        "head": Elements(vocab * dim, vocab * dim, vocab * dim),
    }
    dense, sparse = found.layers
    assert (dense.layers, sparse.layers) == ((0,), (1, 2))
    assert sparse.parts["moe.experts"] == Elements(experts * expert, 2 * expert, experts // 2 * expert)
    assert sparse.parts["moe.gate"] == Elements(experts * dim, experts * dim, experts * dim)
    assert "moe.experts" not in dense.parts
    whole = sum((part for part in found.outside.values()), start=dense.one_layer) + sparse.one_layer.times(2)
    assert found.whole == whole


@each_row("name", library_names("models"))
def test_sums_are_those_of_the_tally(name: str):
    spec = to_spec(f'use "models/{name}"\n')
    program = compile_program(spec).program
    found, tallied = count_parameters(program, spec).whole, tally(program, spec)
    assert found == Elements(tallied.parameters, tallied.active_parameters, tallied.local_parameters)


def test_zero_cuts_what_a_rank_holds():
    text = MOE.format("experts = 4 * gelu(8); gate = topk(2)", "")
    cluster = 'cluster "c" { device = cpu; level "l" { size = 4 } }\ntrain { batch = 4; sequence = 8 }\n'
    whole = counts(f"{text}{cluster}parallel {{ ep = 2 }}\n").whole
    cut = counts(f"{text}{cluster}parallel {{ ep = 2; zero = 3 }}\n").whole
    assert (cut.total, cut.active) == (whole.total, whole.active)
    assert cut.per_rank < whole.per_rank < whole.total


@each_row(
    ("moe", "beside", "shape"),
    [
        ("experts = 4 * gelu(8); gate = topk(2)", "", ("4E", "2K", "0S")),
        ("experts = 4 * gelu(8); gate = topk(2); shared = gelu(24)", "", ("4E", "2K", "3S")),
        ("experts = 4 * gelu(8); gate = topk(2); shared = gelu(20)", "", ("4E", "2K", "1S")),
        ("experts = 4 * gelu(8); gate = topk(2); shared = swiglu(16)", "", ("4E", "2K", "1S")),
        ("experts = 4 * gelu(8); gate = switch(); residual = gelu(8)", "", ("4E", "1K", "1S")),
        ("experts = 4 * gelu(8); gate = gshard()", "", ("4E", "2K", "0S")),
        ("experts = 4 * gelu(8); gate = expert_choice(3 / 2)", "", ("4E", "1.5K", "0S")),
        ("experts = 4 * gelu(8); gate = dselect_k(2)", "", ("4E", "2K", "0S")),
        ("experts = 4 * gelu(8); gate = dense()", "", ("4E", "4K", "0S")),
        ("experts = 4 * gelu(8); gate = soft()", "", ("4E", "4K", "0S")),
        ("experts = 4 * lora(2); gate = topk(2); shared = gelu(8)", "", ("4E", "2K", "1S")),
        ("experts = [4 * gelu(8), 2 * gelu(4)]; gate = topk(2)", "", ("6E", "2K", "0S")),
        (
            "experts = 4 * gelu(8); gate = topk(2)",
            "layers 3 { moe { experts = 8 * gelu(8) } }",
            ("4/8E", "2K", "0S"),
        ),
    ],
)
def test_the_notation_counts_experts(moe: str, beside: str, shape: tuple[str, str, str]):
    assert shape_of(to_spec(MOE.format(moe, beside)).subject) == shape


def test_the_notation_counts_pairs_of_an_inner_mixture():
    inner = 'layer "inner" { moe { experts = 4 * gelu(8); gate = topk(2) } }\n'
    spec = to_spec(MOE.format('experts = 3 * mixture("inner"); gate = topk(1)', "") + inner)
    assert shape_of(spec.subject) == ("12E", "2K", "0S")


def test_a_dense_model_has_no_experts():
    found = counts(MOE.format("experts = 4 * gelu(8); gate = topk(2)", "layers { ffn = gelu(8) }"))
    assert found.notation.endswith("-0E-0K-0S")
    assert found.whole.total == found.whole.active


@each_row(
    ("number", "text"),
    [
        (46_702_792_704, "46.7B"),
        (1_026_408_209_408, "1.03T"),
        (999_400, "999k"),
        (999_600, "1.00M"),
        (671_026_404_352, "671B"),
        (12, "12"),
    ],
)
def test_sizes_have_three_digits(number: int, text: str):
    assert short(number) == text
