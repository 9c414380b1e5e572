"""`pp`, `virtual`, `schedule`, `stages`: the degrees that they give, and files whose words do not fit each other."""

from __future__ import annotations

import re

import pytest
from support.tables import each_row

from moec.driver import check_text
from moec.driver import compile as compile_source
from moec.grammar import load_text
from moec.grammar.diagnostics import Diagnostic
from moec.grammar.printer import to_text
from moec.passes.degrees.degree_rules import problems_of
from moec.passes.degrees.degrees import Degrees, choose_degrees
from moec.passes.degrees.stated_degrees import mixtures_of

FILE = """
model "m" {{ vocab = 32; dim = 16; context = 64; depth = {depth}; dtype = fp32
  layers {{ attention = mha(heads = 4); moe {{ experts = 8 * gelu(8); gate = {gate} }} }}
}}
cluster "c" {{ device = cpu; level "node" {{ size = 4; bandwidth = 1GB/s }}
  level "rail" {{ size = {nodes}; bandwidth = 1GB/s }} }}
parallel {{ {words} }}
{train}
"""


def text(words: str, depth: int = 9, nodes: int = 2, batch: int | None = 32, gate: str = "topk(2)") -> str:
    """A file of 4 ranks per node."""
    train = f"train {{ batch = {batch}; sequence = 8 }}" if batch else ""
    return FILE.format(words=words, depth=depth, nodes=nodes, train=train, gate=gate)


def errors(file: str) -> list[Diagnostic]:
    """The diagnostics of `moec check`."""
    return list(check_text(file, "m.moe", None, {}))  # type: ignore[arg-type]


def degrees(words: str, **other: int | None) -> Degrees:
    return choose_degrees(load_text(text(words, **other)).unwrap())  # type: ignore[arg-type]


# ---- degrees -------------------------------------------------------------------------------------------


def test_all_degrees_but_pp_factor_the_ranks_of_a_stage() -> None:
    found = degrees("pp = 2; tp = 2; etp = 2", nodes=4)
    assert (found.ranks, found.all_ranks, found.dp, found.tp) == (8, 16, 4, 2)
    assert [(e.ep, e.etp, e.edp) for e in found.experts] == [(4, 2, 1)]


@each_row(
    ("schedule", "virtual"),
    [(None, 1), ("gpipe", 1), ("one_f_one_b", 1), ("interleaved", 2), ("looped_bfs", 2)],
)
def test_a_schedule_decides_how_many_stages_a_rank_has(schedule: str | None, virtual: int) -> None:
    found = degrees("pp = 2" + (f"; schedule = {schedule}" if schedule else ""))
    assert (found.schedule, found.virtual) == (schedule or "one_f_one_b", virtual)


@each_row(
    ("words", "batch", "microbatches"),
    [
        ("pp = 4", 32, 4),
        ("pp = 4", 24, 4),
        ("pp = 4", 10, 5),
        ("pp = 4; schedule = interleaved", 12, 6),
        ("pp = 4; microbatches = 2", 12, 2),
        ("pp = 4", None, 4),
        ("pp = 1", 32, 1),
    ],
)
def test_micro_batches_are_the_fewest_from_pp_on_that_divide(words: str, batch: int | None, microbatches: int) -> None:
    assert degrees(words, batch=batch).microbatches == microbatches


def test_stages_are_ranges_or_numbers_and_are_written_again() -> None:
    spec = load_text(text("pp = 2; virtual = 2; schedule = interleaved; stages = [0..3, 4, 5..6, 7..8]")).unwrap()
    assert choose_degrees(spec).last_layers == (3, 4, 6, 8)
    assert "stages = [0..3, 4, 5..6, 7..8]" in to_text(spec)
    assert load_text(to_text(spec)).unwrap() == spec


def test_a_plan_has_the_stages_that_the_file_says() -> None:
    program = compile_source(load_text(text("pp = 2; stages = [0..2, 3..8]")).unwrap()).program
    assert (len(program.stages), program.num_ranks, program.schedule) == (2, 8, "one_f_one_b")
    calls = [sum(op.mnemonic == "call" for op in program.block(stage.forward).ops) for stage in program.stages]
    assert calls == [3, 6]


# ---- errors --------------------------------------------------------------------------------------------

ADVICE = re.compile(r"(\w+) = (\[[^\]]*\]|\w+)")

