"""place: degrees checked and defaults filled, by the rules of the language."""

import pytest
from support.plans import moe_spec, moe_text
from support.tables import each_row

from moec.driver import check
from moec.grammar.diagnostics import Diagnostic, DiagnosticError
from moec.passes.degrees.degrees import choose_degrees


def problems(**options: object) -> list[Diagnostic]:
    with pytest.raises(DiagnosticError) as caught:
        choose_degrees(moe_spec(**options))
    return list(caught.value.diagnostics)


@each_row(("ranks", "experts", "ep"), [(4, 8, 4), (6, 8, 2), (8, 4, 4), (5, 8, 1), (1, 8, 1), (12, 18, 6)])
def test_ep_defaults_to_the_largest_divisor_of_ranks_and_experts(ranks: int, experts: int, ep: int):
    degrees = choose_degrees(moe_spec(ranks=ranks, experts=experts, ep=None, batch=ranks))
    (of_experts,) = degrees.experts
    assert (of_experts.ep, of_experts.edp, degrees.dp) == (ep, ranks // ep, ranks)
    assert of_experts.layers == (1, 2)
    assert not of_experts.stated
    assert "dp" not in degrees.stated


def test_stated_degrees_are_kept():
    degrees = choose_degrees(moe_spec(ranks=4, ep=2, dp=4))
    (of_experts,) = degrees.experts
    assert (degrees.dp, of_experts.ep, of_experts.edp) == (4, 2, 2)
    assert "dp" in degrees.stated
    assert of_experts.stated


def test_experts_not_divisible_by_ep_names_both_places_and_a_way_out():
    (problem,) = problems(experts=6, ep=4)
    assert problem.code == "MOE0311"
    assert (problem.span.line, problem.message) == (19, "6 / 4 leaves 2 experts over")
    assert [(label.span.line, label.message) for label in problem.labels] == [
        (10, "6 experts declared here (layers 1..2)")
    ]
    assert problem.help == "set `ep = 2` (3 per rank) or `experts = 8 * …` (2 per rank)"


def test_a_mesh_that_does_not_multiply_to_the_ranks_is_named():
    (problem,) = problems(dp=2)
    assert problem.code == "MOE0310"
    assert problem.span.line == 19
    assert problem.labels[0].message == "4 ranks"


def test_ep_that_does_not_divide_the_ranks_suggests_the_next_that_does():
    codes = {problem.code: problem for problem in problems(ranks=4, ep=3, experts=6)}
    assert codes["MOE0312"].help == "set `ep = 2`"


def test_a_batch_that_does_not_divide_over_the_ranks_suggests_one_that_does():
    (problem,) = problems(batch=6)
    assert (problem.code, problem.help) == ("MOE0313", "set `batch = 8`")


def test_all_problems_are_reported_at_once():
    assert {p.code for p in problems(dp=3, ep=3, batch=7)} == {"MOE0310", "MOE0311", "MOE0312", "MOE0313"}


def test_check_finds_what_place_finds(tmp_path):
    file = tmp_path / "bad.moe"
    file.write_text(moe_text(dp=2))
    assert [diagnostic.code for diagnostic in check(file)] == ["MOE0310"]


@each_row("group", ["sequence", "batch", "rank"])
@each_row(("tp", "batch", "ok"), [(1, 6, False), (2, 6, True), (2, 7, False), (4, 7, True)])
def test_a_batch_that_the_data_parallel_ranks_do_not_divide_is_refused_for_every_group(
    group: str, tp: int, batch: int, ok: bool
):
    options = {"tp": tp, "batch": batch, "beside": f"capacity = factor(1.0); group = {group}"}
    if ok:
        choose_degrees(moe_spec(**options))
    else:
        (problem,) = problems(**options)
        assert problem.code == "MOE0313"
