"""The rank that blocks a job, from the positions of all ranks."""

from __future__ import annotations

import pytest

from moec.runtime.ranks.verdict import LONGER, Departed, Place, Position, RankState, from_json, judge, to_json

ROWS = Place("all_to_all", "ep[0..1]", (0, 1), "layer 1 (tiny.moe:14:5)")
OTHER_ROWS = Place("all_to_all", "ep[0..1]", (2, 3), "layer 1 (tiny.moe:14:5)")
GRADIENT = Place("all_reduce", "edp[0..1]", (1, 3), "gradient of layers.1.moe.up, layer 1 (tiny.moe:14:5)")
STEP = Place("all_reduce", "", (0, 1, 2, 3), "start of a forward pass")
LOADS = Place("all_reduce", "", (0, 1, 2, 3), "expert loads")


def inside(place: Place, seconds: float, **counts: int) -> Position:
    return Position(True, place, seconds, {place.key(): 1} | {KEYS[name]: n for name, n in counts.items()})


def outside(place: Place | None, seconds: float, **counts: int) -> Position:
    return Position(False, place, seconds, {KEYS[name]: n for name, n in counts.items()})


KEYS = {"rows": ROWS.key(), "other_rows": OTHER_ROWS.key(), "gradient": GRADIENT.key(), "step": STEP.key()}


def text(states: dict[int, RankState], *, overdue: bool = True, ranks: int = 4) -> str:
    verdict = judge(states, ranks, overdue=overdue)
    assert verdict is not None
    return verdict.text


def test_a_rank_without_an_answer_is_named_with_the_longest_waiter():
    states = {0: inside(ROWS, 0.3), 2: inside(OTHER_ROWS, 0.9), 1: outside(STEP, 0.1)}
    assert text(states, overdue=False) == (
        "rank 3 no longer answers (killed, out of memory, stopped, or its machine cut off); "
        "rank 2 waits for it in all_to_all over ep[0..1], layer 1 (tiny.moe:14:5)"
    )


def test_if_no_rank_waits_the_last_collective_is_named():
    states = {0: outside(ROWS, 0.3), 1: outside(STEP, 0.9), 2: outside(None, 5.0)}
    message = text(states, overdue=False)
    assert message.endswith("; rank 0 was last in all_to_all over ep[0..1], layer 1 (tiny.moe:14:5)")


def test_several_silent_ranks():
    assert text({0: inside(ROWS, 1), 2: outside(STEP, 1)}).startswith("ranks 1, 3 no longer answer (")


def test_a_rank_that_raised_has_printed_its_error():
    verdict = judge({0: inside(ROWS, 1), 1: Departed("ValueError: no such file")}, 4, overdue=False)
    assert verdict is not None
    assert verdict.printed
    assert verdict.text.startswith("rank 1 ended with ValueError: no such file; rank 0 waits for it in all_to_all")


def test_a_rank_that_calls_sys_exit_is_named_by_the_others() -> None:
    verdict = judge({0: inside(ROWS, 1), 1: Departed("SystemExit: 0")}, 4, overdue=False)
    assert verdict is not None
    assert verdict.text.startswith("rank 1 ended with SystemExit: 0; rank 0 waits for it")
    assert not verdict.printed


def test_a_rank_that_left_early():
    states: dict[int, RankState] = {rank: inside(STEP, rank) for rank in (0, 1, 3)}
    assert text({**states, 2: Departed()}, overdue=False) == (
        "rank 2 left the job before the others; "
        "rank 3 waits for it in all_reduce over all ranks, start of a forward pass; "
        "every rank makes the same calls, as often: none stands under `if job.rank == 0`"
    )


def test_leaving_is_no_fault_if_no_rank_waits():
    assert judge({0: Departed(), 1: Departed(), 2: outside(STEP, 1), 3: Departed()}, 4, overdue=False) is None


def test_a_job_ended_from_outside_blames_no_rank():
    states = {0: inside(ROWS, 3, rows=2), 1: outside(STEP, 3), 2: outside(STEP, 1), 3: outside(STEP, 1)}
    assert judge(states, 4, overdue=False) is None
    assert judge(states, 4, overdue=True) is not None


def test_waits_are_followed_to_the_rank_that_stalls():
    """0 waits for 1 in a collective of both; 1 waits for 3 in another; 3 is in none."""
    states = {
        0: inside(ROWS, 90, rows=3),
        1: inside(GRADIENT, 80, rows=2, gradient=5),
        2: outside(STEP, 0.1),
        3: outside(OTHER_ROWS, 79, gradient=4),
    }
    assert text(states) == (
        "rank 3 has stalled: it has been in no collective for 79.0 s, since all_to_all over ep[0..1], "
        "layer 1 (tiny.moe:14:5); rank 1 waits for it in all_reduce over edp[0..1], "
        f"gradient of layers.1.moe.up, layer 1 (tiny.moe:14:5); {LONGER}"
    )


def test_ranks_in_different_collectives_of_one_communicator():
    states = {0: inside(STEP, 5, step=7), 1: inside(STEP, 5, step=7), 2: inside(LOADS, 5, step=7), 3: outside(STEP, 9)}
    message = text(states, overdue=False)
    assert message.startswith(
        "the ranks make different calls: rank 0 is in all_reduce over all ranks, start of a forward"
    )
    assert message.endswith("and rank 2 in all_reduce over all ranks, expert loads")


def test_waiting_for_an_earlier_collective_is_no_difference():
    """Sums of gradients all begin before the first wait."""
    later = Place("all_reduce", "edp[0..1]", (1, 3), "gradient of layers.0.moe.up, layer 0")
    states: dict[int, RankState] = {
        1: Position(True, GRADIENT, 5, {GRADIENT.key(): 2}, newest=False),
        3: Position(True, later, 5, {GRADIENT.key(): 2}, newest=False),
        0: outside(STEP, 1),
        2: outside(STEP, 1),
    }
    assert "does not finish" in text(states)


def test_a_ring_of_waiting_ranks():
    crossed = Place("all_reduce", "dp", (0, 1), "the model's loss")
    states = {
        0: Position(True, ROWS, 9, {ROWS.key(): 1, crossed.key(): 0}),
        1: Position(True, crossed, 8, {ROWS.key(): 0, crossed.key(): 1}),
    }
    assert text(states, ranks=2).startswith("each waits for the next: rank 0 in all_to_all")


def test_a_collective_that_all_ranks_are_in():
    states = {0: inside(ROWS, 9, rows=4), 1: inside(ROWS, 8, rows=4), 2: outside(STEP, 1), 3: outside(STEP, 1)}
    assert text(states) == (
        "ranks 0, 1 are all in all_to_all over ep[0..1], layer 1 (tiny.moe:14:5), rank 0 for 9.0 s: it does not "
        f"finish; {LONGER}"
    )


@pytest.mark.parametrize(
    "state", [Departed(), Departed("OSError: disk full"), outside(None, 1.5), inside(ROWS, 2, rows=3)]
)
def test_states_survive_json(state: RankState):
    assert from_json(to_json(state)) == state