WRONG = [
    ("pp = 3", {}, ["MOE0312"], "8 / 3 is not whole"),
    ("pp = 16", {}, ["MOE0312", "MOE0378"], "8 / 16 is not whole"),
    ("pp = 2; tp = 3", {}, ["MOE0312", "MOE0318", "MOE0319"], "8 / (3 * 2) is not whole"),
    ("pp = 2; ep = 8", {}, ["MOE0312"], "8 / (8 * 2) is not whole"),
    ("pp = 2; dp = 8", {}, ["MOE0310"], "dp = 8, pp = 2, but the cluster has 8 ranks"),
    ("pp = 2", {"batch": 6}, ["MOE0313"], "6 sequences over 4 data-parallel ranks"),
    ("pp = 8", {"depth": 6}, ["MOE0378"], "8 stages"),
    ("pp = 4; schedule = interleaved", {"depth": 6}, ["MOE0378"], "4 * 2 stages"),
    ("pp = 2; stages = [0..3, 5..8]", {}, ["MOE0379"], "`5..8` stands where layer 4 comes next"),
    ("pp = 2; stages = [0..4, 4..8]", {}, ["MOE0379"], "`4..8` stands where layer 5 comes next"),
    ("pp = 2; stages = [4..8, 0..3]", {}, ["MOE0379"], "`4..8` stands where layer 0 comes next"),
    ("pp = 2; stages = [0..3, 4..9]", {}, ["MOE0379"], "`4..9` ends after layer 8, the last"),
    ("pp = 2; stages = [0..3, 4..7]", {}, ["MOE0379"], "layer 8 in none of them"),
    ("pp = 2; stages = [3..0, 4..8]", {}, ["MOE0379"], "`3..0` has no layer"),
    ("pp = 2; stages = []", {}, ["MOE0379"], "layers 0..8 in none of them"),
    ("pp = 2; stages = [0..3, 4..5, 6..8]", {}, ["MOE0379"], "3 ranges for 2 stages"),
    ("pp = 2; virtual = 3", {}, ["MOE0377"], "a rank has 1 with `one_f_one_b`, the default"),
    ("pp = 2; virtual = 2; schedule = gpipe", {}, ["MOE0377"], "a rank has 1 with `gpipe`"),
    ("schedule = gpipe", {}, ["MOE0376"], "`schedule` without `pp`"),
    ("stages = [0..3, 4..8]", {}, ["MOE0376"], "`stages` without `pp`"),
    (
        "pp = 2; schedule = interleaved; microbatches = 5",
        {"batch": 40},
        ["MOE0380"],
        "`interleaved` takes them in 2 equal rounds on 2 ranks",
    ),
    (
        "pp = 2; schedule = interleaved; microbatches = 5",
        {"batch": None},
        ["MOE0380"],
        "`interleaved` takes them in 2 equal rounds on 2 ranks",
    ),
    ("pp = 2; microbatches = 3", {}, ["MOE0330"], "8 / 3 is not whole"),
    ("pp = 4", {"batch": 6}, ["MOE0330"], "no number of micro-batches from 4 on divides 3"),
]


@each_row(("words", "other", "codes", "message"), WRONG)
def test_words_that_do_not_fit_are_refused_and_the_help_mends_them(
    words: str, other: dict[str, int | None], codes: list[str], message: str
) -> None:
    file = text(words, **other)  # type: ignore[arg-type]
    found = errors(file)
    assert (found[0].code, found[0].message) == (codes[0], message)
    assert [e.code for e in found] == codes
    for error in found:
        assert error.span
        for way in re.split(r",? or ", error.help):
            mended = file
            if left_out := re.search(r"leave `(\w+)` out", way):
                mended = re.sub(rf"\b{left_out[1]} = (\[[^\]]*\]|\w+);?", "", file)
            for name, value in ADVICE.findall(way):
                is_there = re.search(rf"\b{name} = ", file)
                start, stated = (rf"\b{name} = (\[[^\]]*\]|\w+)", f"{name} = {value}")
                mended = (
                    re.sub(start, stated, mended)
                    if is_there
                    else mended.replace("parallel {", f"parallel {{ {stated};")
                )
            assert mended != file, way
            assert errors(mended) == [], (way, mended)


def test_a_v_has_two_stages_on_each_rank() -> None:
    spec = load_text(text("pp = 2; virtual = 3; schedule = zero_bubble_v")).unwrap()
    (problem,) = problems_of(spec, mixtures_of(spec))
    assert (problem.code, problem.help) == ("MOE0377", "set `virtual = 2`")


def test_numbers_of_layers_are_offered_as_the_ranges_that_they_mean() -> None:
    spec = load_text(text("pp = 4; stages = [3, 2, 2, 2]")).unwrap()
    (problem,) = problems_of(spec, mixtures_of(spec))
    assert problem.code == "MOE0379"
    assert "set `stages = [0..2, 3..4, 5..6, 7..8]`" in str(problem.help)


@each_row(
    ("words", "message"),
    [
        ("pp = 3; stages = [0..2, 3..5, 6..8]", "3 ranges for 4 stages, with the `pp = 4` that fits"),
        ("pp = 2; virtual = 20; schedule = looped_bfs; stages = [0..3, 4..8]", "2 ranges, and no `pp` fits"),
    ],
)
def test_ranges_are_counted_against_a_pp_that_fits(words: str, message: str) -> None:
    assert [e.message for e in errors(text(words)) if e.code == "MOE0379"] == [message]


def test_dual_pipe_v_takes_two_micro_batches_for_each_rank() -> None:
    words = "pp = 2; schedule = dual_pipe_v"
    assert degrees(words).microbatches == 4
    spec = load_text(text(f"{words}; microbatches = 2")).unwrap()
    (problem,) = problems_of(spec, mixtures_of(spec))
    assert (problem.code, problem.help) == ("MOE0380", "set `microbatches = 4`")


# ---- the gate `topology` -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "nodes", "is_right"), [("pp = 2", 2, True), ("pp = 4", 2, True), ("pp = 2", 3, False)]
)
def test_topology_needs_stages_that_share_nodes_evenly(words: str, nodes: int, is_right: bool) -> None:
    file = text(words, nodes=nodes, batch=48, gate="topology(2, weight = 0.1)  # accept: MOE0315\n")
    assert [e.code for e in errors(file)] == ([] if is_right else ["MOE0202"])
