"""Seconds of exchanges that moec's jobs do not run yet, against numbers computed by hand."""

from __future__ import annotations

from math import comb

import pytest
from support.tables import each_row

from moec.grammar import load_text
from moec.passes.cost.exchange import Exchange, remote_nodes
from moec.passes.cost.groups import Group
from moec.passes.cost.overlap import overlapped
from moec.passes.cost.rates import ClusterRates
from moec.passes.ir.work.cost import Choices

TEXT = """
device "d" { kind = cuda; memory = 80GB; bandwidth = 1TB/s; peak { bf16 = 100TFLOPS }; achieved { memory = 1 } }
cluster "c" { device = d
  level "node" { size = 8; bandwidth = 100GB/s; latency = 10us; achieved { all_to_all = 1 } }
  level "rail" { size = 4; bandwidth = 10GB/s; latency = 20us; achieved { all_to_all = 1 } }
}
model "m" {
  vocab = 64; dim = 16; depth = 1; context = 8; layers { attention = mha(heads = 2, rope = rope()); ffn = swiglu(16) }
}
"""
WHOLE, SENT = 32e9, 31e9
"""Bytes of a rank's rows, and of those that it sends to the 31 others of four nodes."""


def rates(exchange: Exchange) -> ClusterRates:
    return ClusterRates(load_text(TEXT).unwrap().cluster, exchange=exchange)


def test_a_hierarchical_exchange_has_fewer_messages_and_sorts_its_rows() -> None:
    hierarchical = rates(Exchange("hierarchical"))
    inside = WHOLE * 7 / 8 / 100e9 + 7 * 10e-6
    across = WHOLE * 3 / 4 / 10e9 + 3 * 20e-6
    assert hierarchical.collective("all_to_all", SENT, Group(32, 1)) == pytest.approx(
        inside + across + 4 * WHOLE / 1e12
    )
    # Of few bytes 10 messages instead of 24 count.
    few = [rates(Exchange(how)).collective("all_to_all", 3.1e3, Group(32, 1)) for how in ("linear", "hierarchical")]
    assert few == pytest.approx([24 * 20e-6, 7 * 10e-6 + 3 * 20e-6], rel=0.02)


@each_row("group", [Group(8, 1), Group(4, 8)])
def test_on_one_level_both_are_the_same(group: Group) -> None:
    linear, hierarchical = (
        rates(Exchange(how)).collective("all_to_all", SENT, group) for how in ("linear", "hierarchical")
    )
    copies = 4 * SENT * group.ranks / (group.ranks - 1) / 1e12
    assert hierarchical - linear == pytest.approx(copies if group.stride > 1 else 0)


def test_a_token_crosses_once_for_each_node_of_its_experts() -> None:
    choices = Choices(number=8, experts=256)
    remote = 3 * (1 - comb(192, 8) / comb(256, 8))
    assert remote_nodes(choices, 4) == pytest.approx(remote)
    found = rates(Exchange(once_per_node=True)).collective("all_to_all", SENT, Group(32, 1), choices)
    assert found == pytest.approx(WHOLE * remote / 8 / 10e9 + 24 * 20e-6)
    limited = Choices(number=8, experts=256, groups=8, kept=4)
    assert remote_nodes(limited, 8) == pytest.approx(4 * (1 - comb(96, 8) / comb(128, 8)) * 7 / 8)


@each_row("chunks, interference, seconds", [(1, 0.5, 6.0), (2, 0.0, 4.5), (4, 0.0, 3.75), (2, 0.5, 5.25)])
def test_chunks_are_sent_beside_those_that_are_computed(chunks: int, interference: float, seconds: float) -> None:
    """2 s there, 3 s of experts, 1 s back. Of two chunks both streams are busy for the second's 1 s there and the
    first's 0.5 s back, which take half as long again."""
    assert overlapped(2 / chunks, 3 / chunks, 1 / chunks, chunks, interference) == pytest.approx(seconds)
