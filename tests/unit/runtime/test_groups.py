"""Process groups by name."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch.distributed as dist

from moec.runtime.ranks import groups
from moec.runtime.ranks.verdict import Position, from_json
from moec.runtime.ranks.watch import watch

OUTER, INNER = cast(Any, object()), cast(Any, object())


def test_an_inner_block_shadows_an_outer_one_until_it_ends() -> None:
    with groups.use({"ep": OUTER, "dp": OUTER}):
        with groups.use({"ep": INNER}):
            assert groups.resolve("ep") is INNER
            assert groups.resolve("dp") is OUTER
        assert groups.resolve("ep") is OUTER


def test_names_are_forgotten_after_the_block_even_when_it_fails() -> None:
    with pytest.raises(ZeroDivisionError), groups.use({"ep": OUTER}):
        raise ZeroDivisionError
    with pytest.raises(groups.UnknownGroupError, match=r'no process group is called "ep".*\(known: none\)'):
        groups.resolve("ep")


def test_an_unknown_name_is_reported_with_the_known_ones() -> None:
    with (
        groups.use({"ep[0..3]": OUTER, "dp": OUTER}),
        pytest.raises(groups.UnknownGroupError, match=r'"ep\[4..31\]" on this rank \(known: "dp", "ep\[0..3\]"\)'),
    ):
        groups.resolve("ep[4..31]")


@pytest.mark.parametrize(
    ("group", "ranks", "words"),
    [
        (groups.STAGE, (2, 3), "all_reduce over the ranks of a stage, loads"),
        (groups.STAGE, (0, 1, 2, 3), "all_reduce over all ranks, loads"),
        (groups.HOST, (0, 1, 2, 3), "all_reduce over all ranks, loads"),
    ],
)
def test_a_message_says_which_ranks_a_group_has(group: str, ranks: tuple[int, ...], words: str) -> None:
    store = dist.HashStore()
    with watch(store, 2, 4, 60.0) as of_rank:
        of_rank.enter("all_reduce", group, ranks, "loads", True)
        of_rank._publish_position()
        state = from_json(store.get("at_2"))
    assert isinstance(state, Position)
    assert str(state.place) == words
